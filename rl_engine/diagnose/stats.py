"""Small statistics that detectors share. Tokens of a sample are not independent, so samples are the units."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_engine.diagnose.frame import Array, Frame

Mask = npt.NDArray[np.bool_]


def normal_score(t: float, freedom: float) -> float:
    """The normal score about as unlikely as Student's t with that many degrees of freedom (Wallace's approximation).

    Small groups make large t by chance; as a normal score all detectors share one scale.
    """
    if freedom <= 0:
        return 0.0
    return (
        float(np.sign(t)) * float(np.sqrt(freedom * np.log1p(t * t / freedom))) * (8 * freedom + 1) / (8 * freedom + 3)
    )


def clustered_t(frame: Frame, values: Array, chosen: Mask | None = None) -> float:
    """Normal score of the mean of values over tokens, samples as clusters; 0 with fewer than three samples."""
    weights = np.ones(len(frame)) if chosen is None else chosen.astype(np.float64)
    total = np.bincount(frame.sample, weights=values * weights, minlength=frame.log.sample_count)
    count = np.bincount(frame.sample, weights=weights, minlength=frame.log.sample_count)
    used = count > 0
    if used.sum() < 3:
        return 0.0
    mean = total.sum() / count.sum()
    spread = float(np.sqrt(np.square(total[used] - mean * count[used]).sum()))
    if spread == 0:
        return 0.0 if mean == 0 else 40.0 * float(np.sign(mean))
    return normal_score(float(total.sum() / spread), float(used.sum() - 1))


def contrast(a: Array, b: Array) -> float:
    """Normal score of mean(a) - mean(b): the smaller of Student's (one variance) and Welch's (two), in size.

    Student's keeps a group of two from looking certain, Welch's keeps unequal spreads from doing so.
    """
    if len(a) < 2 or len(b) < 2:
        return 0.0
    difference = float(a.mean() - b.mean())
    squares = float(np.square(a - a.mean()).sum() + np.square(b - b.mean()).sum())
    freedom = len(a) + len(b) - 2
    pooled = np.sqrt(squares / freedom * (1 / len(a) + 1 / len(b)))
    apart = np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    if pooled == 0 or apart == 0:
        return 0.0 if difference == 0 else 40.0 * float(np.sign(difference))
    student = normal_score(difference / float(pooled), float(freedom))
    welch = difference / float(apart)
    return student if abs(student) < abs(welch) else welch


def binned_share(gap: Array, bins: npt.NDArray[np.int64]) -> float:
    """Share of the gap's energy that bin means explain, corrected for the number of bins; at least 0."""
    energy = float(np.square(gap).sum())
    if energy == 0:
        return 0.0
    count = np.bincount(bins)
    total = np.bincount(bins, weights=gap)
    used = count > 0
    explained = float((np.square(total[used]) / count[used]).sum())
    cells = int(used.sum())
    left = max(len(gap) - cells, 1)
    return max(0.0, (explained - cells * (energy - explained) / left) / energy)
