"""A run directory from a stranger executes nothing, overwrites nothing and leads nowhere else."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_engine.checks import compare, validate
from rl_engine.checks.seal import verify_seal
from rl_engine.checks.validate import rescore_finding, run_validation
from rl_engine.records import paths
from rl_engine.records.codec import RecordError
from rl_engine.records.errors import UserError
from rl_engine.records.reader import RunReader
from rl_engine.records.writer import RunWriter
from tests.helpers.synthetic_run import make_run


@pytest.fixture()
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "run-1")


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (os.mkdir, (str(self.target),))


def test_a_pickle_is_never_opened(run: Path, tmp_path: Path) -> None:
    payload = pickle.dumps(Payload(tmp_path / "executed"))
    for name in ("samples/step-00000.safetensors", "plan.json", "steps.jsonl"):
        copy = tmp_path / name.replace("/", "-") / "run-1"
        shutil.copytree(run, copy)
        (copy / name).write_bytes(payload)
        assert validate.main(copy) == 1
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["plan.json", "steps.jsonl", "samples/step-00000.safetensors", "weights/0.json"])
def test_links_are_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.move(run / name, outside)
    (run / name).symlink_to(outside)
    before = outside.read_bytes()
    assert [f.name for f in run_validation(run) if f.status == "FAIL"] == ["records"]
    assert validate.main(run, seal=True) == 1
    assert outside.read_bytes() == before and not (run / "COMPLETE").exists()


@pytest.mark.parametrize("name", ["state.jsonl", "events.jsonl", "run.log"])
def test_appending_through_a_link_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.copy(run / name, outside)
    before = outside.read_bytes()
    writer = RunWriter.open(run)
    (run / name).unlink()
    (run / name).symlink_to(outside)
    with pytest.raises(OSError):
        writer.log("text") if name == "run.log" else writer.event("x") if "event" in name else writer.state("valid")
    assert outside.read_bytes() == before


@pytest.mark.parametrize("folder", ["samples", "routes", "weights"])
def test_linked_folders_are_refused(run: Path, tmp_path: Path, folder: str) -> None:
    shutil.move(run / folder, tmp_path / "elsewhere")
    (run / folder).symlink_to(tmp_path / "elsewhere")
    assert [f.name for f in run_validation(run) if f.status == "FAIL"] == ["records"]
    with pytest.raises(RecordError):
        RunWriter.open(run)


def test_a_planted_validation_link_is_not_written_through(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (run / "validation-0000.json").symlink_to(target)
    (run / ".validation-0001.json.partial").symlink_to(target)
    validate.main(run, seal=True)
    assert target.read_text() == "precious"


def test_pipes_and_devices_do_not_hang(run: Path) -> None:
    (run / "steps.jsonl").unlink()
    os.mkfifo(run / "steps.jsonl")
    assert [f.name for f in run_validation(run) if f.status == "FAIL"] == ["records"]
    with pytest.raises(RecordError):
        compare.compare_runs(run, run)


def test_oversized_files_are_refused_before_reading(run: Path) -> None:
    os.truncate(run / "steps.jsonl", 1 << 40)
    os.truncate(run / "samples/step-00001.safetensors", 1 << 40)
    with pytest.raises(RecordError, match="at most"):
        RunReader(run).steps()
    with pytest.raises(RecordError, match="at most"):
        RunReader(run).samples(1)


@pytest.mark.parametrize("relative", ["../x", "samples/../../x", "/etc/passwd", "a//b", "./x", "", "."])
def test_paths_stay_inside(run: Path, relative: str) -> None:
    with pytest.raises(RecordError):
        paths.read_bounded(run, relative, 100)


@pytest.mark.parametrize("name", ["../up", "a/b", "..", "", "a\x00b", "é", "x" * 129])
def test_engine_names_cannot_travel(run: Path, name: str) -> None:
    with pytest.raises(UserError):
        RunWriter.open(run).routes(name, 0, [])


def test_names_in_the_seal_cannot_travel(run: Path, tmp_path: Path) -> None:
    assert validate.main(run, seal=True) == 0
    text = (run / "COMPLETE").read_text().replace('"weights/0.json"', '"../../outside.json"')
    (run / "COMPLETE").write_text(text)
    (finding,) = verify_seal(run)
    assert finding.status == "FAIL"
    assert not (tmp_path / "outside.json").exists()


def test_rescore_runs_this_interpreter_with_a_list(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def record(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        assert isinstance(command, list) and not options.get("shell")
        seen.append(command)
        return subprocess.CompletedProcess(command, 2, b"", b"rlk-repro: found nothing\n")

    monkeypatch.setattr(subprocess, "run", record)
    finding = rescore_finding(run, 0)
    assert finding.status == "FAIL" and "found nothing" in finding.found
    # The plan's own interpreter path comes with the directory and is never executed.
    assert seen[0][0] == sys.executable and "python" not in seen[0]


def test_modules_in_the_working_directory_are_not_imported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "numpy", "safetensors", "rl_engine"):
        (run / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(run)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((".", "", os.environ.get("PYTHONPATH", ""))))
    assert rescore_finding(run, 0).status == "FAIL"
    assert not (tmp_path / "executed").exists()
