"""QK norm and rotation as one operator of a CPU, for tests of what stands around the GPU's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.ops import Operators, uniform
from rl_engine.ops.functions import sqrt, tree_sum
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rms_norm.cpu import CpuNorm
from rl_engine.ops.rope import FusedRope, RopeTable
from rl_engine.ops.rope.cpu import CpuRope
from rl_engine.ops.weight import Weight


class FusedCpuRope(CpuRope, FusedRope):
    """The CPU's two kernels behind one call: rounded where the separate operators store."""

    def fuses(self, norm: Any, width: int) -> bool:
        return type(norm) is CpuNorm and width % 2 == 0

    def normed(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        return CpuNorm().forward(x, weight, eps)

    def norm_rotate(
        self, q: Tensor, k: Tensor, q_norm: Weight, k_norm: Weight, eps: float, positions: Tensor, table: RopeTable
    ) -> tuple[Tensor, Tensor]:
        normed = self.normed(q, q_norm, eps), self.normed(k, k_norm, eps)
        return self.rotate(normed[0], positions, table, 1.0), self.rotate(normed[1], positions, table, 1.0)

    def norm_rotate_backward(
        self,
        dq: Tensor,
        dk: Tensor,
        q: Tensor,
        k: Tensor,
        q_norm: Weight,
        k_norm: Weight,
        eps: float,
        positions: Tensor,
        table: RopeTable,
        layout: PackedLayout | None,
    ) -> tuple[Tensor, Tensor]:
        turned = self.rotate(dq, positions, table, -1.0), self.rotate(dk, positions, table, -1.0)
        dx = CpuNorm().gradients(turned[0], q, q_norm, eps, layout)
        return dx, CpuNorm().gradients(turned[1], k, k_norm, eps, layout)


class UnroundedRope(FusedCpuRope):
    """A control: the norm's result enters the rotation in fp32, as kernels that only save traffic have it."""

    def normed(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        wide = x.float()
        r = 1.0 / sqrt(tree_sum(wide * wide) / x.shape[-1] + eps)
        return wide * r[..., None] * weight.value.float()

    def rotate(self, x: Tensor, positions: Tensor, table: RopeTable, sign: float) -> Tensor:
        if x.dtype == torch.bfloat16:
            return super().rotate(x, positions, table, sign)
        c, s = table.cosine[positions].unsqueeze(1), table.sine[positions].unsqueeze(1)
        first, second = x.chunk(2, -1)
        return torch.cat([first * c - second * s, second * c + first * s], -1).bfloat16()


def fused_operators(rope: type[FusedCpuRope] = FusedCpuRope) -> Operators:
    """The CPU's operators, with a rotation that takes QK norm along."""
    ops = Operators(uniform("cpu"))
    ops._providers["rope"] = rope()
    return ops
