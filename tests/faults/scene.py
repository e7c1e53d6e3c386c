"""A scene is a base run plus what the train side does to it; faults edit scenes, ``render`` turns one into a log."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from rl_engine.diagnose.log import LogFacts, SampleColumns, TokenLog

from .model import EOS, Decoder, Knobs, Weights, log_softmax, logits
from .runs import Run, RunSpec, sample_run, truncate

LogitHook = Callable[[np.ndarray], np.ndarray]
LogHook = Callable[[TokenLog], TokenLog]


@dataclasses.dataclass
class Side:
    """One way to compute train logprobs. ``support``: ``replay`` the rollout's sets, ``none``, or ``recompute``.

    ``temperature`` divides logits; ``after`` multiplies the finished logprobs; ``pads`` are extra logit columns with
    that value; ``before`` and ``late`` edit logits before and after the division.
    """

    weights: Weights
    knobs: Knobs
    temperature: float
    support: str = "replay"
    pads: tuple[int, float] | None = None
    before: tuple[LogitHook, ...] = ()
    late: tuple[LogitHook, ...] = ()
    after: float = 1.0
    full: np.ndarray | None = None


@dataclasses.dataclass
class Scene:
    """What render needs. ``sides`` override ``train`` where their selector bool [S, T] is True, in order."""

    run: Run
    train: Side
    rng: np.random.Generator
    rollout: np.ndarray
    columns: dict[str, np.ndarray]
    facts: LogFacts
    sides: list[tuple[np.ndarray, Side]] = dataclasses.field(default_factory=list)
    train_hooks: list[Callable[[np.ndarray], np.ndarray]] = dataclasses.field(default_factory=list)
    log_hooks: list[LogHook] = dataclasses.field(default_factory=list)
    reference: bool = True


def make_scene(run: Run, seed: int, train_noise: float | None = None) -> Scene:
    """The clean scene: same weights, independent bf16 noise, replayed sets, full honest metadata."""
    spec = run.spec
    rng = np.random.default_rng([seed, spec.seed, 53])
    noise = spec.noise if train_noise is None else train_noise
    train = Side(run.weights, Knobs(noise=noise), spec.temperature)
    s = spec.samples
    step = np.arange(s) * 8 // s
    engine = rng.permutation(s) % 4
    columns: dict[str, np.ndarray] = {
        "prompt_length": np.full(s, spec.prompt, np.int64),
        "temperature": np.full(s, spec.temperature, np.float32),
        "top_p": np.full(s, spec.top_p, np.float32),
        "top_k": np.full(s, spec.top_k, np.int64),
        "weight_version": step.astype(np.int64),
        "train_version": step.astype(np.int64),
        "step": step.astype(np.int64),
        "engine": engine.astype(np.int64),
        "rank": (engine * 2 + rng.integers(0, 2, s)).astype(np.int64),
        "batch_size": rng.choice([1, 4, 8, 16, 32], s).astype(np.int64),
        "cached_tokens": np.where(rng.random(s) < 0.5, spec.prompt // 16 * 16, 0).astype(np.int64),
        "time": np.cumsum(rng.random(s)),
        "stopped": run.full[np.arange(s), spec.prompt + run.length - 1] == EOS,
        "advantage": rng.standard_normal(s).astype(np.float32),
    }
    facts = LogFacts(
        vocab_size=spec.config().vocab,
        padded_vocab_size=spec.config().padded_vocab,
        chunk_size=64,
        page_size=16,
        eos_token_id=EOS,
        loss_agg="token-mean",
        dtype="bf16",
    )
    return Scene(run, train, rng, run.rollout.copy(), columns, facts)


def score(run: Run, side: Side, seed: int, targets: np.ndarray | None = None) -> np.ndarray:
    """fp32 [S, T]: the logprob that ``side`` gives the response tokens (of its own ``full``, if it has one)."""
    spec = run.spec
    cfg = spec.config()
    full = run.full if side.full is None else side.full
    prompt = full.shape[1] - spec.response
    decoder = Decoder(cfg, side.weights, side.knobs, len(full), full.shape[1], seed)
    hidden = decoder.extend(full[:, :-1])[:, prompt - 1 :]
    z = logits(cfg, side.weights, hidden)
    for hook in side.before:
        z = hook(z)
    z = z / np.float32(side.temperature)
    for hook in side.late:
        z = hook(z)
    if run.keep is not None and side.support == "replay":
        z = np.where(run.keep, z, np.float32(-np.inf))
    elif side.support == "recompute":
        z = np.where(truncate(z, spec.top_p, spec.top_k), z, np.float32(-np.inf))
    if side.pads is not None:
        pad = np.full((*z.shape[:2], side.pads[0]), side.pads[1], np.float32)
        z = np.concatenate([z, pad], axis=-1)
    lp = log_softmax(z)
    y = full[:, prompt:] if targets is None else targets
    return np.take_along_axis(lp, y[..., None], axis=-1)[..., 0] * np.float32(side.after)


@functools.lru_cache(maxsize=6)
def reference_logprob(spec: RunSpec) -> np.ndarray:
    """fp32 [S, T]: the base model's logprobs, with noise of its own."""
    run = sample_run(spec)
    return score(run, Side(run.base, Knobs(noise=spec.noise), spec.temperature), spec.seed + 99)


def render(scene: Scene) -> TokenLog:
    """Compute the train side and write the log, prompt included, as a stack that logs everything would."""
    run, spec = scene.run, scene.run.spec
    seed = int(scene.rng.integers(1 << 30))
    train = score(run, scene.train, seed)
    for i, (chosen, side) in enumerate(scene.sides):
        train = np.where(chosen, score(run, side, seed + i + 1), train)
    for hook in scene.train_hooks:
        train = hook(train)
    reference = None
    if scene.reference:
        reference = reference_logprob(spec)
    total = np.arange(spec.prompt + spec.response)[None, :] < (spec.prompt + run.length)[:, None]

    def flat(values: np.ndarray) -> np.ndarray:
        padded = np.zeros(total.shape, values.dtype)
        padded[:, spec.prompt :] = values
        return padded[total]

    lengths = spec.prompt + run.length
    log = TokenLog(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        mask=flat(np.ones(run.rollout.shape, bool)),
        rollout=flat(scene.rollout.astype(np.float32)),
        train=flat(train.astype(np.float32)),
        base_position=np.zeros(spec.samples, np.int64),
        tokens=run.full[total].astype(np.int32),
        ref_logprob=None if reference is None else flat(reference.astype(np.float32)),
        samples=SampleColumns(
            **scene.columns,
            engine_names=tuple(f"engine-{i}" for i in range(4)),
            rank_names=tuple(f"rank-{i}" for i in range(8)),
        ),
        facts=scene.facts,
        source="fault suite",
    )
    for log_hook in scene.log_hooks:
        log = log_hook(log)
    return log
