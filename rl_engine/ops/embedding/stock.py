"""Embedding as torch has it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from rl_engine.ops.weight import Weight


class StockEmbedding:
    def __call__(self, ids: Tensor, weight: Weight) -> Tensor:
        return functional.embedding(ids, weight.value)

    def finish(self, weight: Weight) -> None:
        """Nothing is kept: autograd has already added the rows."""
