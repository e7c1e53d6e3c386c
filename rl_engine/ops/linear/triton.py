"""Linear on a GPU: Triton's chain at every row count, forward, dX and dW (``ops/triton_gemm.py`` says why it holds)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops import triton_gemm
from rl_engine.ops.gemm_table import aligned
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.linear import LinearProvider
from rl_engine.ops.triton_gemm import FOLD_POINTERS, FOLD_TILE, Tile, default_tile
from rl_engine.ops.weight import Weight


class TritonLinear(LinearProvider):
    def forward(self, x: Tensor, weight: Weight, residual: Tensor | None) -> Tensor:
        kind = "forward" if residual is None else "residual"
        return self.product(kind, x, weight.value, residual)

    def input_gradient(self, dy: Tensor, weight: Weight) -> Tensor:
        return self.product("dx", dy, weight.value.T, None)

    def product(self, kind: str, a: Tensor, b: Tensor, residual: Tensor | None) -> Tensor:
        """bf16 [M, N] of a bf16 [M, K] and b bf16 [N, K]."""
        out = torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16, device=a.device)
        triton_gemm.product(a, b, out, tile_for(a, b, residual), residual)
        return out

    def add_weight_gradient(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        triton_gemm.fold(dy, x, grad, tuple(layout.unit_bounds), fold_tile(dy, x))


def tile_for(a: Tensor, b: Tensor, residual: Tensor | None = None) -> Tile:
    """The tile without a table."""
    tma = torch.version.hip is None and aligned(a, b, residual)
    return default_tile(a.shape[0], b.shape[0], tma=tma)


def fold_tile(dy: Tensor, x: Tensor) -> Tile:
    return FOLD_TILE if torch.version.hip is None and aligned(dy, x) else FOLD_POINTERS
