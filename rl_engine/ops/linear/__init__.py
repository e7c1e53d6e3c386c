"""Linear layer: ``y[T, N] = x[T, K] W[N, K]^T``, with the residual addition as its epilogue.

Contract. bf16 operands; every output is one fp32 chain over K, ascending from +0, rounded once to bf16. With a residual
``y = bf16(fl(stream + branch))`` where branch is the unrounded fp32 chain. A bias b[N], bf16, takes the stream's place
in every row: ``y = bf16(fl(b + chain))``; an output has a residual, a bias or neither. Columns have the HF tensors'
order.

Backward. ``dX[T, K]``: one chain over the N columns, one rounding. ``dW[N, K]``: per fold unit one chain over the
unit's tokens from +0, added into the fp32 gradient, units ascending. The bias is the column of W whose input is 1, and
has its gradient: per fold unit one chain of dy over the unit's tokens. The residual's gradient is ``dy`` itself.

Tensor parallel, a rank has some of the output columns. Without a residual the input rows are whole and a rank's columns
come out (q, k, v; gate, up); with one, a rank's input columns go in and the whole new stream comes out (o, down). Each
rank computes its own input columns of dX in one chain over all output columns. Context parallel, a rank has other
tokens, and computes other rows of dW over all of them.

Invariant to: rows, packing, batch mates, tiles, threads, column slices. Errors: none; shapes are asserted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight


class LinearProvider:
    """Kernels of one provider; calling the provider runs forward and records backward."""

    def forward(self, x: Tensor, weight: Weight, residual: Tensor | None) -> Tensor:
        """bf16 [T, N] of x bf16 [T, K] and residual bf16 [T, N] or None; its rows may be one row (stride 0)."""
        raise AssertionError("a provider defines forward")

    def input_gradient(self, dy: Tensor, weight: Weight) -> Tensor:
        """bf16 [T, K] of dy bf16 [T, N]."""
        raise AssertionError("a provider defines input_gradient")

    def add_weight_gradient(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        """grad fp32 [N, K] += one chain per fold unit of dy bf16 [T, N] and x bf16 [T, K]."""
        raise AssertionError("a provider defines add_weight_gradient")

    def add_weight_rows(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        """``add_weight_gradient`` of any rows of dW, as a context-parallel rank has them."""
        self.add_weight_gradient(dy, x, layout, grad)

    def add_rows(self, moved: tuple[Tensor, Tensor, PackedLayout], grad: Tensor, exchange: Exchange) -> None:
        """What ``exchange.weight_rows`` gave, into ``grad``; a rank alone has every row."""
        (self.add_weight_gradient if exchange.alone else self.add_weight_rows)(*moved, grad)

    def pack(self, weight: Weight, *, drop_value: bool = False) -> None:
        """Packs ``weight`` in this provider's layout (``Capabilities.packing``); with ``drop_value`` that alone is
        left."""
        raise AssertionError("a provider that reads packed weights packs them")

    def exchanged(
        self, x: Tensor, weight: Weight, residual: Tensor | None, exchange: Exchange, bias: Weight | None
    ) -> tuple[Tensor, Tensor]:
        """(output, the whole input rows [T, K]) of forward between its exchanges."""
        assert residual is None or bias is None, weight.name
        if residual is None:
            row = None if bias is None else bias.value.as_strided((x.shape[0], weight.shape[0]), (0, 1))
            return self.forward(x, weight, row), x
        whole = exchange.join_inputs(x, weight, purpose="inputs")
        own = self.forward(whole, weight, exchange.own_outputs(residual, weight))
        return exchange.join_outputs(own, weight), whole

    def __call__(
        self,
        x: Tensor,
        weight: Weight,
        residual: Tensor | None = None,
        layout: PackedLayout | None = None,
        exchange: Exchange = ALONE,
        bias: Weight | None = None,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return self.exchanged(x, weight, residual, exchange, bias)[0]
        return _Linear.apply(x, residual, weight, layout, self, exchange, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Weight,
        layout: PackedLayout,
        provider: LinearProvider,
        exchange: Exchange,
        bias: Weight | None,
    ) -> Tensor:
        out, whole = provider.exchanged(x, weight, residual, exchange, bias)
        ctx.save_for_backward(whole)
        ctx.weight, ctx.layout, ctx.provider, ctx.exchange, ctx.bias = weight, layout, provider, exchange, bias
        ctx.has_residual = residual is not None
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, exchange, dy = ctx.weight, ctx.exchange, dy.contiguous()
        own = exchange.own_outputs(dy, weight).contiguous() if ctx.has_residual else dy
        if weight.grad is not None:
            rows, tokens, layout = exchange.weight_rows(own, x, ctx.layout)
            ctx.provider.add_rows((rows, tokens, layout), weight.grad, exchange)
            if ctx.bias is not None:
                ones = torch.ones(tokens.shape[0], 1, dtype=torch.bfloat16, device=x.device)
                ctx.provider.add_rows((rows, ones, layout), ctx.bias.grad.unsqueeze(1), exchange)
        columns = exchange.input_columns(weight)
        if ctx.has_residual:
            return ctx.provider.input_gradient(dy, columns), dy, *[None] * 5
        dx = ctx.provider.input_gradient(exchange.canonical_outputs(dy, weight), columns)
        return exchange.join_inputs(dx, weight, purpose="dX"), *[None] * 6
