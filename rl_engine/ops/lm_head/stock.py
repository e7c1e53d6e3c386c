"""LM head as the stock engines have it: bf16 logits, widened to fp32."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from rl_engine.ops.weight import Weight


class StockHead:
    def logits(self, hidden: Tensor, weight: Weight, columns: tuple[int, int] | None = None) -> Tensor:
        first, last = columns or (0, weight.shape[0])
        return functional.linear(hidden, weight.value[first:last]).float()
