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
Invariant to: batch mates, packing, chunking, page size, what unused pages hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.ops.attention.paged import PagedBatch, PagedCache
from rl_engine.ops.layout import PackedLayout


class AttentionProvider:
    """Kernels over pages (forward) and packed samples (backward)."""

    def forward_packed(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """(out bf16 [T, heads, D], LSE fp32 [T, heads])."""
        raise AssertionError("a provider defines forward_packed")

    def backward_packed(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: PackedLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) bf16, contiguous."""
        raise AssertionError("a provider defines backward_packed")

    def cached(self, q: Tensor, k: Tensor, v: Tensor, cache: PagedCache, layer: int, batch: PagedBatch) -> Tensor:
        """Stores k, v into the cache, then attends every query of the batch to all of its sample so far."""
        raise AssertionError("a provider defines cached")

    def new_cache(self, layers: int, kv_heads: int, width: int, pages: int, page: int) -> PagedCache:
        return PagedCache(layers, kv_heads, width, pages, page)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        """Training and scoring: every sample attends to itself."""
        if not torch.is_grad_enabled():
            return self.forward_packed(q, k, v, layout)[0]
        return _Attention.apply(q, k, v, layout, self)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, provider: AttentionProvider) -> Tensor:
        out, lse = provider.forward_packed(q, k, v, layout)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.provider = layout, provider
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = ctx.provider.backward_packed(dout.contiguous(), q, k, v, out, lse, ctx.layout)
        return dq, dk, dv, None, None
