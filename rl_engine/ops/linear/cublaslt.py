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
        if residual is not None and residual.stride(0) == 0:  # one row for all: no matrix that the library adds
            return super().product(kind, a, b, residual)
        out = torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16, device=a.device)
        gemm_table.by_table(kind, a, b, out, residual)
        return out

    def add_weight_gradient(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        if grad.shape[1] == 1:  # the table has products of whole weights
            super().add_weight_gradient(dy, x, layout, grad)
            return
        add_units(dy, x, tuple(layout.unit_bounds), grad)

    def add_weight_rows(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        """A proven table names the rows of TP ranks alone."""
        from rl_engine.ops.linear.slices import add_rows

        if grad.shape[1] == 1:
            self.add_weight_gradient(dy, x, layout, grad)
            return
        add_rows(dy, x, layout, grad)


def add_units(
    dy: Tensor, x: Tensor, bounds: triton_gemm.Bounds, grad: Tensor, *, near: bool = False, empty: bool = False
) -> None:
    """grad fp32 [N, K] += one chain per unit; the table's rows are the mean tokens of a unit.

    With ``empty`` grad counts as +0, whatever it holds; the first chain may then be written without reading it.
    """
    bounds = tuple((first, last) for first, last in bounds if last > first)
    if not bounds:
        if empty:
            grad.zero_()
        return
    mean = sum(last - first for first, last in bounds) // len(bounds)
    choice = gemm_table.current().choose("fold", grad.shape[0], grad.shape[1], mean, near=near)
    lies_well = gemm_table.aligned(dy, x, grad)
    if lies_well and choice.tile is None:
        algorithm = bytes.fromhex(choice.algorithm or "")
        for index, (first, last) in enumerate(bounds):
            add = index > 0 or not empty
            cublaslt.product(dy[first:last].T, x[first:last].T, grad, algorithm, add=add, proven=choice.others)
        return
    if empty:
        grad.zero_()
    tile = choice.tile if lies_well and choice.tile is not None else fold_tile(dy, x)
    triton_gemm.fold(dy, x, grad, bounds, tile)
