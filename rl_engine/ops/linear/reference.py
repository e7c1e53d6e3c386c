"""Linear in plain torch, in the stated order; ``gemm`` is the order of one product."""

from __future__ import annotations

from torch import Tensor

from rl_engine.ops.functions import chain256_gemm, chain_gemm
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.linear import LinearProvider
from rl_engine.ops.weight import Weight


class ReferenceLinear(LinearProvider):
    gemm = staticmethod(chain_gemm)

    def forward(self, x: Tensor, weight: Weight, residual: Tensor | None) -> Tensor:
        branch = self.gemm(x, weight.value.T)
        return (branch if residual is None else residual.float() + branch).bfloat16()

    def input_gradient(self, dy: Tensor, weight: Weight) -> Tensor:
        return self.gemm(dy, weight.value).bfloat16()

    def add_weight_gradient(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        for first, last in layout.unit_bounds:
            grad.add_(self.gemm(dy[first:last].T, x[first:last]))


class FallbackLinear(ReferenceLinear):
    """The provider of a machine without a C compiler (contract id ``rlk.v1/cpu-chain256``)."""

    gemm = staticmethod(chain256_gemm)
