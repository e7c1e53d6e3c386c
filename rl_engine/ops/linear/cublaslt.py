"""Linear on an NVIDIA GPU by the proven table: cuBLASLt with a named algorithm, or a Triton tile.

Large rows take cuBLASLt, most small ones Triton; both are the chain. A shape that was not proven raises; operands that
the copy engine cannot read (an odd offset or stride) take a pointer tile, which has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops import cublaslt, gemm_table, triton_gemm
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.linear.triton import TritonLinear, fold_tile


class LtLinear(TritonLinear):
    def product(self, kind: str, a: Tensor, b: Tensor, residual: Tensor | None) -> Tensor:
        out = torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16, device=a.device)
        gemm_table.by_table(kind, a, b, out, residual)
        return out

    def add_weight_gradient(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        add_units(dy, x, tuple(layout.unit_bounds), grad)


def add_units(dy: Tensor, x: Tensor, bounds: triton_gemm.Bounds, grad: Tensor, *, near: bool = False) -> None:
    """grad fp32 [N, K] += one chain per unit; the table's rows are the mean tokens of a unit."""
    bounds = tuple((first, last) for first, last in bounds if last > first)
    if not bounds:
        return
    mean = sum(last - first for first, last in bounds) // len(bounds)
    choice = gemm_table.current().choose("fold", grad.shape[0], grad.shape[1], mean, near=near)
    if not gemm_table.aligned(dy, x, grad):
        triton_gemm.fold(dy, x, grad, bounds, fold_tile(dy, x))
    elif choice.tile is not None:
        triton_gemm.fold(dy, x, grad, bounds, choice.tile)
    else:
        algorithm = bytes.fromhex(choice.algorithm or "")
        for first, last in bounds:
            cublaslt.product(dy[first:last].T, x[first:last].T, grad, algorithm, add=True, proven=choice.others)
