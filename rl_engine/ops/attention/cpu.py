"""Attention in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.numerics.contract import Contract
from rl_engine.ops.attention import AttentionProvider, block_runs, run_rows
from rl_engine.ops.attention.paged import PagedBatch, packed_batch, run_batch, transposed_pairs
from rl_engine.ops.layout import PackedLayout, Runs
from rl_engine.ops.library import load

BLOCK = Contract().kv_block


def _check(x: Tensor) -> None:
    assert x.dtype == torch.bfloat16 and x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, page: int, lse: Tensor | None) -> Tensor:
    _check(q)
    heads, kv_heads, width = q.shape[1], k_pages.shape[1], q.shape[2]
    whole = sum(batch.counts()) == q.shape[0]
    out = torch.empty(q.shape, dtype=torch.bfloat16) if whole else torch.zeros(q.shape, dtype=torch.bfloat16)
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
    def forward_runs(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, runs: Runs) -> tuple[Tensor, Tensor]:
        pages = sum(-(-length // BLOCK) for length in layout.lengths)
        k_pages = torch.empty(pages, k.shape[1], k.shape[2], BLOCK, dtype=torch.bfloat16)
        v_pages = torch.empty(pages, k.shape[1], BLOCK, k.shape[2], dtype=torch.bfloat16)
        _store(k, v, packed_batch(layout, BLOCK).slots, k_pages, v_pages, BLOCK)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        if not runs:
            return torch.empty_like(q), lse
        return _attend(q, k_pages, v_pages, run_batch(layout, BLOCK, runs), BLOCK, lse), lse

    def over_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: PagedBatch,
        *,
        settled: bool = False,
    ) -> Tensor:
        page = v_pages.shape[2]
        assert k_pages.is_contiguous() and v_pages.is_contiguous() and k_pages.shape[2:] == (q.shape[2], page)
        _store(k, v, batch.slots, k_pages, v_pages, page)
        return _attend(q, k_pages, v_pages, batch, page, None)

    def paired_pages(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        return transposed_pairs(pages)

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        _check(dout)
        _check(out)
        delta = torch.empty(out.shape[:2], dtype=torch.float32)
        load().rlk_attention_delta(
            *(out.shape[0], out.shape[1], out.shape[2], out.data_ptr(), out.stride(0)),
            *(dout.data_ptr(), dout.stride(0), delta.data_ptr()),
        )
        return delta

    def backward_runs(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        layout: PackedLayout,
        runs: Runs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        for x in (dout, q, k, v):
            _check(x)
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.bfloat16) for x in (q, k, v))
        items = block_runs(runs, BLOCK)
        load().rlk_attention_backward(
            *(q.shape[1], k.shape[1], q.shape[2], q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0)),
            *(v.data_ptr(), v.stride(0), dout.data_ptr(), dout.stride(0), lse.data_ptr(), delta.data_ptr()),
            *(layout.offsets.data_ptr(), items.shape[0], items.data_ptr()),
            *(q.shape[2] ** -0.5, dq.data_ptr(), dk.data_ptr(), dv.data_ptr()),
        )
        if sum(count for _, _, count in runs) == q.shape[0]:
            return dq, dk, dv
        rows = run_rows(layout, runs)
        return dq[rows], dk[rows], dv[rows]
