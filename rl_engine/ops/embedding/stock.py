"""Embedding as torch has it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight


class StockEmbedding:
    def __call__(
        self, ids: Tensor, weight: Weight, layout: PackedLayout | None = None, exchange: Exchange = ALONE
    ) -> Tensor:
        return exchange.lookup(ids, weight, lambda own: functional.embedding(own, weight.value))

    def finish(self, weight: Weight) -> None:
        """Nothing is kept: autograd has already added the rows."""
