"""LM head on an NVIDIA GPU by the proven table: cuBLASLt with named algorithms where they are faster, else a Triton
tile.

The vocabulary is cut into groups and chunks of several widths: a choice proven at the nearest width is taken.
"""

from __future__ import annotations

from torch import Tensor

from rl_engine.ops import gemm_table
from rl_engine.ops.linear.cublaslt import add_units
from rl_engine.ops.lm_head.triton import TritonHead


class LtHead(TritonHead):
    def product(self, kind: str, a: Tensor, b: Tensor, out: Tensor) -> None:
        gemm_table.by_table(kind, a, b, out, out if kind == "dh" else None, near=True)

    def add_unit_gradients(
        self, dz: Tensor, hidden: Tensor, bounds: list[tuple[int, int]], columns: tuple[int, int], grad: Tensor
    ) -> None:
        add_units(dz, hidden, tuple(bounds), grad[columns[0] : columns[1]], near=True)

    def set_unit_gradients(
        self, dz: Tensor, hidden: Tensor, bounds: list[tuple[int, int]], columns: tuple[int, int], grad: Tensor
    ) -> None:
        add_units(dz, hidden, tuple(bounds), grad[columns[0] : columns[1]], near=True, empty=True)
