"""Embedding's gradient in C."""

from __future__ import annotations

from torch import Tensor

from rl_engine.ops.embedding import EmbeddingProvider
from rl_engine.ops.library import load


class CpuEmbedding(EmbeddingProvider):
    def lookup_gradient(self, ids: Tensor, rows: Tensor, grad: Tensor) -> None:
        ids, rows = ids.contiguous(), rows.contiguous()
        load().rlk_lookup_gradient(ids.numel(), rows.shape[1], ids.data_ptr(), rows.data_ptr(), grad.data_ptr())
