"""Small statistics that detectors share. Tokens of a sample are not independent, so samples are the units."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_engine.diagnose.frame import Array, Frame

Mask = npt.NDArray[np.bool_]


def clustered_t(frame: Frame, values: Array, chosen: Mask | None = None) -> float:
    """t of the mean of values over tokens, with samples as clusters; 0 when there are fewer than three samples."""
    weights = np.ones(len(frame)) if chosen is None else chosen.astype(np.float64)
    total = np.bincount(frame.sample, weights=values * weights, minlength=frame.log.sample_count)
    count = np.bincount(frame.sample, weights=weights, minlength=frame.log.sample_count)
    used = count > 0
    if used.sum() < 3:
        return 0.0
    mean = total.sum() / count.sum()
    spread = float(np.sqrt(np.square(total[used] - mean * count[used]).sum()))
    return float(total.sum() / spread) if spread > 0 else (0.0 if mean == 0 else 99.0 * float(np.sign(mean)))


def welch(a: Array, b: Array) -> float:
    """Welch's t of mean(a) - mean(b); 0 where a group has fewer than two values."""
    if len(a) < 2 or len(b) < 2:
        return 0.0
    variance = a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)
    difference = float(a.mean() - b.mean())
    return difference / float(np.sqrt(variance)) if variance > 0 else (0.0 if difference == 0 else 99.0)


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
