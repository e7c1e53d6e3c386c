"""Runs that go on: detached ones, interrupted pairs, full disks, and what cannot go on."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl_engine.checks.compare import compare_runs
from rl_engine.entrypoints.repro import main
from rl_engine.orchestrators import resume
from rl_engine.records.errors import UserError
from rl_engine.records.pair import read_pair
from rl_engine.records.reader import RunReader
from rl_engine.records.writer import RunWriter
from tests.e2e.harness import Cli, Command
from tests.helpers.synthetic_run import make_run


def steps(run_dir: Path) -> int:
    path = run_dir / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def started(cli: Cli, run_id: str, *arguments: str, at_least: int = 2) -> Command:
    command = cli.start("run", "--run-id", run_id, *arguments)
    command.wait_for(lambda: steps(cli.run_dir(run_id)) >= at_least, poll=0.01)
    return command


def driver(run_dir: Path) -> int:
    """Process of the last attempt."""
    return [int(event.fields["pid"]) for event in RunReader(run_dir).events() if event.kind == "attempt"][-1]


def states(run_dir: Path) -> list[str]:
    return [state.name for state in RunReader(run_dir).states()]


def listening(command: Command) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Addresses on which anything of the command accepts connections."""
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    for pid in command.processes():
        with contextlib.suppress(psutil.Error):
            connections = psutil.Process(pid).net_connections(kind="inet")
            texts = {item.laddr.ip.removeprefix("::ffff:") for item in connections if item.status == psutil.CONN_LISTEN}
            found |= set(map(ipaddress.ip_address, texts))
    return found


def check_equal(run_dir: Path, reference: Path) -> None:
    result = compare_runs(reference, run_dir)
    assert result.results == (), result.results


def test_detach_stop_resume_attach(quick_cli: Cli, reference: Path) -> None:
    """The whole life of a detached run; its planted secret is in no file."""
    run_dir, secret = quick_cli.run_dir("d"), "hf_" + "q7R" * 9
    begun = quick_cli.start("run", "--run-id", "d", "--rollouts", "60", "--detach", env={"HF_TOKEN": secret})
    out, err = begun.child.communicate(timeout=300.0)
    assert (begun.child.returncode, out) == (0, f"run_dir: {run_dir}\n"), err
    assert states(run_dir)[:2] == ["planned", "running"]
    assert begun.processes(), "the run is over before anybody could stop it"
    assert {address.is_loopback for address in listening(begun)} == {True}
    root = ("--output-root", str(run_dir.parent))
    stopped = quick_cli("stop", "d", *root)
    assert (stopped.code, stopped.out) == (0, f"run_dir: {run_dir}\n"), stopped.err
    assert states(run_dir)[-1] == "interrupted" and begun.processes() == {}
    assert quick_cli("attach", str(run_dir)).code == 130
    assert quick_cli("stop", str(run_dir)).code == 2
    again = quick_cli.start("run", "--resume", str(run_dir), "--detach", "--json")
    out, err = again.child.communicate(timeout=300.0)
    assert json.loads(out) == {"status": "running", "submission_id": "d", "run_dir": str(run_dir)}, err
    followed = quick_cli("attach", "d", *root, "--json")
    assert (followed.code, json.loads(followed.out)["status"]) == (0, "succeeded"), followed.err
    assert "step 60/60" in followed.err and "gates pass" in followed.err
    check_equal(run_dir, reference)
    assert quick_cli("run", "--resume", "d", *root).code == 2
    for path in (*run_dir.rglob("*"), *(run_dir.parent / ".detached" / "d").iterdir()):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    for command in (begun, again):
        assert command.finish().strays == ()


STRANGER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print("joined", len(ray.nodes()))
"""


def joins(port: int, token: str) -> bool:
    """Whether a process with this token becomes a client of the head; without the right one Ray keeps trying."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    clean |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    command = [sys.executable, "-c", STRANGER, f"127.0.0.1:{port}"]
    try:
        return (
            "joined"
            in subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, check=False).stdout
        )
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.slow
def test_a_stranger_without_the_token_cannot_join(quick_cli: Cli) -> None:
    command = started(quick_cli, "token", "--rollouts", "3000")
    (pid,) = command.processes("gcs/gcs_server")
    head = psutil.Process(pid)
    (port,) = {c.laddr.port for c in head.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert joins(port, head.environ()["RAY_AUTH_TOKEN"])  # the control
    assert not joins(port, "0" * 64)
    command.press_control_c()
    assert command.finish().code == 130


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--checkpoint-every", "3"], ["--checkpoint-every", "0"]])
def test_an_interrupted_run_goes_on_in_any_spacing_of_states(
    quick_cli: Cli, reference: Path, arguments: list[str]
) -> None:
    run_id = f"every-{'-'.join(arguments[1:]) or 'step'}"
    command = started(quick_cli, run_id, *arguments, at_least=5)
    command.press_control_c()
    done = command.finish()
    assert done.code == 130 and "rlk-repro run --resume" in done.err
    before = steps(quick_cli.run_dir(run_id))
    again = quick_cli("run", "--resume", str(quick_cli.run_dir(run_id)))
    assert again.code == 0, again.err
    assert f"{before} finished steps, going on from step" in again.err
    if arguments == ["--checkpoint-every", "0"]:
        assert f"steps 1 to {before} are computed again and compared" in again.err
    check_equal(quick_cli.run_dir(run_id), reference)
    kept = sorted(path.name for path in (quick_cli.run_dir(run_id) / "checkpoints").glob("*"))
    spacing = {"every-step": ["step-00059", "step-00060"], "every-3": ["step-00057", "step-00060"], "every-0": []}
    assert kept == spacing[run_id]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["driver", "trainer"])
def test_a_full_disk_loses_the_unfinished_step_alone(quick_cli: Cli, reference: Path, victim: str) -> None:
    """A limit on file sizes stands in for the full disk: the next samples, or the next state, do not fit."""
    command = started(quick_cli, f"full-{victim}")
    run_dir = quick_cli.run_dir(f"full-{victim}")
    pid = driver(run_dir) if victim == "driver" else next(iter(command.processes("ray::TrainWorker")))
    psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))
    done = command.finish()
    assert done.code == 3 and done.strays == (), done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("rlk-repro: run failed: ")]
    assert "File too large" in line and f"{steps(run_dir)} finished steps are in {run_dir}" in line
    assert f"rlk-repro run --resume {run_dir}" in line and "Traceback" not in done.err
    again = quick_cli("run", "--resume", str(run_dir))
    assert again.code == 0, again.err
    check_equal(run_dir, reference)


@pytest.mark.slow
def test_a_run_killed_behind_its_last_step_only_ends(quick_cli: Cli) -> None:
    """Nothing is left to compute, so no engine is started."""
    assert quick_cli("run", "--run-id", "last", "--rollouts", "2").code == 0
    run_dir = quick_cli.run_dir("last")
    path = run_dir / "state.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    done = quick_cli("run", "--resume", str(run_dir))
    assert done.code == 0, done.err
    assert states(run_dir) == ["planned", "running", "interrupted", "running", "finished", "valid"]


@pytest.mark.slow
def test_an_interrupted_pair_goes_on_as_a_pair(quick_cli: Cli) -> None:
    folder = quick_cli.run_dir("x").parent
    command = quick_cli.start("run", "--run-id", "p", "--mode", "paired", "--rollouts", "12")
    command.wait_for(lambda: steps(folder / "p-native") >= 2, poll=0.01)
    command.press_control_c()
    done = command.finish()
    assert done.code == 130, done.err
    assert states(folder / "p-native") == ["planned", "running", "interrupted"]
    assert states(folder / "p-consistency") == ["planned", "interrupted"]
    again = quick_cli("run", "--resume", str(folder / "p"))
    assert again.code == 0, again.err
    assert read_pair(folder / "p-pair.json").exact
    assert states(folder / "p-consistency") == ["planned", "interrupted", "running", "finished", "valid"]
    assert steps(folder / "p-native") == steps(folder / "p-consistency") == 12
    assert quick_cli("run", "--resume", str(folder / "p")).code == 2


# -- what cannot go on


@pytest.fixture
def broken_off(tmp_path: Path, model: Path) -> Path:
    """An interrupted run of the built-in stack, without an engine behind it."""
    run = make_run(tmp_path / "runs" / "r", model_root=str(model))
    rows = (run / "state.jsonl").read_text().splitlines(keepends=True)
    (run / "state.jsonl").write_text("".join(rows[:2]))
    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["run", "--resume", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert captured.err.startswith("rlk-repro: found ") and "hint: " in captured.err
    return captured.err


def test_what_cannot_go_on_is_refused_in_one_line(
    broken_off: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in broken_off.rglob("*") if path.is_file()}
    assert "no run nowhere" in refused(capsys, "nowhere")
    assert "no run " in refused(capsys, "../../etc/passwd")
    assert "--lr with --resume" in refused(capsys, str(broken_off), "--lr", "1")
    assert "--steps with --resume" in refused(capsys, str(broken_off), "--steps", "9")
    assert "sources at" in refused(capsys, str(broken_off))  # the synthetic run's revision is made up
    assert "which has finished" in refused(capsys, str(make_run(tmp_path / "done")))
    shutil.copytree(broken_off, tmp_path / "copy")
    assert "where it was made" in refused(capsys, str(tmp_path / "copy"))
    (tmp_path / "copy" / "plan.json").write_text("{")
    assert "plan.json" in refused(capsys, str(tmp_path / "copy"))
    writer = RunWriter.open(broken_off)
    assert "another process" in refused(capsys, str(broken_off))
    writer.close()
    assert {path: path.read_bytes() for path in broken_off.rglob("*") if path.is_file()} == before


def test_other_software_and_inputs_are_refused(
    broken_off: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = resume.find(str(broken_off), None)
    source = found.readers[0].environments()[0].sources[0]
    monkeypatch.setattr(resume, "source_record", lambda *_: source)
    resume.check_resumable(found)  # the control
    monkeypatch.setattr(resume, "installed_versions", lambda: {"torch": "0.1"})
    with pytest.raises(UserError, match="which r began with"):
        resume.check_resumable(found)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("1")
    data = dataclasses.replace(found.plans[0].data, path=str(prompts))
    plan = dataclasses.replace(found.plans[0], data=data)
    digests = resume.input_digests(plan)
    writer = RunWriter.open(broken_off)
    writer.event("inputs", **digests)
    writer.close()
    resume.check_inputs_unchanged(found.readers[0], digests)
    prompts.write_text("2")
    with pytest.raises(UserError, match="other prompts"):
        resume.check_inputs_unchanged(found.readers[0], resume.input_digests(plan))
    with pytest.raises(UserError, match="no prompt file"):
        prompts.unlink()
        resume.check_files(plan)
