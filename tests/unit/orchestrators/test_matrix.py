"""The topology matrix without engines: its cells, its ledger, and what counts as agreement."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from rl_engine.config.host import HostFacts
from rl_engine.config.resolve import Request, resolve
from rl_engine.entrypoints.parser import parse
from rl_engine.orchestrators import matrix
from rl_engine.records.errors import UserError
from rl_engine.records.matrix import read_matrix
from tests.helpers.synthetic_run import make_run

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


def request(tmp_path: Path, **flags: str | bool) -> Request:
    given = {"mode": "consistency", "run_id": "m", "require_updates": True, **flags}
    paths = {"workspace": str(tmp_path / "ws")}
    return Request("verify", given, paths, None, {}, tmp_path, HostFacts(2, None, True), NOW)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of the cells; each "runs" by writing a run directory, whose mode its number decides."""
    lines: list[list[str]] = []

    class Child:
        def __init__(self, line: list[str]) -> None:
            lines.append(line[3:])

        def wait(self) -> int:
            args = parse(lines[-1])
            number = int(args.option_run_id[-2:])
            root = Path(args.path_workspace) / "data/runs/convergence"
            if number == 3:
                return 3
            make_run(root / args.option_run_id, "native" if number == 2 else "consistency")
            return 0

    monkeypatch.setattr(matrix, "start", Child)
    monkeypatch.setattr(matrix, "check_inputs", lambda resolved: None)
    return lines


def test_named_matrices() -> None:
    assert len(matrix.layouts("guide")) == 14 and len(matrix.layouts("full")) == 40
    assert {layout.shape for layout in matrix.layouts("guide")} <= {layout.shape for layout in matrix.layouts("full")}
    modules = matrix.layouts("modules")
    assert modules[0].native == "" and all(layout.native for layout in modules[1:])


@pytest.mark.parametrize(
    "text", ["{}", "[]", "[[1, 1, 1]]", "[[1, 1, 1, 0]]", '[[1, 1, 1, "1"]]', "[[1, 1, 1, true]]", "x"]
)
def test_wrong_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(UserError, match="train TP"):
        matrix.layouts(str(tmp_path / "m.json"))
    with pytest.raises(UserError, match="guide, full, modules"):
        matrix.layouts(str(tmp_path / "none.json"))


def test_ledger_of_a_matrix(tmp_path: Path, children: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """Equal, differing, failed, refused, equal: the third child fails, the fourth layout cannot be run."""
    shapes = [[1, 1, 1, 1], [1, 1, 3, 1], [3, 1, 1, 1], [1, 1, 1, 2], [1, 2, 1, 1]]
    (tmp_path / "m.json").write_text(json.dumps(shapes))
    asked = request(tmp_path)
    assert matrix.main(resolve(asked), matrix=str(tmp_path / "m.json"), json_output=True, request=asked) == 1
    body = json.loads(capsys.readouterr().out)
    record = read_matrix(Path(body["path"]))
    assert [cell.status for cell in record.cells] == ["equal", "differs", "failed", "refused", "equal"]
    assert record.reference == "m-01" and record.device == "cpu"
    assert "train_logprob" in record.cells[1].detail and record.cells[1].mismatches > 0
    assert "rollout CP 1" in record.cells[3].detail and record.cells[3].run_id == ""
    assert [cell.train_cp for cell in record.cells] == [1, 1, 1, 1, 2]
    assert len(children) == 4 and "--require-updates" in children[0] and "--tp-size=3" in children[2]


def test_stock_modules_are_controls(tmp_path: Path, children: list[list[str]]) -> None:
    asked = request(tmp_path)
    assert matrix.main(resolve(asked), matrix="modules", json_output=True, request=asked) == 1  # the third child fails
    record = read_matrix(tmp_path / "ws/data/runs/convergence/m-matrix.json")
    assert [cell.status for cell in record.cells] == ["equal", "control", "failed", "control", "control"]
    assert any(line[-1].startswith("--native=") for line in children)


def test_nothing_to_run_is_one_refusal(tmp_path: Path, children: list[list[str]]) -> None:
    (tmp_path / "m.json").write_text("[[1, 1, 1, 2], [2, 1, 1, 1]]")
    asked = request(tmp_path)
    with pytest.raises(UserError, match="rollout CP 1"):
        matrix.main(resolve(asked), matrix=str(tmp_path / "m.json"), json_output=False, request=asked)
    assert children == [] and not (tmp_path / "ws/data").exists()
    paired = request(tmp_path, mode="paired")
    with pytest.raises(UserError, match="--mode consistency"):
        matrix.main(resolve(paired), matrix="guide", json_output=False, request=paired)


def test_interrupted_matrix_keeps_its_ledger(
    tmp_path: Path, children: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.json").write_text("[[1, 1, 1, 1], [1, 1, 3, 1]]")
    real: Any = matrix.start

    class Child(real):  # type: ignore[misc]
        def wait(self) -> int:
            return super().wait() if len(children) == 1 else 130

    monkeypatch.setattr(matrix, "start", Child)
    asked = request(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        matrix.main(resolve(asked), matrix=str(tmp_path / "m.json"), json_output=False, request=asked)
    record = read_matrix(tmp_path / "ws/data/runs/convergence/m-matrix.json")
    assert [cell.status for cell in record.cells] == ["equal", "not run"]
