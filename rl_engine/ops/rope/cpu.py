"""Rotary embedding in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.library import load
from rl_engine.ops.rope import RopeProvider, RopeTable


class CpuRope(RopeProvider):
    def rotate(self, x: Tensor, positions: Tensor, table: RopeTable, sign: float) -> Tensor:
        tokens, heads, width = x.shape
        positions = positions.contiguous()
        assert x.stride(2) == 1 and x.stride(1) == width
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        load().rlk_rope(
            *(tokens, heads, width // 2, x.data_ptr(), x.stride(0), positions.data_ptr()),
            *(table.cosine.data_ptr(), table.sine.data_ptr(), sign, out.data_ptr()),
        )
        return out
