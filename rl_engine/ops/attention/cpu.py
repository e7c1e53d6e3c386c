"""Attention in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.numerics.contract import Contract
from rl_engine.ops.attention import AttentionProvider
from rl_engine.ops.attention.paged import PagedBatch, PagedCache, packed_batch
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.library import load

BLOCK = Contract().kv_block


def _check(x: Tensor) -> None:
    assert x.dtype == torch.bfloat16 and x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, page: int, lse: Tensor | None) -> Tensor:
    _check(q)
    heads, kv_heads, width = q.shape[1], k_pages.shape[1], q.shape[2]
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    items = batch.tiles(load().rlk_attention_tile(heads, kv_heads))
    load().rlk_attention(
        *(heads, kv_heads, width, page, q.data_ptr(), q.stride(0), k_pages.data_ptr(), v_pages.data_ptr()),
        *(batch.table.data_ptr(), batch.table.shape[1], batch.q_offsets.data_ptr(), batch.q_position.data_ptr()),
        *(items.shape[0], items.data_ptr(), width**-0.5, out.data_ptr(), None if lse is None else lse.data_ptr()),
    )
    return out


def _store(k: Tensor, v: Tensor, slots: Tensor, k_pages: Tensor, v_pages: Tensor, page: int) -> None:
    _check(k)
    _check(v)
    load().rlk_kv_store(
        *(k.shape[0], k.shape[1], k.shape[2], page, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
        *(slots.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr()),
    )


class CpuAttention(AttentionProvider):
    def forward_packed(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        batch = packed_batch(layout, BLOCK)
        pages = sum(-(-length // BLOCK) for length in layout.lengths)
        k_pages = torch.empty(pages, k.shape[1], k.shape[2], BLOCK, dtype=torch.bfloat16)
        v_pages = torch.empty(pages, k.shape[1], BLOCK, k.shape[2], dtype=torch.bfloat16)
        _store(k, v, batch.slots, k_pages, v_pages, BLOCK)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        return _attend(q, k_pages, v_pages, batch, BLOCK, lse), lse

    def cached(self, q: Tensor, k: Tensor, v: Tensor, cache: PagedCache, layer: int, batch: PagedBatch) -> Tensor:
        _store(k, v, batch.slots, cache.k[layer], cache.v[layer], cache.page)
        return _attend(q, cache.k[layer], cache.v[layer], batch, cache.page, None)

    def backward_packed(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: PackedLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        for x in (dout, q, k, v, out):
            _check(x)
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.bfloat16) for x in (q, k, v))
        delta = torch.empty_like(lse)
        items = layout.blocks(BLOCK)
        load().rlk_attention_backward(
            *(q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0)),
            *(v.data_ptr(), v.stride(0), out.data_ptr(), out.stride(0), dout.data_ptr(), dout.stride(0)),
            *(lse.data_ptr(), delta.data_ptr(), layout.offsets.data_ptr(), items.shape[0], items.data_ptr()),
            *(q.shape[2] ** -0.5, dq.data_ptr(), dk.data_ptr(), dv.data_ptr()),
        )
        return dq, dk, dv
