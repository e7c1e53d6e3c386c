"""LM head on the C chain."""

from __future__ import annotations

from torch import Tensor

from rl_engine.ops import cpu_gemm
from rl_engine.ops.lm_head import HeadProvider
from rl_engine.ops.weight import Weight


class CpuHead(HeadProvider):
    def logits(
        self, hidden: Tensor, weight: Weight, columns: tuple[int, int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        return cpu_gemm.times_weight(hidden, weight, out_f32=True, columns=columns, out=out)

    def add_input_gradient(self, dz: Tensor, weight: Weight, columns: tuple[int, int], dh: Tensor) -> None:
        cpu_gemm.times_rows(dz, weight.value[columns[0] : columns[1]], out=dh)

    def add_weight_gradient(self, dz: Tensor, hidden: Tensor, columns: tuple[int, int], grad: Tensor) -> None:
        cpu_gemm.add_outer(dz, hidden, grad[columns[0] : columns[1]])
