"""RMSNorm over hidden rows, and over each head (QK norm).

Contract. ``r = 1 / sqrt(fl(fl(tree(fl(x x)) / H) + eps))``, ``y = bf16(fl(fl(x r) w))``, x and w bf16, arithmetic fp32.
The tree pads with +0 to a power of two and adds neighbours; an axis over 1,024 is folded in chunks of it first.

Backward. r by the forward's code; ``x_hat = fl(x r)``, ``g = fl(dy w)``, ``s = fl(tree(fl(g x_hat)) / H)``,
``dx = bf16(fl(fl(g - fl(x_hat s)) r))``. Gain: terms ``fl(dy x_hat)``; per fold unit, blocks of 64 tokens by the pair
tree, blocks ascending from +0, heads folded ascending; units added into the fp32 gradient ascending.

Invariant to: everything outside the row; for the gain, to packing and micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight


class NormProvider:
    """x is bf16 [T, H], or [T, heads, D] with contiguous heads and any token stride."""

    def forward(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        raise AssertionError("a provider defines forward")

    def backward(
        self, dy: Tensor, x: Tensor, weight: Weight, eps: float, want_terms: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(dx bf16, the gain's terms fl(dy x_hat) fp32 of x's shape or None)."""
        raise AssertionError("a provider defines backward")

    def unit_sums(self, terms: Tensor, layout: PackedLayout) -> Tensor:
        """fp32 [units, heads, width] of terms fp32 [T, heads, width]: blocks of 64 tokens by the pair tree,
        ascending."""
        raise AssertionError("a provider defines unit_sums")

    def add_gain(self, sums: Tensor, grad: Tensor) -> None:
        """grad fp32 [width] += sums [units, heads, width]: heads folded ascending from +0, units ascending."""
        add_gain(sums, grad)

    def gradients(
        self, dy: Tensor, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None, exchange: Exchange = ALONE
    ) -> Tensor:
        """dx; the gain's gradient over all ranks' tokens is added into ``weight.grad`` where the weight trains."""
        dx, terms = self.backward(dy, x, weight, eps, weight.grad is not None)
        if terms is not None:
            assert layout is not None and weight.grad is not None
            sums = exchange.gain_sums(self, as_heads(terms), layout, heads=x.dim() == 3)
            self.add_gain(sums, weight.grad)
        return dx

    def __call__(
        self, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None = None, exchange: Exchange = ALONE
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return self.forward(x, weight, eps)
        return _Norm.apply(x, weight, eps, layout, self, exchange)


def as_heads(terms: Tensor) -> Tensor:
    """[T, width] as [T, 1, width]; [T, heads, width] as it is."""
    return terms if terms.dim() == 3 else terms.unsqueeze(1)


def add_gain(sums: Tensor, grad: Tensor) -> None:
    """grad fp32 [width] += sums [units, heads, width]: heads folded ascending from +0, units ascending."""
    for unit in sums:
        total = torch.zeros_like(grad)
        for head in unit:
            total = total + head
        grad.add_(total)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Weight,
        eps: float,
        layout: PackedLayout | None,
        provider: NormProvider,
        exchange: Exchange,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.provider, ctx.arguments = provider, (weight, eps, layout, exchange)
        return provider.forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return ctx.provider.gradients(dy.contiguous(), x, *ctx.arguments), None, None, None, None, None
