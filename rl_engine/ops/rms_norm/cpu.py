"""RMSNorm in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.library import load
from rl_engine.ops.rms_norm import NormProvider
from rl_engine.ops.weight import Weight


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    """(tokens, heads, width, token stride) of x [T, H] or [T, heads, D]."""
    heads = x.shape[1] if x.dim() == 3 else 1
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x.shape[0], heads, x.shape[-1], x.stride(0)


class CpuNorm(NormProvider):
    def forward(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        tokens, heads, width, stride = _shape(x)
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        gain = weight.value.data_ptr()
        load().rlk_rms_norm(tokens, heads, width, x.data_ptr(), stride, gain, eps, out.data_ptr())
        return out

    def backward(
        self, dy: Tensor, x: Tensor, weight: Weight, eps: float, want_terms: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens, heads, width, stride = _shape(x)
        dx = torch.empty(x.shape, dtype=torch.bfloat16)
        terms = torch.empty(x.shape, dtype=torch.float32) if want_terms else None
        load().rlk_rms_norm_backward(
            *(tokens, heads, width, x.data_ptr(), stride, weight.value.data_ptr(), eps, dy.data_ptr(), dy.stride(0)),
            *(dx.data_ptr(), None if terms is None else terms.data_ptr()),
        )
        return dx, terms

    def unit_sums(self, terms: Tensor, layout: PackedLayout) -> Tensor:
        terms, units = terms.contiguous(), layout.unit_offsets
        _, heads, width = terms.shape
        sums = torch.empty(units.numel() - 1, heads, width)
        load().rlk_unit_sums(heads, width, units.numel() - 1, units.data_ptr(), terms.data_ptr(), sums.data_ptr())
        return sums
