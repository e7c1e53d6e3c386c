"""The seal finds every tampering and names it."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from rl_engine.checks import compare, validate
from rl_engine.checks.seal import read_seal, verify_seal
from rl_engine.records.errors import UserError
from rl_engine.records.reader import RunReader
from rl_engine.records.writer import RunWriter
from tests.helpers.synthetic_run import make_run


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("sealed") / "run-1")
    assert validate.main(run, seal=True) == 0
    return run


def snapshot(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def found(run: Path) -> str:
    (finding,) = verify_seal(run)
    assert finding.status == "FAIL"
    return finding.found


def test_sealing_prints_the_root_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run-1")
    assert validate.main(run, seal=True) == 0
    root = capsys.readouterr().out.strip().splitlines()[-1].removeprefix("root: ")
    assert len(root) == 64 and read_seal(run).root == root
    assert [state.name for state in RunReader(run).states()][-2:] == ["valid", "sealed"]
    assert set(read_seal(run).files) == set(snapshot(run)) - {"COMPLETE"}
    record = RunReader(run).validations()[0]
    assert record.passed and "all 26 response tokens" in record.certifies[0] and record.does_not_certify
    before = snapshot(run)
    assert validate.main(run, seal=True, expect_root=root) == 0
    assert validate.main(run, expect_root=root.upper()) == 0
    assert validate.main(run, expect_root="0" * 64) == 1
    assert snapshot(run) == before


def test_a_byte_flipped_in_every_file(sealed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(sealed, run)
    assert verify_seal(run)[0].status == "PASS"
    for path in sorted(run.rglob("*")):
        if not path.is_file():
            continue
        name, data = str(path.relative_to(run)), path.read_bytes()
        for position in {0, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
            assert name in found(run), (name, position)
        path.write_bytes(data)
    assert verify_seal(run)[0].status == "PASS"


def test_every_byte_of_complete_counts(sealed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(sealed, run)
    path, data = run / "COMPLETE", (sealed / "COMPLETE").read_bytes()
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x20]) + data[position + 1 :])
        assert verify_seal(run)[0].status == "FAIL", position


def test_added_removed_renamed_truncated_swapped(sealed: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        run = tmp_path / name / "run-1"
        shutil.copytree(sealed, run)
        return run

    run = copy("added")
    (run / "samples/notes.txt").write_text("hello")
    assert found(run) == "samples/notes.txt added"
    run = copy("removed")
    (run / "weights/1.json").unlink()
    assert found(run) == "weights/1.json removed"
    run = copy("renamed")
    (run / "weights/1.json").rename(run / "weights/7.json")
    assert found(run) == "weights/1.json renamed to weights/7.json"
    run = copy("truncated")
    os.truncate(run / "steps.jsonl", 10)
    assert found(run).startswith("steps.jsonl changed (") and "10 now" in found(run)
    run = copy("swapped")
    (run / "weights/1.json").rename(run / "x")
    (run / "weights/2.json").rename(run / "weights/1.json")
    (run / "x").rename(run / "weights/2.json")
    assert found(run) == "weights/1.json and weights/2.json swapped"
    run = copy("linked")
    (run / "weights/1.json").unlink()
    (run / "weights/1.json").symlink_to("2.json")
    assert "weights/1.json" in found(run)
    run = copy("unsealed")
    (run / "COMPLETE").unlink()
    assert "COMPLETE" in found(run)


def test_a_consistent_forgery_is_found_by_its_root(sealed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(sealed, run)
    root = read_seal(run).root
    (run / "COMPLETE").unlink()
    (run / "run.log").write_text("another story\n")
    states = (run / "state.jsonl").read_text().splitlines(keepends=True)
    (run / "state.jsonl").write_text("".join(states[:-1]))
    assert validate.main(run, seal=True) == 0
    assert verify_seal(run)[0].status == "PASS"
    assert verify_seal(run, root)[1].status == "FAIL"


def test_failed_gates_are_not_sealed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1")
    rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    rows[0]["mismatches"] = 1
    (run / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert validate.main(run, seal=True) == 1
    assert not (run / "COMPLETE").exists()
    assert RunReader(run).states()[-1].name == "invalid"
    assert not RunReader(run).validations()[0].passed
    assert RunReader(run).validations()[0].certifies == ()


def test_a_running_run_is_only_looked_at(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1")
    lines = (run / "state.jsonl").read_text().splitlines(keepends=True)
    (run / "state.jsonl").write_text("".join(lines[:-1]))
    before = snapshot(run)
    assert validate.main(run, seal=True) == 1
    assert snapshot(run) == before


def test_sealed_runs_refuse_a_writer(sealed: Path) -> None:
    with pytest.raises(UserError, match="sealed"):
        RunWriter.open(sealed)


def test_no_run_directory_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        validate.main(tmp_path)
    with pytest.raises(UserError):
        validate.main(tmp_path / "missing")


def test_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run-1")
    assert validate.main(run, json_output=True) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["passed"] and body["validation"].endswith("validation-0000.json")


# -- looking changes nothing


def test_a_torn_tail_is_reported_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run-1")
    for name in ("steps.jsonl", "state.jsonl", "events.jsonl", "passes/engine0.jsonl"):
        with open(run / name, "ab") as file:
            file.write(b'{"half a li')
    before = snapshot(run)
    for seal in (False, True):
        assert validate.main(run, seal=seal) == 1
        assert "[FAIL] records: found state.jsonl: 11 bytes after its last whole line" in capsys.readouterr().out
    assert validate.run_validation(run)[0].status == "FAIL"
    assert snapshot(run) == before


@pytest.mark.parametrize("name", ["steps.jsonl", "events.jsonl", "state.jsonl", "passes/engine0.jsonl"])
@pytest.mark.parametrize("size", [8 << 30, (1 << 20) + 4096])
def test_a_sparse_file_is_refused_at_once_and_stays(tmp_path: Path, name: str, size: int) -> None:
    """It took 8 s, and left 2 KB of 8 GiB."""
    run = make_run(tmp_path / "run-1")
    os.truncate(run / name, size)
    begun = time.monotonic()
    for seal in (False, True):
        assert validate.main(run, seal=seal) == 1
    with pytest.raises(UserError):
        RunWriter.open(run)
    with pytest.raises(UserError):
        RunWriter.take_over(run)
    assert time.monotonic() - begun < 2.0
    assert (run / name).stat().st_size == size


def test_a_seal_that_was_taken_away_fails_until_it_is_sealed_again(
    sealed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(sealed, run)
    root = read_seal(run).root
    (run / "COMPLETE").unlink()
    for _ in range(3):  # the first one's state `invalid` must not hide it from the next
        assert validate.main(run) == 1
        assert "[FAIL] state: found sealed once, and no COMPLETE" in capsys.readouterr().out
    assert validate.main(run, seal=True) == 0
    assert "sealed once, and no COMPLETE" in capsys.readouterr().out
    assert validate.main(run) == 0 and read_seal(run).root != root


def test_compare_names_a_broken_seal(sealed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(sealed, run)
    assert compare.main(sealed, run) == 0 and "seal" not in capsys.readouterr().out
    (run / "run.log").write_text("another story\n")
    for name, pair in (("B", (sealed, run)), ("A", (run, sealed))):
        assert compare.main(*pair) == 1
        assert f"broken seal: {name}: run.log changed" in capsys.readouterr().out
    assert compare.main(sealed, run, json_output=True) == 1
    assert json.loads(capsys.readouterr().out)["seals"][0].startswith("B: run.log changed")
    (run / "COMPLETE").unlink()
    assert compare.main(sealed, run) == 1 and "B: sealed once, and no COMPLETE" in capsys.readouterr().out
