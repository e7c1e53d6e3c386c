"""Faults tied to a place: positions, blocks, batches, workers, weight versions, caches, prompts, masks."""

from __future__ import annotations

import dataclasses

import numpy as np

from rl_engine.diagnose.log import TokenLog

from .model import EOS, Knobs, to_bf16
from .registry import fault
from .runs import add_update
from .scene import Scene, Side


def _louder(scene: Scene, factor: float) -> Side:
    """The train side with its rounding noise times ``factor``."""
    return dataclasses.replace(scene.train, knobs=Knobs(noise=scene.train.knobs.noise * factor))


def _absolute(scene: Scene) -> np.ndarray:
    """Absolute position of every response token, [S, T]."""
    spec = scene.run.spec
    return np.broadcast_to(spec.prompt + np.arange(spec.response), scene.run.rollout.shape)


@fault("rope-dtype", "rope-dtype", (0.125, 0.25, 0.5, 1.0, 2.0), "bf16 angle errors", 3)
def rope_dtype(scene: Scene, severity: float) -> None:
    """The trainer's rotary angles are rounded to a narrow type; severity 1 is bf16
    at these short positions; the error doubles with the position."""

    def narrow(angle: np.ndarray) -> np.ndarray:
        return angle + np.float32(severity) * (to_bf16(angle) - angle)

    scene.train.knobs = dataclasses.replace(scene.train.knobs, angle=narrow)


@fault(
    "router-dtype",
    "router-dtype",
    (0.001, 0.003, 0.01, 0.03),
    "noise of router scores",
    1,
    lambda severity, seed: {"experts": 4, "noise": 0.0002},
)
def router_dtype(scene: Scene, severity: float) -> None:
    """The trainer's router works in a narrow type: near ties go to another expert."""
    scene.train.knobs = dataclasses.replace(scene.train.knobs, router_noise=severity)


@fault("stale-weights", "stale-weights", (0.002, 0.005, 0.01, 0.02, 0.04), "relative weight change per version")
def stale_weights(scene: Scene, severity: float) -> None:
    """Samples are 0 to 3 versions old; the log says so."""
    age = scene.rng.integers(0, 4, scene.run.spec.samples)
    scene.columns["train_version"] = scene.columns["weight_version"] + age
    for old in (1, 2, 3):
        weights = add_update(scene.run.weights, 900, severity * old, head=True)
        side = dataclasses.replace(scene.train, weights=weights)
        scene.sides.append((np.broadcast_to((age == old)[:, None], scene.run.rollout.shape), side))


@fault("sync-stopped", "stale-weights", (0.002, 0.005, 0.01, 0.02, 0.04), "relative weight change per version")
def sync_stopped(scene: Scene, severity: float) -> None:
    """From version 3 on the rollout keeps its old weights although the log says they are fresh."""
    version = scene.columns["weight_version"]
    for late in range(1, 6):
        weights = add_update(scene.run.weights, 900, severity * late, head=True)
        side = dataclasses.replace(scene.train, weights=weights)
        chosen = version == 2 + late
        scene.sides.append((np.broadcast_to(chosen[:, None], scene.run.rollout.shape), side))


@fault("stale-prefix-cache", "stale-prefix-cache", (0.02, 0.05, 0.1, 0.2, 0.4), "relative change of the cached keys")
def stale_prefix_cache(scene: Scene, severity: float) -> None:
    """Samples that hit the prefix cache attend to keys and values of older weights.

    Scoring a prompt with its cached part replaced by other tokens is the same physics: other keys and values before
    the response. Severity is the share of the cached prompt tokens whose keys changed.
    """
    spec = scene.run.spec
    cached = scene.columns["cached_tokens"]
    full = scene.run.full.copy()
    change = scene.rng.random((spec.samples, spec.prompt)) < severity
    change &= np.arange(spec.prompt)[None, :] < cached[:, None]
    full[:, : spec.prompt][change] = scene.rng.integers(1, spec.config().vocab, int(change.sum()))
    side = dataclasses.replace(scene.train, full=full)
    scene.sides.append((np.broadcast_to((cached > 0)[:, None], scene.run.rollout.shape), side))


@fault("page-edges", "block-edges", (3, 5, 10, 20), "noise factor", 1)
def page_edges(scene: Scene, severity: float) -> None:
    """The first token of every page of 16 is computed by another path."""
    scene.sides.append((_absolute(scene) % 16 == 0, _louder(scene, severity)))


@fault("chunk-edges", "block-edges", (5, 10, 20, 40), "noise factor", 1)
def chunk_edges(scene: Scene, severity: float) -> None:
    """The first tokens behind every chunk of 64 are computed by another path."""
    scene.sides.append((_absolute(scene) % 64 < 2, _louder(scene, severity)))


@fault("split-edge", "block-edges", (1.5, 2, 3, 5, 10), "noise factor")
def split_edge(scene: Scene, severity: float) -> None:
    """From position 96 on the attention is split in two and merged another way."""
    scene.facts = dataclasses.replace(scene.facts, split_size=96)
    scene.sides.append((_absolute(scene) >= 96, _louder(scene, severity)))


@fault("batch-dependence", "batch-dependence", (1.5, 2, 3, 5, 10), "noise factor")
def batch_dependence(scene: Scene, severity: float) -> None:
    """Large batches take another kernel."""
    large = scene.columns["batch_size"] >= 16
    scene.sides.append((np.broadcast_to(large[:, None], scene.run.rollout.shape), _louder(scene, severity)))


@fault("batch-exact", "batch-dependence", (1.0,), "-", 0)
def batch_exact(scene: Scene, severity: float) -> None:
    """One sequence alone is exact, a batch is not."""
    alone = (scene.columns["batch_size"] == 1)[:, None]
    scene.train_hooks.append(lambda train: np.where(alone, scene.rollout, train))


@fault("bad-engine", "bad-worker", (1.5, 2, 3, 5, 10), "noise factor")
def bad_engine(scene: Scene, severity: float) -> None:
    """One of four engines is noisier."""
    bad = scene.columns["engine"] == scene.run.spec.seed % 4
    scene.sides.append((np.broadcast_to(bad[:, None], scene.run.rollout.shape), _louder(scene, severity)))


@fault("bad-rank", "bad-worker", (1.5, 2, 3, 5, 10), "noise factor")
def bad_rank(scene: Scene, severity: float) -> None:
    """One of eight ranks is noisier."""
    bad = scene.columns["rank"] == scene.run.spec.seed % 8
    scene.sides.append((np.broadcast_to(bad[:, None], scene.run.rollout.shape), _louder(scene, severity)))


@fault("template-drift", "template-drift", (1, 2, 4, 8), "prompt tokens that differ", 0)
def template_drift(scene: Scene, severity: float) -> None:
    """The trainer's prompt was rendered by another chat template: some of its last tokens differ."""
    spec = scene.run.spec
    full = scene.run.full.copy()
    count = int(severity)
    fresh = np.random.default_rng([spec.seed, 5]).integers(1, spec.config().vocab, count)
    full[:, spec.prompt - count : spec.prompt] = fresh
    scene.train.full = full


@fault("retokenised", "retokenised", (0.05, 0.1, 0.25, 0.5, 1.0), "share of samples")
def retokenised(scene: Scene, severity: float) -> None:
    """The trainer tokenised the text again: in some samples two tokens became one, and all later ones moved up."""
    spec = scene.run.spec
    full = scene.run.full.copy()
    hit = np.flatnonzero(scene.rng.random(spec.samples) < severity)
    hit = hit if len(hit) else np.array([0])
    for i in hit:
        at = spec.prompt + int(scene.rng.integers(2, max(3, scene.run.length[i] // 2)))
        full[i, at:-1] = full[i, at + 1 :]
    chosen = np.zeros(scene.run.rollout.shape, bool)
    chosen[hit] = True
    scene.sides.append((chosen, dataclasses.replace(scene.train, full=full)))


@fault("shift", "shift", (0.05, 0.1, 0.25, 0.5, 1.0), "share of samples")
def shift(scene: Scene, severity: float) -> None:
    """Train logprobs of some samples stand one place late."""
    hit = scene.rng.random(scene.run.spec.samples) < severity
    hit[0] = True
    scene.train_hooks.append(lambda train: np.where(hit[:, None], np.roll(train, 1, axis=1), train))


@fault("sample-order", "sample-order", (0.1, 0.25, 0.5, 1.0), "share of samples", 1)
def sample_order(scene: Scene, severity: float) -> None:
    """Train logprobs of some samples belong to other samples of the same batch."""
    count = scene.run.spec.samples
    hit = np.flatnonzero(scene.rng.random(count) < severity)
    hit = hit if len(hit) > 1 else np.array([0, 1])
    order = np.arange(count)
    order[hit] = np.roll(hit, 1)
    scene.train_hooks.append(lambda train: train[order])


@fault("mask-prompt", "mask-prompt", (1, 4, 16, 32), "prompt tokens in the loss", 0)
def mask_prompt(scene: Scene, severity: float) -> None:
    """The last prompt tokens count; the rollout has no logprob for them and logs 0."""
    _fill(scene, lambda position, prompt: (position < prompt) & (position >= prompt - int(severity)))


@fault("mask-tool", "mask-tool", (0.05, 0.1, 0.25, 0.5), "share of samples with a tool turn", 1)
def mask_tool(scene: Scene, severity: float) -> None:
    """Tool outputs inside the response count; the rollout has no logprob for them and logs 0."""
    chosen = scene.rng.random(scene.run.spec.samples) < severity
    chosen[0] = True

    def hook(log: TokenLog) -> TokenLog:
        rollout, train = log.rollout.copy(), log.train.copy()
        for i in np.flatnonzero(chosen):
            start, stop = int(log.offsets[i]) + scene.run.spec.prompt, int(log.offsets[i + 1])
            at = start + (stop - start) // 3
            part = slice(at, min(at + 8, stop - 2))
            # Nobody sampled these tokens, so the model finds them less likely than its own.
            rollout[part], train[part] = 0.0, -3 * np.abs(scene.rng.standard_normal(max(0, part.stop - at)))
        return dataclasses.replace(log, rollout=rollout, train=train)

    scene.log_hooks.append(hook)


@fault("mask-eos", "mask-eos", (0.25, 0.5, 1.0), "share of ended samples", 0)
def mask_eos(scene: Scene, severity: float) -> None:
    """The end token is not in the loss."""
    chosen = scene.rng.random(scene.run.spec.samples) < severity

    def hook(log: TokenLog) -> TokenLog:
        mask = log.mask.copy()
        last = log.offsets[1:] - 1
        assert log.tokens is not None
        ended = log.tokens[last] == EOS
        hit = ended & chosen
        hit[np.flatnonzero(ended)[:2]] = True
        mask[last[hit]] = False
        return dataclasses.replace(log, mask=mask)

    scene.log_hooks.append(hook)


def _fill(scene: Scene, where: object) -> None:
    def hook(log: TokenLog) -> TokenLog:
        position = np.arange(log.token_count) - np.repeat(log.offsets[:-1], np.diff(log.offsets))
        chosen = where(position, scene.run.spec.prompt)  # type: ignore[operator]
        train = log.train.copy()
        train[chosen] = -np.abs(scene.rng.standard_normal(int(chosen.sum()))).astype(np.float32) * 3
        return dataclasses.replace(log, mask=log.mask | chosen, train=train)

    scene.log_hooks.append(hook)
