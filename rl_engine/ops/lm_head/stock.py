"""LM head as the stock engines have it: bf16 logits, widened to fp32."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from rl_engine.ops.linear.stock import stock_linear
from rl_engine.ops.weight import Weight


class StockHead:
    def logits(self, hidden: Tensor, weight: Weight, columns: tuple[int, int] | None = None) -> Tensor:
        if columns is None:
            return stock_linear(hidden, weight).float()
        first, last = columns
        return functional.linear(hidden, weight.value[first:last]).float()
