"""The recorded loss against what the logged tokens give under each denominator."""

from __future__ import annotations

import numpy as np

from rl_engine.diagnose.causes import Evidence
from rl_engine.diagnose.log import TokenLog

MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "sum over padded tokens",
    "sum over tokens padded to the log's longest",
)


def _expected(log: TokenLog, ratio: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(recorded loss [G], expected loss per mode [G, 5], summed loss [G]) of every step."""
    samples = log.samples
    assert samples.advantage is not None and samples.loss is not None
    sample = np.repeat(np.arange(log.sample_count), np.diff(log.offsets))
    usable = log.mask & np.isfinite(log.train) & np.isfinite(log.rollout)
    weight = np.ones(log.token_count)
    if ratio:
        weight[usable] = np.exp(np.clip(log.train[usable].astype(np.float64) - log.rollout[usable], -20, 20))
    total = np.bincount(sample[usable], weights=weight[usable], minlength=log.sample_count)
    length = np.bincount(sample[log.mask], minlength=log.sample_count).astype(np.float64)
    group = samples.step if samples.step is not None else np.zeros(log.sample_count, np.int64)
    steps, inverse = np.unique(group, return_inverse=True)
    advantage = samples.advantage.astype(np.float64)
    rows = np.bincount(inverse).astype(np.float64)
    per_step = np.bincount(inverse, weights=advantage * total)
    tokens = np.bincount(inverse, weights=length)
    means = np.bincount(inverse, weights=advantage * total / np.maximum(length, 1))
    longest = np.array([length[inverse == i].max() for i in range(len(steps))])
    columns = (
        per_step / np.maximum(tokens, 1),
        means / rows,
        per_step / rows,
        per_step / (rows * np.maximum(longest, 1)),
        per_step / (rows * max(length.max(), 1)),
    )
    recorded = np.array([samples.loss[inverse == i][0] for i in range(len(steps))])
    return recorded, -np.stack(columns, axis=1), -per_step


def denominator(log: TokenLog) -> list[Evidence]:
    """Whether the recorded loss is the stated mean of advantage times ratio, and if not, which one it is."""
    if log.samples.loss is None or log.samples.advantage is None:
        return []
    stated = log.facts.loss_agg or "token-mean"
    if stated not in MODES and log.facts.loss_denominator is None:
        return []
    errors: dict[str, float] = {}
    factor = 1.0
    off = np.inf
    for ratio in (False, True):
        recorded, expected, summed = _expected(log, ratio)
        scale = float(np.abs(recorded).max()) or 1.0
        for i, mode in enumerate(MODES):
            error = float(np.abs(recorded - expected[:, i]).max()) / scale
            errors[mode] = min(errors.get(mode, np.inf), error)
        target = summed / log.facts.loss_denominator if log.facts.loss_denominator else expected[:, MODES.index(stated)]
        fitted = float((recorded * target).sum() / max(float((target * target).sum()), 1e-30))
        left = float(np.abs(recorded - fitted * target).max()) / scale
        if left < off:
            off, factor = left, fitted
        errors["stated"] = min(errors.get("stated", np.inf), float(np.abs(recorded - target).max()) / scale)
    if not np.isfinite(errors["stated"]) or errors["stated"] < 2e-3:
        return []
    best = min(MODES, key=lambda mode: errors[mode])
    if errors[best] < 1e-2:
        told = f"it is the {best}"
    elif off < 1e-2:
        told = f"it is {factor:.4g} times the stated one"
    else:
        return []  # clipping, a KL term or another objective: the log cannot say
    detail = f"the recorded loss differs from {stated} of advantage by {errors['stated']:.1%}; {told}"
    numbers: dict[str, float | str] = {"stated": stated, "factor": factor, "fits": best if errors[best] < 1e-2 else ""}
    return [Evidence("loss-denominator", 60.0, 0.8, detail, numbers)]
