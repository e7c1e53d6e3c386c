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

from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight


class NormProvider:
    """x is bf16 [T, H], or [T, heads, D] with contiguous heads and any token stride."""

    def forward(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        raise AssertionError("a provider defines forward")

    def backward(
        self, dy: Tensor, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None, grad: Tensor | None
    ) -> Tensor:
        """dx bf16; adds the gain's gradient into ``grad`` fp32 [width] where it is given."""
        raise AssertionError("a provider defines backward")

    def __call__(self, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.forward(x, weight, eps)
        return _Norm.apply(x, weight, eps, layout, self)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None, provider: NormProvider
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.eps, ctx.layout, ctx.provider = weight, eps, layout, provider
        return provider.forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = ctx.provider.backward(dy.contiguous(), x, ctx.weight, ctx.eps, ctx.layout, ctx.weight.grad)
        return dx, None, None, None, None
