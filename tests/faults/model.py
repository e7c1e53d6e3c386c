"""A language model small enough for numpy and real enough that every fault acts through logits.

Two decoder layers with rotary attention and a routed mixture of experts, a confidence factor that makes some positions
sharp and others flat (as in real text), and logits with a constant offset. Rounding noise enters the hidden state, so
its effect on a logprob grows with the spread of the logits and vanishes where a token is certain, as with bf16.

Shape legend: S samples, L positions, D hidden, H heads, E experts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

Weights = dict[str, np.ndarray]
EOS = 0


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """Sizes of the toy model; ``gain`` is the typical spread of logits, ``offset`` their constant part."""

    vocab: int = 600
    padded_vocab: int = 640
    hidden: int = 64
    heads: int = 4
    layers: int = 2
    experts: int = 1
    ffn: int = 64
    gain: float = 5.5
    offset: float = 4.0


@dataclasses.dataclass(frozen=True)
class Knobs:
    """What one side of the run does to the arithmetic. The default is clean fp32.

    Attributes:
        noise: relative size of rounding noise added to hidden states (bf16 storage: about 0.002 to 0.01).
        angle: maps rotary angles, e.g. to a narrower type.
        router_noise: absolute noise of router scores, which flips near ties.
    """

    noise: float = 0.0
    angle: Callable[[np.ndarray], np.ndarray] | None = None
    router_noise: float = 0.0


def make_weights(cfg: ToyConfig, seed: int) -> Weights:
    """Random fp32 weights of one model."""
    rng = np.random.default_rng([seed, 17])
    d, f = cfg.hidden, cfg.ffn
    w: Weights = {"embed": rng.standard_normal((cfg.vocab, d), dtype=np.float32)}
    for i in range(cfg.layers):
        for name in ("q", "k", "v", "o"):
            w[f"{i}.{name}"] = rng.standard_normal((d, d), dtype=np.float32) / np.float32(np.sqrt(d))
        w[f"{i}.router"] = rng.standard_normal((d, cfg.experts), dtype=np.float32) / np.float32(np.sqrt(d))
        w[f"{i}.up"] = rng.standard_normal((cfg.experts, d, f), dtype=np.float32) / np.float32(np.sqrt(d))
        w[f"{i}.down"] = rng.standard_normal((cfg.experts, f, d), dtype=np.float32) / np.float32(np.sqrt(f))
    w["head"] = rng.standard_normal((cfg.vocab, d), dtype=np.float32) / np.float32(np.sqrt(d))
    w["mean"] = rng.standard_normal(d).astype(np.float32)
    # Hidden states share a direction, as in real models; the unigram tilt it would give is mostly cancelled here.
    w["tilt"] = np.float32(0.7) * (w["head"] @ w["mean"])
    w["sharp"] = rng.standard_normal(d).astype(np.float32) / np.float32(np.sqrt(d))
    w["stop"] = rng.standard_normal(d).astype(np.float32) / np.float32(np.sqrt(d))
    w["stop_mean"] = np.float32(0.8) * (w["mean"] @ w["stop"])
    ranks = rng.permutation(cfg.vocab) + 1
    w["bias"] = (-0.7 * np.log(ranks)).astype(np.float32)
    return w


def rms(x: np.ndarray) -> np.ndarray:
    """Scale the last axis to unit mean square."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))


def rotate(x: np.ndarray, positions: np.ndarray, knobs: Knobs) -> np.ndarray:
    """Rotary embedding of x [S, L, H, K] at integer positions [L]."""
    half = x.shape[-1] // 2
    freq = (1.0 / 1000.0 ** (np.arange(half) / half)).astype(np.float32)
    angle = positions.astype(np.float32)[:, None] * freq
    if knobs.angle is not None:
        angle = knobs.angle(angle)
    c, s = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


class Decoder:
    """Runs the toy model over growing prefixes: ``extend`` takes [S, n] tokens and returns hidden states [S, n, D]."""

    def __init__(self, cfg: ToyConfig, weights: Weights, knobs: Knobs, samples: int, limit: int, rng_seed: int) -> None:
        self.cfg, self.w, self.knobs = cfg, weights, knobs
        self.rng = np.random.default_rng([rng_seed, 23])
        shape = (cfg.layers, samples, limit, cfg.heads, cfg.hidden // cfg.heads)
        self.k = np.zeros(shape, np.float32)
        self.v = np.zeros(shape, np.float32)
        self.length = 0

    def _jitter(self, x: np.ndarray) -> np.ndarray:
        if not self.knobs.noise:
            return x
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) * np.float32(self.knobs.noise)
        return x + self.rng.standard_normal(x.shape, dtype=np.float32) * scale

    def _attention(self, i: int, x: np.ndarray) -> np.ndarray:
        s, n, d = x.shape
        start, stop = self.length, self.length + n
        positions = np.arange(start, stop)
        split = (s, n, self.cfg.heads, d // self.cfg.heads)
        q = rotate((x @ self.w[f"{i}.q"]).reshape(split), positions, self.knobs)
        self.k[i, :, start:stop] = rotate((x @ self.w[f"{i}.k"]).reshape(split), positions, self.knobs)
        self.v[i, :, start:stop] = (x @ self.w[f"{i}.v"]).reshape(split)
        keys = self.k[i, :, :stop].transpose(0, 2, 3, 1)
        scores = (q.transpose(0, 2, 1, 3) @ keys) * np.float32(1.5 / np.sqrt(split[-1]))
        if n > 1:
            hidden = np.arange(stop)[None, :] > positions[:, None]
            scores = np.where(hidden[None, None], np.float32(-1e30), scores)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores @ self.v[i, :, :stop].transpose(0, 2, 1, 3)
        return out.transpose(0, 2, 1, 3).reshape(s, n, d) @ self.w[f"{i}.o"]

    def _experts(self, i: int, x: np.ndarray) -> np.ndarray:
        s, n, d = x.shape
        flat = x.reshape(-1, d)
        scores = flat @ self.w[f"{i}.router"]
        if self.knobs.router_noise:
            scores = scores + self.rng.standard_normal(scores.shape, dtype=np.float32) * np.float32(
                self.knobs.router_noise
            )
        choice = scores.argmax(axis=-1)
        out = np.empty_like(flat)
        for e in range(self.cfg.experts):
            rows = np.flatnonzero(choice == e)
            out[rows] = np.tanh(flat[rows] @ self.w[f"{i}.up"][e]) @ self.w[f"{i}.down"][e]
        return out.reshape(s, n, d)

    def extend(self, tokens: np.ndarray) -> np.ndarray:
        """Append tokens [S, n] int and return the final normalised hidden states [S, n, D] fp32."""
        x = self.w["embed"][tokens] * np.float32(0.7)
        for i in range(self.cfg.layers):
            x = self._jitter(x)
            x = x + self._attention(i, rms(x)) * np.float32(1.5)
            x = x + self._experts(i, rms(x))
        self.length += tokens.shape[1]
        return self._jitter(rms(x) + np.float32(0.8) * self.w["mean"])


def logits(cfg: ToyConfig, w: Weights, hidden: np.ndarray) -> np.ndarray:
    """fp32 logits [..., V] of final hidden states [..., D]."""
    sharp = np.exp(np.float32(1.1) * np.tanh(hidden @ w["sharp"]) + np.float32(0.3))[..., None]
    z = sharp * np.float32(cfg.gain) * (hidden @ w["head"].T - w["tilt"]) + w["bias"] + np.float32(cfg.offset)
    # The end token stays some distance below the best one, so that samples end by themselves now and then.
    distance = np.maximum(np.float32(7.0) + np.float32(2.0) * (hidden @ w["stop"] - w["stop_mean"]), np.float32(0.5))
    z[..., EOS] = z[..., EOS + 1 :].max(axis=-1) - distance
    return z


def log_softmax(z: np.ndarray) -> np.ndarray:
    """fp32 log-softmax of the last axis; -inf columns stay out."""
    top = z.max(axis=-1, keepdims=True)
    return z - (top + np.log(np.exp(z - top).sum(axis=-1, keepdims=True)))


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round fp32 to the nearest bf16 value (ties to even), kept as fp32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def to_fp16(x: np.ndarray) -> np.ndarray:
    """Round fp32 to the nearest fp16 value, kept as fp32."""
    return x.astype(np.float16).astype(np.float32)
