"""Paged decode described in memory that keeps its place: what a captured pass reads, and its launch on a GPU.

The same kernels as ``cached`` takes, so the same bits. Nothing is read from the batch on the host: positions, slots and
tables may change between replays of a graph.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_engine.ops.attention.paged import PagedBatch, PagedCache

if TYPE_CHECKING:
    from rl_engine.ops.attention.triton import TritonAttention


@dataclasses.dataclass(frozen=True)
class DecodeBatch(PagedBatch):
    """One new token of every sample.

    Attributes:
        items: int32 [S, 4]: row of q, its position, 1, row of ``table``.
        splits: KV splits that no sample may exceed in any replay.
        keys: of all samples when the pass was cut; only speed depends on it.
    """

    items: Tensor
    splits: int
    keys: int


def attend(
    provider: TritonAttention, q: Tensor, k: Tensor, v: Tensor, cache: PagedCache, layer: int, batch: DecodeBatch
) -> Tensor:
    """bf16 [S, heads, D]: as ``TritonAttention.cached``."""
    from rl_engine.ops.attention.triton import decode_pages, store

    keys, values = cache.k[layer], cache.v[layer]
    store(k, v, batch.slots, keys, values)
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    counts = (1, batch.splits, batch.keys)
    tiles = provider.tiles[q.shape[2]]
    decode_pages(q, keys, values, batch.items, batch.table, *counts, out, None, tiles, settled=True)
    return out
