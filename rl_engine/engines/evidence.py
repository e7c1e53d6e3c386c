"""Samples as evidence and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rl_engine.engines.types import RetainedRow, Sample, retained_ids
from rl_engine.ops import Route
from rl_engine.records.types import RetainedSets, RouteRecord, SampleBatch, SampleRecord, Side

Logprobs = Sequence[npt.NDArray[np.float32]]


def sample_batch(
    samples: Sequence[Sample], train_logprobs: Logprobs, records: Sequence[SampleRecord], vocabulary: int
) -> SampleBatch:
    """The records of one step: samples in canonical order with both sides' logprobs, +0 on prompt tokens."""
    lengths = [s.length for s in samples]

    def on_responses(values: Logprobs) -> npt.NDArray[np.float32]:
        parts = [
            np.concatenate([np.zeros(len(s.prompt_tokens), np.float32), v])
            for s, v in zip(samples, values, strict=True)
        ]
        return np.concatenate(parts).astype(np.float32)

    masks = [np.repeat(np.array([0, 1], np.uint8), [len(s.prompt_tokens), len(s.response_tokens)]) for s in samples]
    return SampleBatch(
        tokens=np.concatenate([np.concatenate([s.prompt_tokens, s.response_tokens]) for s in samples]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        loss_mask=np.concatenate(masks),
        rollout_logprob=on_responses([s.logprobs for s in samples]),
        train_logprob=on_responses(train_logprobs),
        samples=tuple(records),
        retained=_retained(samples, vocabulary),
    )


def _retained(samples: Sequence[Sample], vocabulary: int) -> RetainedSets | None:
    if all(s.retained is None for s in samples):
        return None
    nothing = np.zeros(0, dtype=np.int32)
    rows: list[npt.NDArray[np.int32]] = []
    for s in samples:
        rows.extend([nothing] * len(s.prompt_tokens))
        rows.extend(
            [nothing] * len(s.response_tokens)
            if s.retained is None
            else [retained_ids(row, vocabulary) for row in s.retained]
        )
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return RetainedSets(offsets, np.concatenate(rows).astype(np.int32), vocabulary)


def samples_of(batch: SampleBatch) -> list[Sample]:
    """The samples of a recorded step, in the file's order."""
    samples = []
    bounds = zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), batch.samples, strict=True)
    for start, end, record in bounds:
        split = start + int((batch.loss_mask[start:end] == 0).sum())
        retained: tuple[RetainedRow, ...] | None = None
        if batch.retained is not None:
            offsets = batch.retained.offsets
            retained = tuple(batch.retained.ids[offsets[t] : offsets[t + 1]] for t in range(split, end))
        samples.append(
            Sample(
                prompt=record.prompt_index,
                sample=record.sample_index,
                prompt_tokens=batch.tokens[start:split],
                response_tokens=batch.tokens[split:end],
                logprobs=batch.rollout_logprob[split:end],
                retained=retained,
                weight_version=record.weight_version,
                engine=record.engine,
                finish_reason=record.finish_reason,
            )
        )
    return samples


def route_records(routes: Sequence[Route], side: Side) -> list[RouteRecord]:
    """One record per operator, provider, dtype and form of execution, with its row buckets."""
    joined: dict[tuple[str, str, str, Literal["eager", "graph"]], dict[str, int]] = {}
    for route in routes:
        shapes = joined.setdefault((route.operator, route.provider, route.dtype, route.execution), {})
        shapes[f"T<={route.rows}"] = shapes.get(f"T<={route.rows}", 0) + route.calls
    return [
        RouteRecord(side, operator, provider, dtype, execution, sum(shapes.values()), shapes)
        for (operator, provider, dtype, execution), shapes in sorted(joined.items())
    ]
