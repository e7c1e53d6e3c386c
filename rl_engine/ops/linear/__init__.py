"""Linear layer: ``y[T, N] = x[T, K] W[N, K]^T``, with the residual addition as its epilogue.

Contract. bf16 operands; every output is one fp32 chain over K, ascending from +0, rounded once to bf16. With a residual
``y = bf16(fl(stream + branch))`` where branch is the unrounded fp32 chain. Columns have the HF tensors' order.

Backward. ``dX[T, K]``: one chain over the N columns, one rounding. ``dW[N, K]``: per fold unit one chain over the
unit's tokens from +0, added into the fp32 gradient, units ascending. The residual's gradient is ``dy`` itself.

Invariant to: rows, packing, batch mates, tiles, threads, column slices. Errors: none; shapes are asserted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight


class LinearProvider:
    """Kernels of one provider; calling the provider runs forward and records backward."""

    def forward(self, x: Tensor, weight: Weight, residual: Tensor | None) -> Tensor:
        """bf16 [T, N] of x bf16 [T, K] and residual bf16 [T, N] or None."""
        raise AssertionError("a provider defines forward")

    def input_gradient(self, dy: Tensor, weight: Weight) -> Tensor:
        """bf16 [T, K] of dy bf16 [T, N]."""
        raise AssertionError("a provider defines input_gradient")

    def add_weight_gradient(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        """grad fp32 [N, K] += one chain per fold unit of dy bf16 [T, N] and x bf16 [T, K]."""
        raise AssertionError("a provider defines add_weight_gradient")

    def add_weight_rows(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        """As :meth:`add_weight_gradient` of any rows of dW: grad fp32 [rows, K]."""
        self.add_weight_gradient(dy, x, layout, grad)

    def pack(self, weight: Weight, *, drop_value: bool = False) -> None:
        """Packs ``weight`` in this provider's layout (``Capabilities.packing``); with ``drop_value`` that alone is
        left."""
        raise AssertionError("a provider that reads packed weights packs them")

    def __call__(
        self, x: Tensor, weight: Weight, residual: Tensor | None = None, layout: PackedLayout | None = None
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return self.forward(x, weight, residual)
        return _Linear.apply(x, residual, weight, layout, self)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Weight, layout: PackedLayout, provider: LinearProvider
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.layout, ctx.provider, ctx.has_residual = weight, layout, provider, residual is not None
        return provider.forward(x, weight, residual)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        if ctx.weight.grad is not None:
            ctx.provider.add_weight_gradient(dy, x, ctx.layout, ctx.weight.grad)
        dx = ctx.provider.input_gradient(dy, ctx.weight)
        return dx, dy if ctx.has_residual else None, None, None, None
