"""Numbers about a batch that anyone can recompute from its files, the same on every machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from rl_engine.numerics.bits import int_view
from rl_engine.records.types import BatchSummary, LogprobStatistics, SampleBatch


def exact_mean(values: Sequence[float]) -> float:
    """Mean with a correctly rounded fp64 sum, so equal on every machine; 0 for no values, NaN for non-finite ones."""
    if not values:
        return 0.0
    return _exact_sum(values) / len(values)


def logprob_statistics(batch: SampleBatch) -> LogprobStatistics:
    """Compare rollout and train logprobs (fp32, nats) where the mask is 1; see :class:`LogprobStatistics`.

    Differences are exact in fp64 before any rounding; a non-finite logprob makes the means NaN and the maximum inf.
    """
    chosen = batch.loss_mask.astype(bool)
    rollout, train = batch.rollout_logprob[chosen], batch.train_logprob[chosen]
    tokens = int(rollout.size)
    mismatches = int(np.count_nonzero(int_view(rollout) != int_view(train)))
    if tokens == 0:
        return LogprobStatistics(0, 0, 0.0, 0.0, 0.0, 0.0)
    if not (np.isfinite(rollout).all() and np.isfinite(train).all()):
        return LogprobStatistics(tokens, mismatches, math.inf, math.nan, math.nan, math.nan)
    difference = (train.astype(np.float64) - rollout.astype(np.float64)).tolist()
    absolute = [abs(value) for value in difference]
    # expm1 keeps the digits that exp(d) - 1 would lose for small d.
    k3 = [_expm1(value) - value for value in difference]
    return LogprobStatistics(
        tokens_compared=tokens,
        mismatches=mismatches,
        max_abs_dlogp=max(absolute),
        mean_abs_dlogp=exact_mean(absolute),
        kl_k1=exact_mean([-value for value in difference]) + 0.0,
        kl_k3=exact_mean(k3),
    )


def response_lengths(batch: SampleBatch) -> list[int]:
    """Response tokens of every sample."""
    return [
        int(batch.loss_mask[start:end].sum(dtype=np.int64))
        for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)
    ]


def summarise(batch: SampleBatch) -> BatchSummary:
    """What a step's line in ``steps.jsonl`` must say about its samples; gates recompute exactly this."""
    return BatchSummary(
        samples=len(batch.samples),
        **dataclasses.asdict(logprob_statistics(batch)),
        reward_mean=exact_mean([sample.reward for sample in batch.samples]),
        response_len_mean=exact_mean([float(length) for length in response_lengths(batch)]),
        truncated=sum(sample.finish_reason == "length" for sample in batch.samples),
    )


def merge_statistics(parts: Iterable[LogprobStatistics | BatchSummary]) -> LogprobStatistics:
    """Statistics of several batches together: counts added, maximum of maxima, means weighted by tokens."""
    items = list(parts)
    tokens = sum(item.tokens_compared for item in items)

    def weighted(values: list[float]) -> float:
        if tokens == 0:
            return 0.0
        products = [value * item.tokens_compared for value, item in zip(values, items, strict=True)]
        return _exact_sum(products) / tokens

    return LogprobStatistics(
        tokens_compared=tokens,
        mismatches=sum(item.mismatches for item in items),
        max_abs_dlogp=max((item.max_abs_dlogp for item in items), default=0.0),
        mean_abs_dlogp=weighted([item.mean_abs_dlogp for item in items]),
        kl_k1=weighted([item.kl_k1 for item in items]),
        kl_k3=weighted([item.kl_k3 for item in items]),
    )


def _exact_sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
    except OverflowError:
        return math.nan


def _expm1(value: float) -> float:
    try:
        return math.expm1(value)
    except OverflowError:
        return math.inf
