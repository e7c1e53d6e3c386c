"""Causal attention with grouped KV heads: one arithmetic for training, prefill, chunked prefill and paged decode.

Contract (CPU). ``d`` is the raw dot (a chain over head_dim), ``c = fp32(head_dim^-1/2)``. Keys come in blocks of 64,
blocks in splits of 1,024, both counted from the sample's first token. Per block and query: ``m`` the running maximum of
d, ``mu = fl(m c)``, ``p = exp(fl(fl(d c) - mu))``, ``alpha = exp(fl(mu_old - mu))``, ``l = fl(fl(l alpha) + tree(p))``,
``O = fl(fl(O alpha) + bf16(p) V)``, the block's product a chain from +0. A split starts from the empty state; splits
merge ascending: ``l = fl(fl(l a) + fl(l' b))``, O likewise. Output ``bf16(O / l)``, ``LSE = fl(mu + log l)``.

Backward. ``delta = tree(fl(dO O))``, ``P = exp(fl(fl(d c) - LSE))``, ``dS = bf16(fl(P fl(dP - delta)))``. dQ carries
over KV blocks ascending; dK and dV (from bf16(P)) over the group's query heads (outer) and query blocks ascending
(inner); a block is a chain from +0, the carry ``fl(acc + block)``. ``c`` multiplies the finished fp32 dQ and dK once.

Shapes: q bf16 [T, heads, D], k and v bf16 [T, kv_heads, D], any token stride; the result is [T, heads, D].
Invariant to: batch mates, packing, chunking, page size, what unused pages hold, for finite q, k, v and dO. (A key
behind the query in its block has p = +0; the product with an infinite value would be NaN.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.ops.attention.paged import PagedBatch, PagedCache
from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout, Runs, whole_runs


class AttentionProvider:
    """Kernels over pages (forward) and packed samples (backward)."""

    def forward_runs(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, runs: Runs) -> tuple[Tensor, Tensor]:
        """(out bf16 [Q, heads, D], LSE fp32 [Q, heads]) of the queries of ``runs``, q bf16 [Q, heads, D] in their
        order.

        k and v bf16 [T, kv_heads, D] are whole samples in the layout's order.
        """
        raise AssertionError("a provider defines forward_runs")

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """fp32 [Q, heads]: tree(fl(dO O)) over D."""
        raise AssertionError("a provider defines delta")

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
        """(dq, dk, dv) bf16 of the tokens of ``runs``, in their order; every input holds whole samples."""
        raise AssertionError("a provider defines backward_runs")

    def cached(self, q: Tensor, k: Tensor, v: Tensor, cache: PagedCache, layer: int, batch: PagedBatch) -> Tensor:
        """As :meth:`over_pages` on the pages of one layer of ``cache``, whose old keys were there before this pass."""
        return self.over_pages(q, k, v, cache.k[layer], cache.v[layer], batch, settled=True)

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
        """Stores k, v [T, kv_heads, D] into given pages, then attends every query of the batch to all of its sample so
        far: bf16 [T, heads, D], +0 in rows that belong to no sample.

        Args:
            k_pages: bf16, as :meth:`paired_pages` or the provider's cache has them; ``v_pages`` [pages, kv_heads, page,
                D] likewise. A new key whose slot is negative is stored nowhere; a sample may have no query.
            settled: no key before the first new one of its sample is written in this pass, and what wrote them was over
                before k and v were stored. Then a GPU may fetch them early. Say False where a page can be shared with
                a sample that fills it in the same pass.
        """
        raise AssertionError("a provider defines over_pages")

    def paired_pages(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """(k_pages, v_pages) of one tensor bf16 [2 B, kv_heads, page, D] in which page b's keys lie at 2 b and its
        values at 2 b + 1: views to be read with ``PagedBatch.doubled``. What lies inside a page of keys is the
        provider's own layout."""
        raise AssertionError("a provider defines paired_pages")

    def new_cache(
        self, layers: int, kv_heads: int, width: int, pages: int, page: int, device: torch.device
    ) -> PagedCache:
        assert device.type == "cpu", device
        return PagedCache(layers, kv_heads, width, pages, page)

    def forward_packed(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """(out bf16 [T, heads, D], LSE fp32 [T, heads]) of whole samples."""
        return self.forward_runs(q, k, v, layout, whole_runs(layout))

    def backward_packed(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: PackedLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) bf16 of whole samples."""
        return self.backward_runs(dout, q, k, v, lse, self.delta(dout, out), layout, whole_runs(layout))

    def packed(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, exchange: Exchange = ALONE) -> Tensor:
        """Training and scoring: every sample attends to itself. Own queries see the keys of all context-parallel ranks;
        backward, queries and what belongs to them are gathered, and each rank computes its own keys' gradients."""
        if not torch.is_grad_enabled():
            keys, values = _keys_and_values(k, v, layout, exchange)
            return self.forward_runs(q, keys, values, layout, exchange.runs(layout))[0]
        return _Attention.apply(q, k, v, layout, self, exchange)


def _keys_and_values(k: Tensor, v: Tensor, layout: PackedLayout, exchange: Exchange) -> tuple[Tensor, Tensor]:
    keys = exchange.join_tokens(k, layout, purpose="K")
    return keys, exchange.join_tokens(v, layout, purpose="V")


def run_rows(layout: PackedLayout, runs: Runs) -> Tensor:
    """int64: places of the runs' tokens in the joined row."""
    offsets = layout.offsets.tolist()
    nothing = torch.empty(0, dtype=torch.int64)
    return torch.cat([nothing, *(torch.arange(n) + offsets[sample] + first for sample, first, n in runs)])


def block_runs(runs: Runs, block: int) -> Tensor:
    """int64 [n, 3]: the runs, cut at every multiple of ``block``."""
    pieces = [
        (sample, start, min(start // block * block + block, first + count) - start)
        for sample, first, count in runs
        for start in [first, *range((first // block + 1) * block, first + count, block)]
    ]
    return torch.tensor(pieces, dtype=torch.int64).view(-1, 3)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, provider: AttentionProvider, exchange: Exchange
    ) -> Tensor:
        keys, values = _keys_and_values(k, v, layout, exchange)
        out, lse = provider.forward_runs(q, keys, values, layout, exchange.runs(layout))
        ctx.save_for_backward(q, keys, values, out, lse)
        ctx.layout, ctx.provider, ctx.exchange = layout, provider, exchange
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, out, lse = ctx.saved_tensors
        provider, layout, exchange, dout = ctx.provider, ctx.layout, ctx.exchange, dout.contiguous()
        delta = provider.delta(dout, out)
        dout, q, lse, delta = (
            exchange.join_tokens(x, layout, purpose="attention gradient") for x in (dout, q, lse, delta)
        )
        gradients = provider.backward_runs(dout, q, keys, values, lse, delta, layout, exchange.runs(layout))
        return *gradients, None, None, None
