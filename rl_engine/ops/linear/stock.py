"""Linear as torch has it: ``F.linear`` in bf16, autograd's backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight

ROWS = 8  # rows that the library is told to expect when it chooses a layout


def prepack(weight: Weight, *, drop_value: bool = False) -> None:
    """A copy of the weight in the layout that oneDNN multiplies by; without it every call of ``F.linear`` makes one.

    The kernel and its bits stay oneDNN's. Does nothing where torch has no oneDNN for bf16, and on a GPU. With
    ``drop_value`` the copy replaces the weight.
    """
    here = weight.value.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if here and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        weight.packed = torch.ops.mkldnn._reorder_linear_weight(weight.value.detach(), ROWS)
        weight.stale = False
        if drop_value:
            weight.value = weight.value.new_empty(0)


def stock_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """bf16 [T, out] of x bf16 [T, in], through the prepacked copy where there is one."""
    if weight.packed is None or torch.is_grad_enabled():
        return functional.linear(x, weight.value, bias)
    if weight.stale:
        prepack(weight)
    return torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")


class StockLinear:
    def pack(self, weight: Weight, *, drop_value: bool = False) -> None:
        prepack(weight, drop_value=drop_value)

    def __call__(
        self,
        x: Tensor,
        weight: Weight,
        residual: Tensor | None = None,
        layout: PackedLayout | None = None,
        exchange: Exchange = ALONE,
        bias: Weight | None = None,
    ) -> Tensor:
        if residual is None:
            return stock_linear(exchange.spread(x), weight, None if bias is None else bias.value)
        branch = stock_linear(exchange.spread(exchange.join_inputs(x, weight, purpose="inputs")), weight)
        return residual + exchange.join_outputs(branch, weight)
