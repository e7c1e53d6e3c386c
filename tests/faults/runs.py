"""Base runs: prompts, sampled responses and the rollout's logprobs, before any fault.

Shape legend: S samples, P prompt tokens, T response positions (padded, ``length`` are real), V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from .model import EOS, Decoder, Knobs, ToyConfig, Weights, log_softmax, logits, make_weights


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """Everything that decides a base run; equal specs give equal runs.

    ``penalty`` is (repetition, presence, frequency) as the rollout applies it; ``quantise`` bits of the rollout's
    weights (0: none). ``noise`` is the relative bf16 noise of the rollout's hidden states.
    """

    seed: int
    samples: int = 48
    prompt: int = 32
    response: int = 120
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    noise: float = 0.001
    gain: float = 6.0
    offset: float = 4.0
    experts: int = 1
    penalty: tuple[float, float, float] = (1.0, 0.0, 0.0)
    quantise: int = 0
    lora: float = 0.05

    def config(self) -> ToyConfig:
        return ToyConfig(gain=self.gain, offset=self.offset, experts=self.experts)


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A sampled base run. ``full`` int [S, P+T]; ``rollout`` fp32 [S, T]; ``keep`` bool [S, T, V] or None."""

    spec: RunSpec
    weights: Weights
    base: Weights
    full: np.ndarray
    length: np.ndarray
    rollout: np.ndarray
    keep: np.ndarray | None

    @property
    def response(self) -> np.ndarray:
        return self.full[:, self.spec.prompt :]

    @property
    def valid(self) -> np.ndarray:
        return np.arange(self.spec.response)[None, :] < self.length[:, None]


def policy_weights(spec: RunSpec) -> tuple[Weights, Weights]:
    """(policy, base): the policy is the base model plus a low-rank update of the output projections and experts."""
    cfg = spec.config()
    base = make_weights(cfg, spec.seed)
    return add_update(base, spec.seed, spec.lora), base


def add_update(weights: Weights, seed: int, size: float, head: bool = False) -> Weights:
    """A copy with a rank-4 update of relative size ``size`` on every output projection (and the head)."""
    rng = np.random.default_rng([seed, 31])
    out = dict(weights)
    for name, value in weights.items():
        if name.endswith((".o", ".v")) or (head and name == "head"):
            a = rng.standard_normal((value.shape[0], 4), dtype=np.float32)
            b = rng.standard_normal((4, value.shape[1]), dtype=np.float32)
            delta = a @ b
            delta *= np.linalg.norm(value) / np.linalg.norm(delta)
            out[name] = value + np.float32(size) * delta
    return out


def quantise_weights(weights: Weights, bits: int) -> Weights:
    """Symmetric per-output-channel integer quantisation of every projection but the head and the embedding."""
    out = dict(weights)
    top = 2 ** (bits - 1) - 1
    for name, value in weights.items():
        if "." in name and not name.endswith("router"):
            scale = np.abs(value).max(axis=-2, keepdims=True) / top
            out[name] = (np.round(value / scale) * scale).astype(np.float32)
    return out


def truncate(z: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """bool mask of the columns kept by top-k, then top-p (the shortest prefix that reaches top_p)."""
    order = np.argsort(-z, axis=-1, kind="stable")
    ranked = np.take_along_axis(z, order, axis=-1)
    if top_k > 0:
        ranked[..., top_k:] = -np.inf
    p = np.exp(log_softmax(ranked))
    kept = (np.cumsum(p, axis=-1) - p < top_p) & (p > 0)
    out = np.zeros(z.shape, bool)
    np.put_along_axis(out, order, kept, axis=-1)
    return out


def apply_penalty(z: np.ndarray, counts: np.ndarray, penalty: tuple[float, float, float]) -> np.ndarray:
    """Repetition (multiplicative), presence and frequency penalties; ``counts`` [..., V] of tokens seen so far."""
    repetition, presence, frequency = (np.float32(x) for x in penalty)
    seen = counts > 0
    z = np.where(seen, np.where(z > 0, z / repetition, z * repetition), z)
    return z - presence * seen - frequency * counts


def token_counts(run: Run) -> np.ndarray:
    """int16 [S, T, V]: how often each id occurred before each response position, prompt included."""
    s, p, t = run.spec.samples, run.spec.prompt, run.spec.response
    counts = np.zeros((s, t, run.spec.config().vocab), np.int16)
    current = np.zeros((s, run.spec.config().vocab), np.int16)
    rows = np.arange(s)
    for j in range(p):
        np.add.at(current, (rows, run.full[:, j]), 1)
    for j in range(t):
        counts[:, j] = current
        current[rows, run.full[:, p + j]] += 1
    return counts


@functools.lru_cache(maxsize=6)
def sample_run(spec: RunSpec) -> Run:
    """Generate one base run (0.1 to 0.5 s)."""
    cfg = spec.config()
    weights, base = policy_weights(spec)
    used = quantise_weights(weights, spec.quantise) if spec.quantise else weights
    rng = np.random.default_rng([spec.seed, 41])
    s, total = spec.samples, spec.prompt + spec.response
    full = np.zeros((s, total), np.int64)
    full[:, : spec.prompt] = rng.integers(1, cfg.vocab, (s, spec.prompt))
    filtered = spec.top_p < 1 or spec.top_k > 0
    keep = np.zeros((s, spec.response, cfg.vocab), bool) if filtered else None
    rollout = np.zeros((s, spec.response), np.float32)
    penalised = spec.penalty != (1.0, 0.0, 0.0)
    counts = np.zeros((s, cfg.vocab), np.int16)
    for j in range(spec.prompt):
        np.add.at(counts, (np.arange(s), full[:, j]), 1)
    decoder = Decoder(cfg, used, Knobs(noise=spec.noise), s, total, spec.seed * 2 + 1)
    hidden = decoder.extend(full[:, : spec.prompt])[:, -1:]
    rows = np.arange(s)
    for t in range(spec.response):
        z = logits(cfg, used, hidden)[:, 0]
        if penalised:
            z = apply_penalty(z, counts, spec.penalty)
        z = z / np.float32(spec.temperature)
        if keep is not None:
            keep[:, t] = truncate(z, spec.top_p, spec.top_k)
            z = np.where(keep[:, t], z, np.float32(-np.inf))
        lp = log_softmax(z)
        y = (lp + rng.gumbel(size=lp.shape)).argmax(axis=-1)
        full[:, spec.prompt + t] = y
        rollout[:, t] = lp[rows, y]
        counts[rows, y] += 1
        if t + 1 < spec.response:
            hidden = decoder.extend(y[:, None])
    ended = full[:, spec.prompt :] == EOS
    first = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, spec.response)
    return Run(spec, weights, base, full, np.maximum(first, min(8, spec.response)), rollout, keep)
