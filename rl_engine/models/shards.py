"""Second copies of linear weights across tensor-parallel ranks: bytes that change place, no arithmetic.

A rank that stores output rows (column-parallel storage, as everywhere in this package) computes its input slice of dX
with all rows of that slice: its *input shard*. A rank that stores input columns (row-parallel storage of o and down, as
other engines have it) computes its output columns with all columns of those rows: its *output shard*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rl_engine.models.sharding import Sharding
from rl_engine.ops.weight import Part, Weight
from rl_engine.parallel import Group


def refresh_input_shards(
    weights: Iterable[Weight], sharding: Sharding, tp: Group, order: dict[str, Tensor] | None = None
) -> None:
    """Every rank's rows [out / TP, in] for all rows of its input columns [out, in / TP], into ``Weight.input_shard``.

    The input gradient then is one chain over all canonical columns, computed whole by one rank. One rank alone needs no
    copy, unless its rows lie in another order.

    Args:
        weights: of any owner; their names are merged names of the model.
        order: by weight name, int64 [rows]: which stored row is this rank's i-th in HF order (q, k, v; gate, up), for
            an engine that stores them otherwise.
    """
    order = order or {}
    for weight in weights:
        value = weight.value.detach()
        if weight.name in order:
            value = value[order[weight.name].to(value.device)]
        elif tp.size == 1:
            continue
        slices = [sharding.inputs(weight.name, rank) for rank in range(tp.size)]
        first, last = slices[tp.index]
        rows = [sharding.part_rows(weight.name, rank) for rank in range(tp.size)]
        received = tp.all_to_all(
            [value[:, a:b].contiguous() for a, b in slices],
            [(sum(counts), last - first) for counts in rows],
            purpose="weights",
        )
        weight.input_shard = _copy(weight, "inputs", in_hf_order(received, rows, 0))


def refresh_output_shards(weights: Iterable[Weight], sharding: Sharding, tp: Group) -> None:
    """The mirror: every rank's input columns [out, in / TP] for all columns of its output rows [out / TP, in], into
    ``Weight.output_shard``. One rank alone needs no copy.

    Args:
        weights: of any owner, stored by input columns; their names are merged names of the model.
    """
    for weight in weights:
        if tp.size == 1:
            continue
        value = weight.value.detach()
        rows = [sharding.rows(weight.name, rank) for rank in range(tp.size)]
        columns = [sharding.inputs(weight.name, rank) for rank in range(tp.size)]
        own = rows[tp.index][1] - rows[tp.index][0]
        received = tp.all_to_all(
            [value[a:b].contiguous() for a, b in rows],
            [(own, last - first) for first, last in columns],
            purpose="weights",
        )
        weight.output_shard = _copy(weight, "outputs", torch.cat(received, 1))


def _copy(weight: Weight, what: str, value: Tensor) -> Weight:
    return Weight(f"{weight.name}.{what}", value, (Part(weight.name, 0, value.shape[0]),))


def in_hf_order(pieces: Sequence[Tensor], counts: Sequence[Sequence[int]], axis: int) -> Tensor:
    """Every TP rank's rows of a merged weight (or columns of what it makes), joined tensor by tensor.

    ``counts``: for every rank, its rows of each HF tensor (``Sharding.part_rows``).
    """
    cut = [piece.split(list(rows), axis) for piece, rows in zip(pieces, counts, strict=True)]
    return torch.cat([part for parts in zip(*cut, strict=True) for part in parts], axis)
