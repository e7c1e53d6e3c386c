"""Attention as torch has it: ``scaled_dot_product_attention``, over a dense KV cache in decode."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout

GROWTH = 64  # tokens the dense cache grows by


@dataclasses.dataclass(frozen=True)
class DenseBatch:
    """Rows of the cache, each with its first new position and number of new tokens.

    Attributes:
        positions: int64 [T], position of each new token.
        single: int64, places in the joined tokens of the samples that add one token, and ``single_rows`` their rows in
            the cache. None stands for all of them, in order.
        mask: bf16 [R, 1, 1, L], added to the scores of those samples; -inf where no key is.
    """

    rows: list[int]
    starts: list[int]
    counts: list[int]
    positions: Tensor
    single: Tensor | None
    single_rows: Tensor
    single_positions: Tensor
    mask: Tensor | None


class DenseCache:
    """Keys and values [R, kv_heads, L, D] per layer, one row per sample, kept dense as samples leave."""

    def __init__(self, layers: int, kv_heads: int, width: int, device: torch.device) -> None:
        empty = torch.zeros(0, kv_heads, 0, width, dtype=torch.bfloat16, device=device)
        self.k, self.v = ([empty] * layers for _ in range(2))
        self.device = device
        self.handles: list[int] = []
        self._rows: dict[int, int] = {}
        self._next = 0

    def join(self) -> int:
        handle, self._next = self._next, self._next + 1
        self.reserve(len(self.handles) + 1, 0)
        self._rows[handle] = len(self.handles)
        self.handles.append(handle)
        return handle

    def row(self, handle: int) -> int:
        """Where a sample's keys lie; it may change when another leaves."""
        return self._rows[handle]

    def leave(self, handles: list[int]) -> None:
        """The last sample takes the place of one that leaves."""
        for handle in handles:
            row, last = self._rows.pop(handle), self.handles.pop()
            if last == handle:
                continue
            for tensor in (*self.k, *self.v):
                tensor[row] = tensor[len(self.handles)]
            self.handles[row] = last
            self._rows[last] = row

    def reserve(self, rows: int, length: int) -> None:
        """Room for ``rows`` samples of ``length`` tokens, so that it need not grow on the way."""
        have = self.k[0].shape
        if rows <= have[0] and length <= have[2]:
            return
        rows, length = max(rows, have[0]), max(-(-length // GROWTH) * GROWTH, have[2])
        used = len(self.handles)
        for tensors in (self.k, self.v):
            for layer, old in enumerate(tensors):
                new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
                new[:used, :, : old.shape[2]] = old[:used]
                tensors[layer] = new

    def batch(self, handles: list[int], starts: list[int], counts: list[int]) -> DenseBatch:
        """The pass that appends ``counts`` tokens at ``starts`` to each sample."""
        length, have = max(start + count for start, count in zip(starts, counts, strict=True)), self.k[0].shape[2]
        if length > have:
            self.reserve(len(self.handles), max(length, have + have // 2))
        rows = [self._rows[handle] for handle in handles]
        single = [i for i, (start, count) in enumerate(zip(starts, counts, strict=True)) if count == 1 and start]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        places = None
        if len(single) < len(rows) or rows != list(range(len(rows))):
            offsets = [0]
            for count in counts:
                offsets.append(offsets[-1] + count)
            places = self._indices([offsets[i] for i in single])
        ends = self._indices([starts[i] for i in single])
        mask = None
        if single:
            exists = torch.arange(max(starts[i] for i in single) + 1, device=self.device)[None] <= ends[:, None]
            nothing = torch.zeros(exists.shape, dtype=torch.bfloat16, device=self.device)
            mask = nothing.masked_fill(~exists, -torch.inf)[:, None, None]
        single_rows = self._indices([rows[i] for i in single])
        return DenseBatch(rows, starts, counts, positions, places, single_rows, ends, mask)

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _causal(q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """[1, heads, T, D] of q [T, heads, D] at positions ``start`` ...; keys and values [1, kv_heads, start + T, D]."""
    mask = None
    if start:
        places = torch.arange(keys.shape[2], device=q.device)
        mask = places[None] <= places[start:, None]
    return functional.scaled_dot_product_attention(
        _heads_first(q), keys, values, attn_mask=mask, is_causal=start == 0, enable_gqa=True
    )


class StockAttention:
    def packed(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, exchange: Exchange = ALONE) -> Tensor:
        k = exchange.join_tokens(k, layout, purpose="K")
        v = exchange.join_tokens(v, layout, purpose="V")
        runs, lengths = exchange.runs(layout), list(layout.lengths)
        samples = list(zip(k.split(lengths), v.split(lengths), strict=True))
        # A rank without a token still has a part in the gradients of keys and values.
        outs = [] if runs else [q + (k[:0, :1] + v[:0, :1])]
        for (sample, first, count), qs in zip(runs, q.split([count for _, _, count in runs]), strict=True):
            seen = (_heads_first(x[: first + count]) for x in samples[sample])
            outs.append(_causal(qs, *seen, first)[0].transpose(0, 1))
        return torch.cat(outs)

    def new_cache(
        self, layers: int, kv_heads: int, width: int, pages: int, page: int, device: torch.device
    ) -> DenseCache:
        return DenseCache(layers, kv_heads, width, device)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, cache: DenseCache, layer: int, batch: DenseBatch) -> Tensor:
        keys, values = cache.k[layer], cache.v[layer]
        if batch.single is None:
            return self._single(q, k, v, keys, values, batch)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if batch.mask is not None:
            places = batch.single
            out[places] = self._single(q[places], k[places], v[places], keys, values, batch)
        first = 0
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            part = slice(first, first + count)
            first += count
            if count == 1 and start:
                continue
            keys[row, :, start : start + count] = k[part].transpose(0, 1)
            values[row, :, start : start + count] = v[part].transpose(0, 1)
            seen = (x[row : row + 1, :, : start + count] for x in (keys, values))
            out[part] = _causal(q[part], *seen, start)[0].transpose(0, 1)
        return out

    @staticmethod
    def _single(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: DenseBatch) -> Tensor:
        """One new token [R, heads, D] of each of R samples. The query heads of a group stand in the place of queries,
        so that torch need not copy the keys for every head."""
        rows, mask = batch.single_rows, batch.mask
        assert mask is not None
        length = mask.shape[-1]
        keys[rows, :, batch.single_positions] = k
        values[rows, :, batch.single_positions] = v
        if batch.single is None:
            seen = (x[: len(rows), :, :length] for x in (keys, values))
        else:
            seen = (x[:, :, :length].index_select(0, rows) for x in (keys, values))
        grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
        out = functional.scaled_dot_product_attention(grouped, *seen, attn_mask=mask)
        return out.reshape(q.shape)
