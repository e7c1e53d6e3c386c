"""``verify --matrix`` on real runs of a small model: layouts agree in every bit, a refused one says why."""

from __future__ import annotations

import json

import pytest

from rl_engine.records.matrix import read_matrix
from tests.e2e.harness import Cli


@pytest.mark.slow
def test_layouts_agree_and_a_stock_operator_shows(cli: Cli) -> None:
    shapes = [[1, 1, 1, 1], [3, 1, 1, 1], [1, 2, 3, 1], [1, 1, 1, 2]]
    (cli.folder / "layouts.json").write_text(json.dumps(shapes))
    done = cli("verify", "--matrix", "layouts.json", "--run-id", "m", "--max-response-len", "20", "--kl-coef", "0")
    record = read_matrix(cli.run_dir("m-matrix.json"))
    assert [cell.status for cell in record.cells] == ["equal", "equal", "equal", "refused"], done.err
    assert done.code == 1 and "rollout CP 1" in record.cells[3].detail
    assert record.reference == "m-01" and all(cell.mismatches == 0 for cell in record.cells)
    assert min(cell.tokens_compared for cell in record.cells[:3]) > 100
    assert done.strays == () and done.out == f"matrix: {cli.run_dir('m-matrix.json')}\n"
    modules = cli("verify", "--matrix", "modules", "--run-id", "n", "--max-response-len", "20", "--kl-coef", "0")
    cells = read_matrix(cli.run_dir("n-matrix.json")).cells
    assert modules.code == 0, modules.err
    assert [cell.status for cell in cells] == ["equal", *["control"] * 4]
    assert cells[0].mismatches == 0 < max(cell.mismatches for cell in cells[1:])
