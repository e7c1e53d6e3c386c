"""An output root with a sealed pair, one unsealed run, a topology matrix and a benchmark file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rl_engine.checks import validate
from rl_engine.records.matrix import MatrixCell, MatrixRecord, write_matrix
from tests.helpers.synthetic_run import make_run

STEPS = 12


def seal(run_dir: Path) -> Path:
    assert validate.main(run_dir, seal=True) == 0
    return run_dir


@pytest.fixture(scope="session")
def output_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for mode in ("native", "consistency"):
        seal(make_run(root / f"p-{mode}", mode, rollouts=STEPS, pair_id="p"))
    make_run(root / "open-run", "consistency", rollouts=3)
    cell = MatrixCell(2, 1, 1, 1, 2, "", "equal", "m-1", "d" * 64, 2, 500, 0, "")
    cells = (cell, MatrixCell(1, 2, 2, 1, 1, "", "differs", "m-2", "e" * 64, 2, 500, 7, "tokens of step 1 differ"))
    cells += (dataclasses.replace(cell, native="lm_head", status="control", run_id="m-3", mismatches=500),)
    write_matrix(root, MatrixRecord("m", "modules", "2026-11-29T00:00:00Z", "cpu", "m-1", cells))
    times = {"native": {"median": 2.0, "per_second": 5.0}, "consistency": {"median": 1.0, "per_second": 10.0}}
    case = {"case": "linear 64 rows", "work": 10, "unit": "tokens", "times": times, "speed": {"consistency": 2.0}}
    body = {"schema": "rlkernel.bench.v1", "benchmark": "ops", "machine": {"cores": 2}, "cases": [case]}
    (root / "bench-ops.json").write_text(json.dumps(body))
    record = {"identity": {"name": "a GPU"}, "levels": {"L4 dX": {"16": 1.25}}, "prices": {}, "refuted": []}
    (root / "qualification.json").write_text(json.dumps(record))
    kept = {"name": "GEMM 1 rows", "value": 1.5, "baseline": "cuBLAS", "at_most": False}
    gpu = {"schema": "rlkernel.gpu.v1", "family": "gemm", "device": {}, "rows": [kept, {**kept, "at_most": True}]}
    (root / "gpu-gemm.json").write_text(json.dumps(gpu))
    return root
