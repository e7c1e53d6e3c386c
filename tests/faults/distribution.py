"""Faults of the distribution: temperature, truncation, raw logprobs, padded columns, penalties, number formats."""

from __future__ import annotations

import dataclasses

import numpy as np

from .model import to_bf16, to_fp16
from .registry import fault
from .runs import RunSpec, apply_penalty, sample_run, token_counts
from .scene import Scene


def _temperature(severity: float, seed: int) -> dict[str, object]:
    """A sampling temperature ``severity`` away from 1, colder for even seeds."""
    return {"temperature": 1.0 - severity if seed % 2 == 0 else 1.0 + severity}


def _top_p(severity: float, seed: int) -> dict[str, object]:
    return {"top_p": 1.0 - severity, "temperature": 1.0}


@fault("temperature-missing", "temperature-missing", (0.02, 0.05, 0.1, 0.2, 0.3), "|T - 1|", spec=_temperature)
def temperature_missing(scene: Scene, severity: float) -> None:
    """The trainer scores at T = 1."""
    scene.train.temperature = 1.0


@fault("temperature-twice", "temperature-twice", (0.02, 0.05, 0.1, 0.2, 0.3), "|T - 1|", spec=_temperature)
def temperature_twice(scene: Scene, severity: float) -> None:
    """The trainer divides by T twice."""
    scene.train.temperature **= 2


@fault("temperature-rescored", "temperature-rescored", (0.01, 0.02, 0.05, 0.1, 0.2), "|T'/T - 1|")
def temperature_rescored(scene: Scene, severity: float) -> None:
    """The trainer scores at a third value."""
    scene.train.temperature *= 1.0 + severity * (1 if scene.run.spec.seed % 2 else -1)


@fault("raw-temperature", "raw-logprobs", (0.05, 0.1, 0.2, 0.3, 0.4), "|T - 1|", spec=_temperature)
def raw_temperature(scene: Scene, severity: float) -> None:
    """The rollout reports the model's logprobs before temperature; the trainer scores the sampled distribution."""
    _raw(scene)


@fault("raw-top-p", "raw-logprobs", (0.01, 0.03, 0.05, 0.1, 0.2), "1 - top_p", spec=_top_p)
def raw_top_p(scene: Scene, severity: float) -> None:
    """The rollout reports logprobs before top-p; the trainer replays the sets."""
    _raw(scene)


def _raw(scene: Scene) -> None:
    from .scene import score

    side = dataclasses.replace(scene.train, temperature=1.0, support="none")
    scene.rollout = score(scene.run, side, int(scene.rng.integers(1 << 30)))


@fault("top-p-not-replayed", "support-not-replayed", (0.01, 0.03, 0.05, 0.1, 0.2), "1 - top_p", 1, _top_p)
def top_p_not_replayed(scene: Scene, severity: float) -> None:
    """The trainer normalises over the whole vocabulary."""
    scene.train.support = "none"


@fault(
    "top-k-not-replayed",
    "support-not-replayed",
    (200, 100, 50, 20, 10),
    "k",
    2,
    lambda severity, seed: {"top_k": int(severity)},
)
def top_k_not_replayed(scene: Scene, severity: float) -> None:
    """The trainer normalises over the whole vocabulary."""
    scene.train.support = "none"


@fault(
    "support-recomputed",
    "support-not-replayed",
    (0.01, 0.03, 0.05, 0.1, 0.2),
    "1 - top_p",
    2,
    lambda severity, seed: {**_top_p(severity, seed), "noise": 0.002},
)
def support_recomputed(scene: Scene, severity: float) -> None:
    """The trainer truncates by its own logits: sampled tokens fall out of its set (-inf)."""
    scene.train.support = "recompute"


@fault(
    "division-after-softmax",
    "division-after-softmax",
    (0.02, 0.05, 0.1, 0.2, 0.3),
    "|T - 1|",
    spec=_temperature,
)
def division_after_softmax(scene: Scene, severity: float) -> None:
    """The trainer divides the finished logprob by T."""
    scene.train.after = 1.0 / scene.train.temperature
    scene.train.temperature = 1.0


@fault("log-base", "log-base", (2.0, 10.0), "base", 0)
def log_base(scene: Scene, severity: float) -> None:
    """The trainer's logprobs are in another base."""
    scene.train.after = 1.0 / float(np.log(severity))


@fault("negated", "log-base", (1.0,), "-", 0)
def negated(scene: Scene, severity: float) -> None:
    """The trainer stores the negative log-likelihood."""
    scene.train.after = -1.0


@fault("padded-vocab", "padded-vocab", (0.0003, 0.001, 0.003, 0.01, 0.03), "mean mass of the padded columns")
def padded_vocab(scene: Scene, severity: float) -> None:
    """The trainer's softmax counts the padded columns; their logit is set so that they take this mass on average."""
    cfg = scene.run.spec.config()
    count = cfg.padded_vocab - cfg.vocab

    def pad(z: np.ndarray) -> np.ndarray:
        lse = z.max(axis=-1) + np.log(np.exp(z - z.max(axis=-1, keepdims=True)).sum(axis=-1))
        value = np.log(severity / count) - np.log(np.mean(np.exp(-lse.astype(np.float64))))
        return np.concatenate([z, np.full((*z.shape[:-1], count), value, np.float32)], axis=-1)

    scene.train.late += (pad,)


@fault(
    "repetition-penalty",
    "penalty",
    (1.005, 1.01, 1.02, 1.05, 1.1),
    "penalty",
    2,
    lambda severity, seed: {"penalty": (severity, 0.0, 0.0)},
)
def repetition_penalty(scene: Scene, severity: float) -> None:
    """The rollout penalises repeated tokens, the trainer does not."""


@fault(
    "presence-penalty",
    "penalty",
    (0.05, 0.1, 0.2, 0.5, 1.0),
    "penalty",
    2,
    lambda severity, seed: {"penalty": (1.0, severity, 0.0)},
)
def presence_penalty(scene: Scene, severity: float) -> None:
    """The rollout penalises tokens that occurred, the trainer does not."""


@fault("frequency-penalty", "penalty", (0.02, 0.05, 0.1, 0.2, 0.5), "penalty")
def frequency_penalty(scene: Scene, severity: float) -> None:
    """The trainer penalises by count, the rollout does not."""
    counts = token_counts(scene.run)
    scene.train.before += (lambda z: apply_penalty(z, counts, (1.0, 0.0, severity)),)


def _many(severity: float, seed: int) -> dict[str, object]:
    """A grid shows in the phase of few tokens, so these runs are larger (about 15,000 tokens)."""
    return {"samples": 128, "response": 192}


@fault("bf16-logits", "logits-dtype", (1.0,), "-", 0, _many)
def bf16_logits(scene: Scene, severity: float) -> None:
    """The trainer rounds logits to bf16 before the softmax."""
    scene.train.before += (to_bf16,)


@fault("fp16-logits", "logits-dtype", (1.0,), "-", 0, lambda severity, seed: {**_many(severity, seed), "noise": 0.0003})
def fp16_logits(scene: Scene, severity: float) -> None:
    """The trainer rounds logits to fp16 before the softmax."""
    scene.train.before += (to_fp16,)


@fault("bf16-logprobs", "logprob-dtype", (1.0,), "-", 0)
def bf16_logprobs(scene: Scene, severity: float) -> None:
    """The rollout's finished logprobs are stored in bf16."""
    scene.rollout = to_bf16(scene.rollout)


@fault(
    "quantised-rollout",
    "quantised-rollout",
    (8, 7, 6, 5, 4),
    "bits",
    2,
    lambda severity, seed: {"quantise": int(severity)},
)
def quantised_rollout(scene: Scene, severity: float) -> None:
    """The rollout's weights are integer-quantised; the trainer's are not."""


def clean_spec(spec: RunSpec) -> RunSpec:
    """The same run without penalty and quantisation (for controls)."""
    return dataclasses.replace(spec, penalty=(1.0, 0.0, 0.0), quantise=0)


__all__ = ["clean_spec", "sample_run"]
