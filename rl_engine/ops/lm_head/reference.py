"""LM head in plain torch."""

from __future__ import annotations

from torch import Tensor

from rl_engine.ops.functions import chain256_gemm, chain_gemm
from rl_engine.ops.lm_head import HeadProvider
from rl_engine.ops.weight import Weight


class ReferenceHead(HeadProvider):
    gemm = staticmethod(chain_gemm)

    def logits(
        self, hidden: Tensor, weight: Weight, columns: tuple[int, int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        first, last = columns or (0, weight.shape[0])
        z = self.gemm(hidden, weight.value[first:last].T)
        return z if out is None else out.copy_(z)

    def add_input_gradient(self, dz: Tensor, weight: Weight, columns: tuple[int, int], dh: Tensor) -> None:
        dh.add_(self.gemm(dz, weight.value[columns[0] : columns[1]]))

    def add_weight_gradient(self, dz: Tensor, hidden: Tensor, columns: tuple[int, int], grad: Tensor) -> None:
        grad[columns[0] : columns[1]].add_(self.gemm(dz.T, hidden))


class FallbackHead(ReferenceHead):
    """The provider of a machine without a C compiler (contract id ``rlk.v1/cpu-chain256``)."""

    gemm = staticmethod(chain256_gemm)
