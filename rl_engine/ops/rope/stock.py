"""Rotary embedding as the stock models have it: bf16 cosine and sine, rotate-half in bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.rope import RopeTable


class StockRope:
    """Rounds the table to bf16 once, and looks positions up once for all layers of a pass."""

    def __init__(self) -> None:
        self._table: RopeTable | None = None
        self._positions: Tensor | None = None

    def _rows(self, positions: Tensor, table: RopeTable, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cosine, signed sine) [T, 1, D] of the positions; the same tensor object asks for the same rows."""
        if table is not self._table or self._positions is None or self._whole[0].dtype != dtype:
            cosine, sine = table.cosine.to(dtype), table.sine.to(dtype)
            self._whole = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
            self._table, self._positions = table, None
        if positions is not self._positions:
            self._found = tuple(rows[positions].unsqueeze(1) for rows in self._whole)
            self._positions = positions
        return self._found

    def __call__(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        cosine, sine = self._rows(positions, table, x.dtype)
        first, second = x.chunk(2, -1)
        # (-second) sine and second (-sine) are the same product.
        return x * cosine + torch.cat([second, first], -1) * sine
