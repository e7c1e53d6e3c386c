"""The tokens that detectors look at, with the few derived columns that all of them share."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from rl_engine.diagnose.log import TokenLog

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

# Detectors work on at most this many tokens (whole samples, evenly spaced), so that a log of any size takes seconds.
TOKEN_LIMIT = 1_500_000
# A gap beyond this many nats says no more than one of this size; squares of rarer ones would drown everything else.
GAP_CAP = 4.0


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """Loss tokens with two finite logprobs, sample after sample. All columns are [M] fp64 or int64.

    Attributes:
        log: the log that the columns index (after thinning); ``index`` positions in its token columns.
        gap: train minus rollout logprob (nats), clipped to +-GAP_CAP; ``raw_gap`` is not clipped.
        rollout, train: the two logprobs. ``sample``: row of the log. ``position``: absolute position.
        size: |gap| over the mean |gap| of tokens with a like logprob, so that samples of different certainty compare.
        order: place of the token among the sample's loss tokens, from 0.
    """

    log: TokenLog
    index: Index
    gap: Array
    raw_gap: Array
    rollout: Array
    train: Array
    sample: Index
    position: Index
    order: Index
    size: Array
    certainty_bin: Index

    def __len__(self) -> int:
        return len(self.gap)

    @property
    def probability(self) -> Array:
        """exp of the rollout logprob, at most 1."""
        return np.exp(np.minimum(self.rollout, 0.0))

    def per_sample(self, values: Array) -> tuple[Array, Index]:
        """(mean of values, tokens) of every sample; samples without tokens have mean NaN."""
        count = np.bincount(self.sample, minlength=self.log.sample_count)
        total = np.bincount(self.sample, weights=values, minlength=self.log.sample_count)
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / count, count


def thin(log: TokenLog, limit: int = TOKEN_LIMIT) -> TokenLog:
    """The log itself, or evenly spaced samples of it with at most about ``limit`` loss tokens."""
    used = int(log.mask.sum())
    if used <= limit:
        return log
    stride = -(-used // limit)
    keep = np.zeros(log.sample_count, bool)
    keep[::stride] = True
    return log.select(keep)


def quantile_bins(values: Array, count: int) -> Index:
    """int64 [M]: the quantile bin of each value (at most ``count`` bins, by rank of distinct values)."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, count + 1)[1:-1]))
    return np.searchsorted(edges, values, side="right")


def relative_size(gap: Array, bins: Index) -> Array:
    """|gap| over its mean within each bin, capped at 30; 0 where a bin has no gap at all."""
    magnitude = np.abs(gap)
    count = np.bincount(bins)
    mean = np.bincount(bins, weights=magnitude) / np.maximum(count, 1)
    scale = mean[bins]
    return np.minimum(np.divide(magnitude, scale, out=np.zeros_like(magnitude), where=scale > 0), 30.0)


def build_frame(log: TokenLog) -> Frame:
    """Collect the usable loss tokens of a log."""
    log = thin(log)
    usable = log.mask & np.isfinite(log.rollout) & np.isfinite(log.train)
    index = np.flatnonzero(usable)
    lengths = np.diff(log.offsets)
    sample = np.repeat(np.arange(log.sample_count), lengths)[index]
    rollout = log.rollout[index].astype(np.float64)
    train = log.train[index].astype(np.float64)
    raw_gap = train - rollout
    gap = np.clip(raw_gap, -GAP_CAP, GAP_CAP)
    position = index - log.offsets[sample] + log.base_position[sample]
    counts = np.bincount(sample, minlength=log.sample_count)
    starts = np.concatenate([[0], np.cumsum(counts)])[:-1]
    order = np.arange(len(index)) - starts[sample]
    # The mean of both sides is the fair regressor: each alone carries its own noise and tilts the gap against itself.
    bins = quantile_bins((rollout + train) / 2, 24) if len(index) else np.zeros(0, np.int64)
    return Frame(
        log,
        index,
        gap,
        raw_gap,
        rollout,
        train,
        sample,
        position,
        order,
        relative_size(gap, bins),
        bins.astype(np.int64),
    )
