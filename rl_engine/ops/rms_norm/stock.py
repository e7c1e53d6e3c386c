"""RMSNorm as the stock models have it: fp32 statistics, the normalised row rounded to bf16, then the bf16 gain."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight


class StockNorm:
    def __call__(
        self, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None = None, exchange: Exchange = ALONE
    ) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        gain = exchange.spread(weight.value) if x.dim() == 3 else weight.value  # a rank has some of the heads
        return gain * normed.to(x.dtype)
