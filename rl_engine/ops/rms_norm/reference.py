"""RMSNorm in plain torch, in the stated order."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.numerics.contract import Contract
from rl_engine.ops.functions import f32, sqrt, tree_sum
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rms_norm import NormProvider
from rl_engine.ops.weight import Weight

GAIN_BLOCK = Contract().gain_block


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """fp32 [..., 1] of fp32 x."""
    mean = tree_sum(x * x) / f32(x.shape[-1])
    return (f32(1.0) / sqrt(mean + f32(eps))).unsqueeze(-1)


class ReferenceNorm(NormProvider):
    def forward(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        wide = x.float()
        return (wide * inverse_rms(wide, eps) * weight.value.float()).bfloat16()

    def backward(
        self, dy: Tensor, x: Tensor, weight: Weight, eps: float, want_terms: bool
    ) -> tuple[Tensor, Tensor | None]:
        wide, dy = x.float(), dy.float()
        r = inverse_rms(wide, eps)
        normed, scaled = wide * r, dy * weight.value.float()
        s = (tree_sum(scaled * normed) / f32(x.shape[-1])).unsqueeze(-1)
        return ((scaled - normed * s) * r).bfloat16(), dy * normed if want_terms else None

    def unit_sums(self, terms: Tensor, layout: PackedLayout) -> Tensor:
        sums = torch.zeros(len(layout.unit_bounds), *terms.shape[1:])
        for unit, (first, last) in enumerate(layout.unit_bounds):
            for start in range(first, last, GAIN_BLOCK):
                block = torch.zeros(GAIN_BLOCK, *terms.shape[1:])
                rows = terms[start : min(start + GAIN_BLOCK, last)]
                block[: rows.shape[0]] = rows
                sums[unit] = sums[unit] + tree_sum(block.movedim(0, -1))
        return sums
