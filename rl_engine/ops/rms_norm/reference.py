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


def gain_sum(terms: Tensor, layout: PackedLayout, grad: Tensor) -> None:
    """grad fp32 [width] += per unit: blocks of 64 tokens by the pair tree, blocks, heads, units ascending."""
    terms = terms.reshape(terms.shape[0], -1, terms.shape[-1])
    for first, last in layout.unit_bounds:
        total = torch.zeros_like(grad)
        for head in range(terms.shape[1]):
            head_sum = torch.zeros_like(grad)
            for start in range(first, last, GAIN_BLOCK):
                block = torch.zeros(GAIN_BLOCK, grad.shape[0])
                rows = terms[start : min(start + GAIN_BLOCK, last), head]
                block[: rows.shape[0]] = rows
                head_sum = head_sum + tree_sum(block.T)
            total = total + head_sum
        grad.add_(total)


class ReferenceNorm(NormProvider):
    def forward(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        wide = x.float()
        return (wide * inverse_rms(wide, eps) * weight.value.float()).bfloat16()

    def backward(
        self, dy: Tensor, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None, grad: Tensor | None
    ) -> Tensor:
        wide, dy = x.float(), dy.float()
        r = inverse_rms(wide, eps)
        normed, scaled = wide * r, dy * weight.value.float()
        s = (tree_sum(scaled * normed) / f32(x.shape[-1])).unsqueeze(-1)
        if grad is not None:
            assert layout is not None
            gain_sum(dy * normed, layout, grad)
        return ((scaled - normed * s) * r).bfloat16()
