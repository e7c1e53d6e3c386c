"""The ledger of ``verify --matrix``: one cell a topology, compared with the first one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

from rl_engine.records import paths
from rl_engine.records.codec import decode, encode, parse_json
from rl_engine.records.files import write_atomic

CellStatus = Literal["equal", "differs", "control", "failed", "refused", "not run"]


@dataclasses.dataclass(frozen=True)
class MatrixCell:
    """One topology. ``detail`` says in words what differs first, or why there is nothing to compare.

    ``status`` is ``equal`` when the run is valid, has no mismatch and agrees with the reference in tokens, logprobs,
    gradient norms and weights; ``run_id`` is empty where no run was started. ``native`` are the operators that stayed
    stock, comma-separated: such a cell is a ``control``, which is not expected to be equal.
    """

    train_tp: int
    train_cp: int
    rollout_tp: int
    rollout_cp: int
    rollout_engines: int
    native: str
    status: CellStatus
    run_id: str
    plan_digest: str
    steps: int
    tokens_compared: int
    mismatches: int
    detail: str


@dataclasses.dataclass(frozen=True)
class MatrixRecord:
    """``<id>-matrix.json``. ``reference`` is the run that the others are compared with; ``time`` UTC, ISO 8601."""

    matrix_id: str
    name: str
    time: str
    device: str
    reference: str
    cells: tuple[MatrixCell, ...]


def matrix_path(output_root: Path, matrix_id: str) -> Path:
    """``<output-root>/<id>-matrix.json``."""
    return output_root / f"{paths.check_component(matrix_id, 'run id')}-matrix.json"


def write_matrix(output_root: Path, record: MatrixRecord) -> Path:
    """Write the ledger beside its runs, replacing an earlier state of it; returns its path."""
    path = matrix_path(output_root, record.matrix_id)
    write_atomic(path, (json.dumps(encode(record), sort_keys=True, indent=1, allow_nan=False) + "\n").encode())
    return path


def read_matrix(path: Path) -> MatrixRecord:
    """Read a ledger strictly."""
    data = paths.read_bounded(path.parent.resolve(), path.name, paths.JSON_LIMIT)
    return decode(MatrixRecord, parse_json(data, path.name), path.name)
