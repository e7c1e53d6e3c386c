"""Faults of the model and of the loss: LoRA, tied head, loss denominator, values that are no numbers."""

from __future__ import annotations

import dataclasses

import numpy as np

from rl_engine.diagnose.log import TokenLog

from .registry import fault
from .runs import add_update
from .scene import Scene


@fault("lora-scale", "lora-scale", (0.1, 0.25, 0.5, 1.0), "|scale ratio - 1|", 1)
def lora_scale(scene: Scene, severity: float) -> None:
    """The trainer applies the low-rank update with another scale (alpha / r)."""
    spec = scene.run.spec
    scene.train.weights = add_update(scene.run.base, spec.seed, spec.lora * (1 + severity))


@fault("lora-missing", "lora-scale", (0.03, 0.05, 0.1), "relative size of the update", 1, lambda v, s: {"lora": v})
def lora_missing(scene: Scene, severity: float) -> None:
    """The trainer scores with the base model."""
    scene.train.weights = scene.run.base


@fault("tied-head", "tied-head", (0.01, 0.02, 0.05, 0.1, 0.3), "share of the head that differs")
def tied_head(scene: Scene, severity: float) -> None:
    """The trainer's head moved away from the rollout's (one of them is tied to the embedding)."""
    weights = dict(scene.run.weights)
    other = weights["embed"] / np.float32(np.sqrt(weights["embed"].shape[1]))
    weights["head"] = np.float32(1 - severity) * weights["head"] + np.float32(severity) * other
    scene.train.weights = weights


@fault("untied-head", "tied-head", (1.0,), "-", 0)
def untied_head(scene: Scene, severity: float) -> None:
    """The trainer's head was never loaded."""
    weights = dict(scene.run.weights)
    weights["head"] = np.random.default_rng(3).standard_normal(weights["head"].shape, dtype=np.float32) * np.float32(
        np.abs(weights["head"]).mean()
    )
    scene.train.weights = weights


def _losses(log: TokenLog, mode: str) -> np.ndarray:
    """The recorded loss of each sample's step, by aggregation mode, at ratio 1."""
    assert log.samples.advantage is not None and log.samples.step is not None
    sample = np.repeat(np.arange(log.sample_count), np.diff(log.offsets))
    lengths = np.bincount(sample[log.mask], minlength=log.sample_count)
    steps, inverse = np.unique(log.samples.step, return_inverse=True)
    advantage = log.samples.advantage.astype(np.float64)
    padded = lengths.max()
    out = np.zeros(len(steps))
    for i in range(len(steps)):
        rows = inverse == i
        total = float((advantage * lengths)[rows].sum())
        out[i] = -{
            "token-mean": total / max(1, lengths[rows].sum()),
            "seq-mean-token-mean": float(advantage[rows].mean()),
            "seq-mean-token-sum": total / rows.sum(),
            "padded": total / (rows.sum() * padded),
        }[mode]
    return out[inverse]


def _record_loss(scene: Scene, mode: str, factor: float) -> None:
    def hook(log: TokenLog) -> TokenLog:
        samples = dataclasses.replace(log.samples, loss=_losses(log, mode) * factor)
        return dataclasses.replace(log, samples=samples)

    scene.log_hooks.append(hook)


@fault("loss-denominator", "loss-denominator", (1.0,), "-", 0)
def loss_denominator(scene: Scene, severity: float) -> None:
    """The loss is averaged per sample (or over padding) although the log says per token."""
    mode = ("seq-mean-token-mean", "padded", "seq-mean-token-sum")[scene.run.spec.seed % 3]
    if (scene.run.length == scene.run.length[0]).all():
        mode = "seq-mean-token-sum"  # with equal lengths the other modes are the stated one
    _record_loss(scene, mode, 1.0)


@fault("loss-extra-factor", "loss-denominator", (1.01, 1.1, 2.0, 8.0), "factor", 1)
def loss_extra_factor(scene: Scene, severity: float) -> None:
    """The loss carries a factor, e.g. one division by the data-parallel size too few."""
    _record_loss(scene, "token-mean", severity)


def record_right_loss(scene: Scene) -> None:
    """A clean run that records its loss."""
    _record_loss(scene, "token-mean", 1.0)


@fault("nan", "non-finite", (1, 4, 16), "tokens", 0)
def nan(scene: Scene, severity: float) -> None:
    """Some train logprobs are NaN."""
    _poke(scene, int(severity), np.float32(np.nan))


@fault("plus-inf", "non-finite", (1, 4, 16), "tokens", 0)
def plus_inf(scene: Scene, severity: float) -> None:
    """Some train logprobs are +inf."""
    _poke(scene, int(severity), np.float32(np.inf))


def _poke(scene: Scene, count: int, value: np.float32) -> None:
    def hook(log: TokenLog) -> TokenLog:
        train = log.train.copy()
        train[scene.rng.choice(np.flatnonzero(log.mask), count, replace=False)] = value
        return dataclasses.replace(log, train=train)

    scene.log_hooks.append(hook)


@fault("signed-zero", "signed-zero", (0.2, 0.5, 1.0), "share of certain tokens", 0)
def signed_zero(scene: Scene, severity: float) -> None:
    """An exact stack, but certain tokens are -0 on one side and +0 on the other."""
    scene.train_hooks.append(lambda train: scene.rollout)

    def hook(log: TokenLog) -> TokenLog:
        certain = log.mask & (log.rollout > -0.02)
        rollout = np.where(certain, np.float32(0), log.rollout)
        flip = certain & (scene.rng.random(log.token_count) < severity)
        flip[np.flatnonzero(certain)[:1]] = True
        train = np.where(flip, np.float32(-0.0), rollout).astype(np.float32)
        return dataclasses.replace(log, rollout=rollout, train=train)

    scene.log_hooks.append(hook)
