"""LM head on a GPU by Triton's chain: fp32 logits, and the two gradients of a vocabulary group."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops import triton_gemm
from rl_engine.ops.linear.triton import fold_tile, tile_for
from rl_engine.ops.lm_head import HeadProvider
from rl_engine.ops.weight import Weight


class TritonHead(HeadProvider):
    def logits(
        self, hidden: Tensor, weight: Weight, columns: tuple[int, int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        first, last = columns or (0, weight.shape[0])
        if out is None:
            out = torch.empty((hidden.shape[0], last - first), dtype=torch.float32, device=hidden.device)
        self.product("logits", hidden, weight.value[first:last], out)
        return out

    def add_input_gradient(self, dz: Tensor, weight: Weight, columns: tuple[int, int], dh: Tensor) -> None:
        self.product("dh", dz, weight.value[columns[0] : columns[1]].T, dh)

    def product(self, kind: str, a: Tensor, b: Tensor, out: Tensor) -> None:
        """``out`` = chain; kind "dh" adds: one unit that is the whole depth, folded into ``out``."""
        triton_gemm.product(a, b, out, tile_for(a, b), out if kind == "dh" else None)

    def add_weight_gradient(self, dz: Tensor, hidden: Tensor, columns: tuple[int, int], grad: Tensor) -> None:
        self.add_unit_gradients(dz, hidden, [(0, dz.shape[0])], columns, grad)

    def add_unit_gradients(
        self, dz: Tensor, hidden: Tensor, bounds: list[tuple[int, int]], columns: tuple[int, int], grad: Tensor
    ) -> None:
        triton_gemm.fold(dz, hidden, grad[columns[0] : columns[1]], tuple(bounds), fold_tile(dz, hidden))
