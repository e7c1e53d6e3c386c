"""Fold units and micro-batches: how an update's samples are cut, from their lengths alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from rl_engine.engines.types import Sample, retained_bits
from rl_engine.ops.layout import PackedLayout


def fold_units(lengths: list[int], fold_tokens: int) -> list[list[int]]:
    """Runs of sample indices in canonical order, cut greedily: a unit closes when the next sample would exceed
    ``fold_tokens``; a longer sample is its own unit."""
    units: list[list[int]] = []
    used = 0
    for index, length in enumerate(lengths):
        if units and used + length <= fold_tokens:
            units[-1].append(index)
            used += length
        else:
            units.append([index])
            used = length
    return units


def micro_batches(units: list[list[int]], lengths: list[int], max_tokens: int | None) -> list[list[list[int]]]:
    """Consecutive whole units of at most ``max_tokens`` tokens; None takes one unit each.

    Raises:
        ValueError: a unit alone exceeds ``max_tokens``.
    """
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    if max_tokens is not None and max(sizes, default=0) > max_tokens:
        raise ValueError(f"a fold unit of {max(sizes)} tokens exceeds max-tokens-per-gpu {max_tokens}")
    batches: list[list[list[int]]] = []
    used = 0
    for unit, size in zip(units, sizes, strict=True):
        if batches and max_tokens is not None and used + size <= max_tokens:
            batches[-1].append(unit)
            used += size
        else:
            batches.append([unit])
            used = size
    return batches


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples joined for one forward and backward pass.

    Attributes:
        indices: samples' places in the update's canonical order.
        layout: lengths and fold units.
        ids: int64 [T]. rows: int64 [R], the token before each response token. targets: int64 [R].
        counts: response tokens of each sample, summing to R.
        mask: packed bits uint8 [R, ceil(V / 8)] of the retained sets, or None.
    """

    indices: list[int]
    layout: PackedLayout
    ids: Tensor
    rows: Tensor
    targets: Tensor
    counts: list[int]
    mask: Tensor | None


def build_micro_batch(samples: list[Sample], units: list[list[int]], vocabulary: int) -> MicroBatch:
    """Joins the samples of ``units`` (indices into ``samples``)."""
    indices = [index for unit in units for index in unit]
    chosen = [samples[index] for index in indices]
    layout = PackedLayout(tuple(s.length for s in chosen), tuple(len(unit) for unit in units))
    ids = np.concatenate([np.concatenate([s.prompt_tokens, s.response_tokens]) for s in chosen]).astype(np.int64)
    starts = layout.offsets[:-1].tolist()
    rows = [
        torch.arange(start + len(s.prompt_tokens) - 1, start + s.length - 1)
        for start, s in zip(starts, chosen, strict=True)
    ]
    targets = np.concatenate([s.response_tokens for s in chosen]).astype(np.int64)
    mask = None
    if any(s.retained is not None for s in chosen):
        everything = np.packbits(np.ones(vocabulary, dtype=np.uint8), bitorder="little")
        bits = [
            retained_bits(row, vocabulary)
            for s in chosen
            for row in (s.retained if s.retained is not None else [everything] * len(s.response_tokens))
        ]
        mask = torch.from_numpy(np.stack(bits))
    return MicroBatch(
        indices, layout, torch.from_numpy(ids), torch.cat(rows), torch.from_numpy(targets),
        [len(s.response_tokens) for s in chosen], mask,
    )  # fmt: skip
