"""The mismatch in the field's names, over all loss tokens of a log (nothing is thinned here)."""

from __future__ import annotations

import dataclasses

import numpy as np

from rl_engine.diagnose.log import TokenLog

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclasses.dataclass(frozen=True)
class WorstToken:
    """One of the largest gaps. ``position`` is absolute; ``token`` None where ids are not logged."""

    sample: int
    position: int
    token: int | None
    rollout: float
    train: float


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Mismatch of a log; d = train - rollout logprob (nats), ratio = exp(d), both over loss tokens with finite values.

    Attributes:
        tokens, samples: loss tokens and samples of the log; ``compared`` tokens with two finite logprobs.
        equal: share of compared tokens whose fp32 bits are equal.
        k1: mean of -d. k3: mean of ratio - 1 - d. chi2: mean of ratio**2, minus 1.
        ess: effective sample size over tokens as a share, (sum ratio)**2 / (n sum ratio**2).
        ratio_mean, ratio_max: of tokens. clip_fraction: share of tokens with |ratio - 1| > clip.
        sequence_ratio_mean, sequence_ratio_max, sequence_ess: the same of exp(sum of d) per sample (capped at e**20).
        geometric_ratio_max: largest exp(|mean d|) of a sample.
        quantiles: of d, at :data:`QUANTILES`. worst: tokens with the largest |d|.
    """

    tokens: int
    samples: int
    compared: int
    equal: float
    mean_abs: float
    max_abs: float
    k1: float
    k3: float
    chi2: float
    ess: float
    ratio_mean: float
    ratio_max: float
    clip: float
    clip_fraction: float
    sequence_ratio_mean: float
    sequence_ratio_max: float
    sequence_ess: float
    geometric_ratio_max: float
    quantiles: tuple[float, ...]
    worst: tuple[WorstToken, ...]


def effective_share(weights: np.ndarray) -> float:
    """(sum w)**2 / (n sum w**2): 1 for equal weights, 1/n when one holds everything."""
    square = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / (len(weights) * square) if square > 0 else 0.0


def measure(log: TokenLog, clip: float = 0.2, worst: int = 10) -> Metrics:
    """Metrics of a log. With no comparable token every mean is NaN."""
    index = np.flatnonzero(log.mask & np.isfinite(log.rollout) & np.isfinite(log.train))
    tokens = int(log.mask.sum())
    if not len(index):
        none = float("nan")
        return Metrics(tokens, log.sample_count, 0, none, none, none, none, none, none, none, none, none, clip, none,
                       none, none, none, none, (none,) * len(QUANTILES), ())  # fmt: skip
    gap = log.train[index].astype(np.float64) - log.rollout[index]
    equal = log.train[index].view(np.uint32) == log.rollout[index].view(np.uint32)
    size = np.abs(gap)
    # e**20 is past any use of a ratio and keeps squares finite.
    ratio = np.exp(np.minimum(gap, 20.0))
    sample = np.searchsorted(log.offsets, index, side="right") - 1
    count = np.bincount(sample, minlength=log.sample_count)
    total = np.bincount(sample, weights=gap, minlength=log.sample_count)[count > 0]
    whole = np.exp(np.clip(total, -700, 20.0))
    chosen = np.argpartition(size, -min(worst, len(size)))[-min(worst, len(size)) :] if worst else np.zeros(0, np.int64)
    chosen = chosen[np.argsort(-size[chosen], kind="stable")]
    place = index - log.offsets[sample] + log.base_position[sample]
    return Metrics(
        tokens=tokens,
        samples=log.sample_count,
        compared=len(index),
        equal=float(equal.mean()),
        mean_abs=float(size.mean()),
        max_abs=float(size.max()),
        k1=float(-gap.mean()),
        k3=float((ratio - 1 - np.minimum(gap, 20.0)).mean()),
        chi2=float(np.square(ratio).mean() - 1),
        ess=effective_share(ratio),
        ratio_mean=float(ratio.mean()),
        ratio_max=float(ratio.max()),
        clip=clip,
        clip_fraction=float((np.abs(ratio - 1) > clip).mean()),
        sequence_ratio_mean=float(whole.mean()),
        sequence_ratio_max=float(whole.max()),
        sequence_ess=effective_share(whole),
        geometric_ratio_max=float(np.exp(min(20.0, np.abs(total / count[count > 0]).max()))),
        quantiles=tuple(float(q) for q in np.quantile(gap, QUANTILES)),
        worst=tuple(
            WorstToken(
                sample=int(sample[i]),
                position=int(place[i]),
                token=None if log.tokens is None else int(log.tokens[index[i]]),
                rollout=float(log.rollout[index[i]]),
                train=float(log.train[index[i]]),
            )
            for i in chosen
        ),
    )
