"""Attention as torch has it: ``scaled_dot_product_attention``, over a dense KV cache in decode."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from rl_engine.ops.layout import PackedLayout

GROWTH = 64  # tokens the dense cache grows by


@dataclasses.dataclass(frozen=True)
class DenseBatch:
    """Rows of the cache, each with its first new position and number of new tokens."""

    rows: list[int]
    starts: list[int]
    counts: list[int]
    positions: Tensor
    q_offsets: Tensor
    mask: Tensor | None  # bool [R, 1, 1, L] when every row decodes one token


class DenseCache:
    """Keys and values [R, kv_heads, L, D] per layer, one row per sample, kept dense as samples leave."""

    def __init__(self, layers: int, kv_heads: int, width: int) -> None:
        self.k = [torch.zeros(0, kv_heads, 0, width, dtype=torch.bfloat16) for _ in range(layers)]
        self.v = [torch.zeros(0, kv_heads, 0, width, dtype=torch.bfloat16) for _ in range(layers)]
        self.handles: list[int] = []
        self._next = 0

    def join(self) -> int:
        handle, self._next = self._next, self._next + 1
        self.handles.append(handle)
        self._resize(len(self.handles), self.k[0].shape[2])
        return handle

    def leave(self, handles: list[int]) -> None:
        kept = [row for row, handle in enumerate(self.handles) if handle not in set(handles)]
        index = torch.tensor(kept, dtype=torch.int64)
        self.handles = [self.handles[row] for row in kept]
        self.k = [k.index_select(0, index) for k in self.k]
        self.v = [v.index_select(0, index) for v in self.v]

    def _resize(self, rows: int, length: int) -> None:
        if rows <= self.k[0].shape[0] and length <= self.k[0].shape[2]:
            return
        for tensors in (self.k, self.v):
            for layer, old in enumerate(tensors):
                new = old.new_zeros(max(rows, old.shape[0]), old.shape[1], max(length, old.shape[2]), old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                tensors[layer] = new

    def batch(self, handles: list[int], starts: list[int], counts: list[int]) -> DenseBatch:
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        if longest > self.k[0].shape[2]:
            self._resize(len(self.handles), -(-longest // GROWTH) * GROWTH)
        rows = [self.handles.index(handle) for handle in handles]
        mask = None
        if counts == [1] * len(counts) and rows == list(range(len(self.handles))):
            mask = torch.arange(longest)[None] <= torch.tensor(starts)[:, None]
            mask = mask[:, None, None]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        return DenseBatch(rows, starts, counts, positions, torch.tensor([0, *counts]).cumsum(0), mask)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


class StockAttention:
    def packed(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        lengths = list(layout.lengths)
        outs = []
        for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            heads = (_heads_first(x) for x in (qs, ks, vs))
            out = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def new_cache(self, layers: int, kv_heads: int, width: int, pages: int, page: int) -> DenseCache:
        return DenseCache(layers, kv_heads, width)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, cache: DenseCache, layer: int, batch: DenseBatch) -> Tensor:
        keys, values = cache.k[layer], cache.v[layer]
        if batch.mask is not None:
            rows, longest = torch.arange(len(batch.rows)), batch.mask.shape[-1]
            keys[rows, :, batch.positions] = k
            values[rows, :, batch.positions] = v
            seen = (x[:, :, :longest] for x in (keys, values))
            out = functional.scaled_dot_product_attention(q.unsqueeze(2), *seen, attn_mask=batch.mask, enable_gqa=True)
            return out.squeeze(2)
        outs, first = [], 0
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            part = slice(first, first + count)
            keys[row, :, start : start + count] = k[part].transpose(0, 1)
            values[row, :, start : start + count] = v[part].transpose(0, 1)
            seen = (x[row : row + 1, :, : start + count] for x in (keys, values))
            mask = None
            if start:
                mask = torch.arange(start + count)[None] <= torch.arange(start, start + count)[:, None]
            out = functional.scaled_dot_product_attention(
                _heads_first(q[part]), *seen, attn_mask=mask, is_causal=start == 0, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1))
            first += count
        return torch.cat(outs)
