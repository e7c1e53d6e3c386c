"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.rope import RopeProvider, RopeTable


class ReferenceRope(RopeProvider):
    def rotate(self, x: Tensor, positions: Tensor, table: RopeTable, sign: float) -> Tensor:
        c, s = table.cosine[positions].unsqueeze(1), table.sine[positions].unsqueeze(1) * sign
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * c - second * s, second * c + first * s], -1).bfloat16()
