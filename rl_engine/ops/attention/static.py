"""Paged decode described in memory that keeps its place: what a captured pass reads.

The same kernels as any other batch takes, so the same bits. Nothing is read from the batch on the host: positions,
slots and tables may change between replays of a graph.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rl_engine.ops.attention.paged import PagedBatch, tiles_of


@dataclasses.dataclass(frozen=True)
class DecodeBatch(PagedBatch):
    """One new token of every sample.

    Attributes:
        items: int32 [S, 4]: row of q, its position, 1 (0 in a padded row), row of ``table``.
        splits: KV splits that no sample may exceed in any replay.
        keys: of all samples when the pass was cut; only speed depends on it.
        padded: rows may be without a sample, in this pass or in a replay: their output is +0.
    """

    items: Tensor
    splits: int
    keys: int
    padded: bool = False

    @staticmethod
    def of_lengths(table: Tensor, lengths: Tensor, slots: Tensor, splits: int, keys: int) -> DecodeBatch:
        """The batch of samples of ``lengths`` int [S] tokens, the new one included; 0 is a row without a sample, whose
        slot is negative. Everything is computed where ``lengths`` lies."""
        rows = torch.arange(lengths.numel() + 1, device=lengths.device)
        positions = (lengths.long() - 1).clamp(min=0)
        items = torch.stack([rows[:-1], positions, (lengths > 0).long(), rows[:-1]], 1).int()
        return DecodeBatch(table, rows, positions, positions, slots, items, splits, keys, padded=True)

    def counts(self) -> list[int]:
        found: list[int] = self.items[:, 2].tolist() if self.padded else [1] * self.items.shape[0]
        return found

    def tiles(self, queries: int) -> Tensor:
        return tiles_of(self.counts(), queries) if self.padded else super().tiles(queries)
