"""Linear on the C chain."""

from __future__ import annotations

from torch import Tensor

from rl_engine.ops import cpu_gemm
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.linear import LinearProvider
from rl_engine.ops.weight import Weight


class CpuLinear(LinearProvider):
    def forward(self, x: Tensor, weight: Weight, residual: Tensor | None) -> Tensor:
        return cpu_gemm.times_weight(x, weight, residual)

    def pack(self, weight: Weight, *, drop_value: bool = False) -> None:
        cpu_gemm.pack(weight, drop_value=drop_value)

    def input_gradient(self, dy: Tensor, weight: Weight) -> Tensor:
        return cpu_gemm.times_rows(dy, weight.value)

    def add_weight_gradient(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        for first, last in layout.unit_bounds:
            cpu_gemm.add_outer(dy[first:last], x[first:last], grad)
