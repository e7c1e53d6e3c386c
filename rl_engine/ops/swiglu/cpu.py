"""SwiGLU in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.library import load
from rl_engine.ops.swiglu import SwigluProvider


class CpuSwiglu(SwigluProvider):
    def forward(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        width = x.shape[1] // 2
        out = torch.empty(x.shape[0], width, dtype=torch.bfloat16)
        load().rlk_swiglu(x.shape[0], width, x.data_ptr(), out.data_ptr())
        return out

    def backward(self, da: Tensor, x: Tensor) -> Tensor:
        assert x.is_contiguous() and da.is_contiguous()
        dx = torch.empty(x.shape, dtype=torch.bfloat16)
        load().rlk_swiglu_backward(x.shape[0], x.shape[1] // 2, x.data_ptr(), da.data_ptr(), dx.data_ptr())
        return dx
