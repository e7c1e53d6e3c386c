"""How far train and rollout logprobs are apart, by size and by place, from the recorded samples alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from rl_engine.numerics.bits import int_view
from rl_engine.records.codec import RecordError
from rl_engine.records.reader import RunReader
from rl_engine.records.types import SampleBatch, StepRecord

# Upper edges of |train - rollout| in nats: half decades; a last bin takes what is larger.
EDGES: tuple[float, ...] = tuple(10.0 ** (power / 2) for power in range(-14, 3))
PLACES = 48  # bins of the position plot


@dataclasses.dataclass(frozen=True, eq=False)
class Deltas:
    """Counts over the response tokens of all steps.

    ``equal`` tokens have the same bits; ``counts`` int64 [len(EDGES) + 1] are the others by size. ``place`` holds the
    first response position of each bin, ``mean`` and ``largest`` fp64 the |difference| there, in nats.
    """

    equal: int
    not_finite: int
    counts: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float64]
    largest: npt.NDArray[np.float64]


class _Places:
    """Sum, count and maximum of |difference| for each position in the response."""

    def __init__(self) -> None:
        self.total = np.zeros(0)
        self.count = np.zeros(0, np.int64)
        self.largest = np.zeros(0)

    def add(self, position: npt.NDArray[np.int64], size: npt.NDArray[np.float64]) -> None:
        need = int(position.max()) + 1 - len(self.total)
        if need > 0:
            self.total = np.pad(self.total, (0, need))
            self.count = np.pad(self.count, (0, need))
            self.largest = np.pad(self.largest, (0, need))
        self.total += np.bincount(position, weights=size, minlength=len(self.total))
        self.count += np.bincount(position, minlength=len(self.count))
        np.maximum.at(self.largest, position, size)


def measure_deltas(reader: RunReader, steps: list[StepRecord]) -> Deltas:
    """One pass over the samples of ``steps``.

    Raises:
        RecordError: damaged samples, or a step whose recorded counts are not those of its samples.
    """
    counts = np.zeros(len(EDGES) + 1, np.int64)
    equal = not_finite = 0
    places = _Places()
    for step in steps:
        same, size, position = _differences(reader.samples(step.step))
        found = (len(same), int(np.count_nonzero(~same)))
        recorded = (step.tokens_compared, step.mismatches)
        if found != recorded:
            raise RecordError(
                f"step {step.step}: {recorded[1]} of {recorded[0]} recorded, {found[1]} of {found[0]} in the samples",
                "counts that follow from the samples",
            )
        equal += int(np.count_nonzero(same))
        finite = np.isfinite(size)
        not_finite += int(np.count_nonzero(~finite))
        other = size[finite & ~same]
        counts += np.bincount(np.searchsorted(EDGES, other, side="left"), minlength=len(counts))
        if finite.any():
            places.add(position[finite], size[finite])
    return Deltas(equal, not_finite, counts, *_binned(places))


def _differences(
    batch: SampleBatch,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """(same bits, |train - rollout| in fp64, position in the response) of every response token."""
    chosen = np.flatnonzero(batch.loss_mask)
    rollout, train = batch.rollout_logprob[chosen], batch.train_logprob[chosen]
    same = int_view(rollout) == int_view(train)
    with np.errstate(invalid="ignore"):
        size = np.abs(train.astype(np.float64) - rollout.astype(np.float64))
    before = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
    sample = np.searchsorted(batch.offsets, chosen, side="right") - 1
    position = np.arange(len(chosen), dtype=np.int64) - before[batch.offsets[sample]]
    return same, size, position


def _binned(
    places: _Places,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    length = len(places.total)
    if length == 0:
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    start = np.unique(np.linspace(0, length, min(PLACES, length), endpoint=False).astype(np.int64))
    count = np.add.reduceat(places.count, start)
    total = np.add.reduceat(places.total, start)
    return start, total / np.maximum(count, 1), np.maximum.reduceat(places.largest, start)
