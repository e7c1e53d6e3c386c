"""Token embedding: the row of the owner, a copy.

Backward. The bf16 gradient of the looked-up rows is kept for the whole step (``Weight.lookups``); ``finish`` then adds
each row's contributions in (sample, position) order, in fp32 from +0. A tied head adds its own gradient to that sum
once: ``G = fl(G_head + G_lookup)``.

Invariant to: packing and micro-batches, since the order is the samples' order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight


class EmbeddingProvider:
    def lookup_gradient(self, ids: Tensor, rows: Tensor, grad: Tensor) -> None:
        """grad fp32 [V, H] += rows bf16 [T, H] at ids int64 [T], one chain per table row in token order."""
        raise AssertionError("a provider defines lookup_gradient")

    def __call__(
        self, ids: Tensor, weight: Weight, layout: PackedLayout | None = None, exchange: Exchange = ALONE
    ) -> Tensor:
        """bf16 [T, H] of ids int64 [T]."""
        if not torch.is_grad_enabled():
            return exchange.lookup(ids, weight, weight.value.__getitem__)
        anchor = torch.empty(0, requires_grad=True)
        return _Embedding.apply(ids, anchor, weight, layout, exchange)

    def finish(self, weight: Weight) -> None:
        """Adds the kept rows of the whole step into ``weight.grad`` and forgets them."""
        assert weight.grad is not None
        if weight.lookups:
            ids = torch.cat([ids for ids, _ in weight.lookups])
            rows = torch.cat([rows for _, rows in weight.lookups])
            looked_up = torch.zeros_like(weight.grad)
            self.lookup_gradient(ids, rows, looked_up)
            weight.grad.add_(looked_up)
            weight.lookups.clear()


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, anchor: Tensor, weight: Weight, layout: PackedLayout | None, exchange: Exchange
    ) -> Tensor:
        ctx.ids, ctx.weight, ctx.layout, ctx.exchange = ids, weight, layout, exchange
        return exchange.lookup(ids, weight, weight.value.__getitem__)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        ctx.exchange.keep_lookups(ctx.ids, dy, ctx.weight, ctx.layout)
        return None, None, None, None, None
