"""Embedding in plain torch."""

from __future__ import annotations

from torch import Tensor

from rl_engine.ops.embedding import EmbeddingProvider


class ReferenceEmbedding(EmbeddingProvider):
    def lookup_gradient(self, ids: Tensor, rows: Tensor, grad: Tensor) -> None:
        for token, row in zip(ids.tolist(), rows.float(), strict=True):
            grad[token] += row
