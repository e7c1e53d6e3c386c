"""Rotary embedding as the stock models have it: bf16 cosine and sine, rotate-half in bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.rope import RopeTable


class StockRope:
    def __call__(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        c, s = table.cosine[positions], table.sine[positions]
        cosine = torch.cat([c, c], -1).to(x.dtype).unsqueeze(1)
        sine = torch.cat([s, s], -1).to(x.dtype).unsqueeze(1)
        first, second = x.chunk(2, -1)
        return x * cosine + torch.cat([-second, first], -1) * sine
