"""dW on an NVIDIA GPU for any number of its rows: what a context-parallel rank has of a weight.

Rows of dW are rows of tiles, and a Triton tile masks those it does not have: one that was proven at this depth has the
same bits at every number of rows. An algorithm of cuBLASLt runs only the shape that it was proven on.
"""

from __future__ import annotations

import math

from torch import Tensor

from rl_engine.ops import gemm_table, triton_gemm
from rl_engine.ops.gemm_table import NotQualified, Table
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.linear.cublaslt import add_units
from rl_engine.ops.linear.triton import fold_tile
from rl_engine.ops.triton_gemm import Tile


def add_rows(dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
    """grad fp32 [rows, K] += one chain per fold unit of dy bf16 [T, rows] and x bf16 [T, K].

    Raises:
        NotQualified: no fresh proof, or no fold of this depth in it.
    """
    table, bounds = gemm_table.current(), tuple(layout.unit_bounds)
    if gemm_table.key("fold", *grad.shape) in table.entries:
        add_units(dy, x, bounds, grad)
        return
    tile = proven_tile(table, grad.shape[0], grad.shape[1])
    lies_well = tile is not None and gemm_table.aligned(dy, x, grad)
    triton_gemm.fold(dy, x, grad, bounds, tile if tile is not None and lies_well else fold_tile(dy, x))


def proven_tile(table: Table, rows: int, depth: int) -> Tile | None:
    """The tile of the proven fold of this depth whose number of rows is nearest; None where cuBLASLt won them all.

    Raises:
        NotQualified: no fold of this depth was proven.
    """
    best, distance, found = None, math.inf, False
    for name, choices in table.entries.items():
        kind, shape = name.split(" ")
        n, k = (int(word) for word in shape.split("x"))
        if kind != "fold" or k != depth:
            continue
        found = True
        gap = abs(math.log(n / max(rows, 1)))
        for _, choice in choices:
            if choice.tile is not None and gap < distance:
                best, distance = choice.tile, gap
    if not found:
        raise NotQualified(f"no fold of depth {depth} was proven on this GPU: run rlk-repro qualify with this model")
    return best
