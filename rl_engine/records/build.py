"""Records from what engines hand over: plain arrays and counts, no engine types."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rl_engine.records.types import RetainedSets, RouteRecord, SampleBatch, SampleRecord, Side

Rows = Sequence[npt.NDArray[Any]]


def sample_batch(
    *,
    prompts: Rows,
    responses: Rows,
    rollout_logprobs: Rows,
    train_logprobs: Rows,
    samples: Sequence[SampleRecord],
    retained: Sequence[Rows | None] | None = None,
    vocab: int = 0,
) -> SampleBatch:
    """Join per-sample arrays into one batch, in the order given.

    Args:
        prompts, responses: int32 token ids of every sample; a response may be empty.
        rollout_logprobs, train_logprobs: fp32, one value per response token, in nats.
        samples: identity and outcome of every sample.
        retained: per sample, one row per response token: sorted ids (int32) or a little-endian bitmask (uint8,
            ``ceil(vocab / 8)``); None for a sample (or altogether) where no filter was on.
        vocab: size of the vocabulary that ``retained`` speaks of.

    Raises:
        ValueError: lengths that do not fit together.
    """
    counts = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    offsets = np.cumsum([0, *counts]).astype(np.int64)
    total = int(offsets[-1])
    mask = np.zeros(total, dtype=np.uint8)
    columns = {name: np.zeros(total, dtype=np.float32) for name in ("rollout", "train")}
    for index, prompt in enumerate(prompts):
        chosen = slice(int(offsets[index]) + len(prompt), int(offsets[index + 1]))
        mask[chosen] = 1
        for name, rows in (("rollout", rollout_logprobs), ("train", train_logprobs)):
            row = np.asarray(rows[index])
            if row.dtype != np.float32 or row.shape != (len(responses[index]),):
                raise ValueError(f"sample {index}: {name} logprobs {row.dtype} {row.shape} for its response")
            columns[name][chosen] = row
    parts = [part for pair in zip(prompts, responses, strict=True) for part in pair]
    tokens = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts] or [np.zeros(0, np.int32)])
    if len(samples) != len(counts):
        raise ValueError(f"{len(samples)} identities for {len(counts)} samples")
    return SampleBatch(
        tokens=tokens,
        offsets=offsets,
        loss_mask=mask,
        rollout_logprob=columns["rollout"],
        train_logprob=columns["train"],
        samples=tuple(samples),
        retained=None if retained is None else _retained(retained, [len(p) for p in prompts], responses, vocab),
    )


def route_records(
    side: Side,
    counts: Iterable[tuple[str, str, str, int, int]],
    execution: Literal["eager", "graph"] = "eager",
) -> list[RouteRecord]:
    """Group ``(operator, provider, dtype, rows, calls)`` counts into records; ``rows`` is the bucket's upper limit."""
    shapes: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
    for operator, provider, dtype, rows, calls in counts:
        bucket = f"rows<={rows}"
        found = shapes[(operator, provider, dtype)]
        found[bucket] = found.get(bucket, 0) + calls
    return [
        RouteRecord(side, operator, provider, dtype, execution, sum(found.values()), found)
        for (operator, provider, dtype), found in sorted(shapes.items())
    ]


def _retained(retained: Sequence[Rows | None], prompts: list[int], responses: Rows, vocab: int) -> RetainedSets:
    if vocab < 1:
        raise ValueError("retained sets need the vocabulary's size")
    empty = np.zeros(0, dtype=np.int32)
    rows: list[npt.NDArray[Any]] = []
    for index, sets in enumerate(retained):
        wanted = len(responses[index])
        if sets is not None and len(sets) != wanted:
            raise ValueError(f"sample {index}: {len(sets)} retained sets for {wanted} response tokens")
        rows += [empty] * prompts[index]
        rows += [empty] * wanted if sets is None else [_ids(row, vocab) for row in sets]
    lengths = np.array([0, *(row.size for row in rows)], dtype=np.int64)
    return RetainedSets(np.cumsum(lengths), np.concatenate(rows) if rows else empty, vocab)


def _ids(row: npt.NDArray[Any], vocab: int) -> npt.NDArray[np.int32]:
    if row.dtype == np.uint8:
        return np.flatnonzero(np.unpackbits(row, count=vocab, bitorder="little")).astype(np.int32)
    return row.astype(np.int32, copy=False)
