"""dW of a context-parallel rank: which proven tile runs where the table does not name its number of rows."""

from __future__ import annotations

import pytest
import torch

from rl_engine.ops.layout import PackedLayout

pytest.importorskip("triton")

from rl_engine.ops import gemm_table, triton_gemm
from rl_engine.ops.gemm_table import Choice, NotQualified, Table
from rl_engine.ops.linear import slices
from rl_engine.ops.triton_gemm import Tile

NEAR, FAR = Tile(128, 128, 64, 8, 4, tma=True), Tile(128, 64, 64, 8, 3)
LIBRARY = Choice(None, "00" * 64)
TABLE = Table(
    {},
    {
        "fold 1024x512": [(64, LIBRARY), (256, Choice(NEAR, None)), (4096, LIBRARY)],
        "fold 9999x512": [(64, Choice(FAR, None))],
        "fold 700x512": [(64, LIBRARY)],
        "fold 512x1024": [(64, Choice(FAR, None))],
        "fold 512x2048": [(64, LIBRARY)],
        "dx 512x4096": [(64, Choice(FAR, None))],
    },
)


def test_the_nearest_proven_tile_of_the_depth() -> None:
    assert slices.proven_tile(TABLE, 512, 512) == NEAR
    assert slices.proven_tile(TABLE, 8000, 512) == FAR
    assert slices.proven_tile(TABLE, 512, 2048) is None, "an algorithm of cuBLASLt holds for its own shape alone"


def test_a_depth_that_was_not_proven_is_refused() -> None:
    with pytest.raises(NotQualified, match="no fold of depth 4096 was proven"):
        slices.proven_tile(TABLE, 512, 4096)


@pytest.mark.parametrize(
    ("rows", "depth", "expected"), [(512, 512, NEAR), (500, 2048, "default"), (700, 512, "table"), (1024, 512, "table")]
)
def test_what_runs(rows: int, depth: int, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(gemm_table, "current", lambda: TABLE)
    monkeypatch.setattr(slices, "add_units", lambda *_: found.append("table"))
    monkeypatch.setattr(slices, "fold_tile", lambda *_: "default")
    monkeypatch.setattr(triton_gemm, "fold", lambda dy, x, grad, bounds, tile: found.append((bounds, tile)))
    dy, x = torch.zeros(8, rows, dtype=torch.bfloat16), torch.zeros(8, depth, dtype=torch.bfloat16)
    slices.add_rows(dy, x, PackedLayout((3, 5), (1, 1)), torch.zeros(rows, depth))
    assert found == ["table" if expected == "table" else (((0, 3), (3, 8)), expected)]


def test_rows_that_the_copy_engine_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(gemm_table, "current", lambda: TABLE)
    monkeypatch.setattr(triton_gemm, "fold", lambda dy, x, grad, bounds, tile: found.append(tile))
    dy, x = torch.zeros(8, 513, dtype=torch.bfloat16), torch.zeros(8, 512, dtype=torch.bfloat16)
    slices.add_rows(dy, x, PackedLayout((3, 5), (1, 1)), torch.zeros(513, 512))
    assert found == [triton_gemm.FOLD_POINTERS]
