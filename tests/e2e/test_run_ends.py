"""Runs that do not end well: what they say, what they leave on disk, and that they leave no process behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_engine.entrypoints.parser import parse
from rl_engine.entrypoints.repro import _resolve
from rl_engine.ops.swiglu.cpu import CpuSwiglu
from rl_engine.orchestrators.actors import QualificationFailed, RolloutWorker, TrainWorker, WorkerHost
from rl_engine.records.reader import RunReader
from tests.e2e.harness import REPOSITORY, Cli, Command, Done, profile

LONG = ("--rollouts", "500", "--run-id", "r")


def finished_steps(cli: Cli) -> int:
    path = cli.run_dir("r") / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def started(cli: Cli, *arguments: str, steps: int = 2) -> Command:
    """A run that has finished ``steps`` of its 500 steps."""
    command = cli.start("run", *LONG, *arguments)
    command.wait_for(lambda: finished_steps(cli) >= steps)
    return command


def check_remains(cli: Cli, done: Done, state: str, at_least: int = 2) -> RunReader:
    """Every finished step can be read, the state is ``state``, and nothing lives on."""
    reader = RunReader(cli.run_dir("r"))
    assert [record.name for record in reader.states()] == ["planned", "running", state]
    steps = [record.step for record in reader.steps()]
    assert len(steps) >= at_least and steps == list(range(len(steps)))
    for step in steps:
        assert len(reader.samples(step).samples) == 24
    assert done.strays == ()
    assert done.out == f"run_dir: {cli.run_dir('r')}\n"
    return reader


@pytest.mark.parametrize(
    ("title", "named"),
    [
        ("ray::RolloutWorker", "rollout engine rollout-0 rank 0"),
        pytest.param("ray::TrainWorker", "trainer train rank 0", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_ends_the_run_with_its_name(cli: Cli, title: str, named: str) -> None:
    command = started(cli)
    (pid,) = command.processes(title)
    os.kill(pid, signal.SIGKILL)
    done = command.finish()
    assert done.code == 3, done.err
    reader = check_remains(cli, done, "failed")
    assert f"{named} (process {pid}) died" in done.err
    assert f"{len(reader.steps())} finished steps are in {reader.run_dir}" in done.err
    assert "Traceback" not in done.err
    reason = reader.states()[-1].reason
    assert reason is not None and named in reason
    assert [event.fields["pid"] for event in reader.events() if event.kind == "worker_died"] == [pid]


@pytest.mark.parametrize(
    "interrupt",
    [
        Command.press_control_c,
        pytest.param(lambda command: command.child.send_signal(signal.SIGTERM), marks=pytest.mark.slow),
        pytest.param(lambda command: command.child.send_signal(signal.SIGHUP), marks=pytest.mark.slow),
    ],
    ids=["control-c", "sigterm", "sighup"],
)
def test_an_interrupted_run_says_so(cli: Cli, interrupt: Callable[[Command], None]) -> None:
    command = started(cli)
    interrupt(command)
    done = command.finish()
    assert done.code == 130, done.err
    check_remains(cli, done, "interrupted")
    assert "rlk-repro: interrupted" in done.err
    assert "Traceback" not in done.err and "KeyboardInterrupt" not in done.err


@pytest.mark.slow
def test_an_impatient_second_signal_does_not_stop_the_clean_up(cli: Cli) -> None:
    command = started(cli)
    for _ in range(5):
        command.press_control_c()
        time.sleep(0.05)
    done = command.finish()
    assert done.code == 130, done.err
    check_remains(cli, done, "interrupted")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.5, 5.0, 9.0])
def test_a_signal_while_ray_starts_leaves_nothing(cli: Cli, seconds: float) -> None:
    command = cli.start("run", *LONG)
    command.wait_for(lambda: any(command.temporary.glob("rlk-run-*")))
    time.sleep(seconds)
    command.child.send_signal(signal.SIGTERM)
    done = command.finish()
    assert (done.code, done.strays) == (130, ()), f"{done}"
    assert "Traceback" not in done.err and "received at time" not in done.err, f"{done}"


CONNECTING = """
import os, signal, sys, time
from pathlib import Path
from rl_engine.orchestrators.interrupts import RELAYED, interruptible
from rl_engine.orchestrators.ray_head import Head, ray_head

number, folders = getattr(signal, sys.argv[1]), []

def announce(folder):
    import ray._private.worker as worker
    real = worker.connect

    def connect(*arguments, **words):
        found = real(*arguments, **words)
        os.kill(os.getpid(), number)
        return found

    worker.connect = connect
    folders.append(folder)

real_end = Head.end

def end(head):
    os.kill(os.getpid(), signal.SIGTERM)  # impatient
    real_end(head)
    time.sleep(4.0)

Head.end = end
try:
    with interruptible(), ray_head(1, 1 << 20, announce):
        print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", folders[0].exists(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_a_signal_while_ray_connects_does_not_abort_the_clean_up(number: str) -> None:
    """From there to the end of ``ray.init`` Ray's C++ side hears SIGTERM, and sets an alarm that aborts 3 s later; the
    second is the signal that a waiting process passes on."""
    words = [sys.executable, "-c", CONNECTING, number]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted False\n"), f"{done}"
    assert ("received at time" in done.stderr) == (number == "SIGTERM"), f"{done}"


@pytest.mark.slow
def test_the_run_of_a_killed_command_is_interrupted(cli: Cli) -> None:
    """The process that waits for the run is gone; the run itself learns of it and cleans up."""
    command = started(cli)
    command.child.kill()
    done = command.finish()
    check_remains(cli, done, "interrupted")


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_run(cli: Cli) -> None:
    command = cli.start("run", *LONG)
    assert command.child.stderr is not None
    assert command.child.stderr.readline().startswith("profile small")
    command.child.stderr.close()
    command.child.stderr = None
    done = command.finish()
    assert done.code == 141
    check_remains(cli, done, "interrupted", at_least=0)


def broken_copy(sources: Path, folder: Path) -> Path:
    """Sources whose SwiGLU gives one wrong bit."""
    shutil.copytree(sources, folder)
    file = folder / "rl_engine" / "ops" / "swiglu" / "cpu.py"
    text = file.read_text()
    assert text.count("        return out\n") == 1
    file.write_text(
        text.replace("        return out\n", "        out.view(torch.int16)[0, 0] ^= 1\n        return out\n")
    )
    return folder


def test_a_worker_refuses_operators_that_fail_their_proof(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same without Ray: the worker itself raises, on either side, and only with the wrong bit."""
    file = profile(tmp_path)
    arguments = parse(["run", "--profile", str(file), "--model-root", str(model), "--workspace", str(tmp_path)])
    plan = _resolve(arguments)[0].plan
    hosts = [WorkerHost(plan, "train", "train", 0, 0, 1, ""), WorkerHost(plan, "rollout", "rollout-0", 0, 0, 1, "")]
    digest = hosts[0].prove()
    assert digest is not None and len(digest) == 64
    right = CpuSwiglu.forward

    def wrong(self: CpuSwiglu, x: torch.Tensor) -> torch.Tensor:
        out = right(self, x)
        out.view(torch.int16)[0, 0] ^= 1
        return out

    monkeypatch.setattr(CpuSwiglu, "forward", wrong)
    for worker in (TrainWorker(hosts[0]), RolloutWorker(hosts[1])):
        with pytest.raises(QualificationFailed, match="swiglu"):
            worker.open()


@pytest.mark.slow
def test_consistency_refuses_operators_that_fail_their_proof(sources: Path, model: Path, tmp_path: Path) -> None:
    base = ["--profile", str(profile(tmp_path)), "--model-root", str(model)]
    cli = Cli(broken_copy(sources, tmp_path / "broken"), tmp_path, base)
    done = cli("run", "--run-id", "r")
    assert done.code == 2, done.err
    check_remains(cli, done, "failed", at_least=0)
    assert "operators that fail their proof" in done.err and "swiglu" in done.err
    assert "Traceback" not in done.err
    refusals = [event for event in RunReader(cli.run_dir("r")).events() if event.kind == "refusal"]
    assert len(refusals) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 7, 100, 1_000_000])
def test_a_damaged_checkpoint_is_the_users_to_mend(cli: Cli, model: Path, tmp_path: Path, size: int) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    os.truncate(folder / "model.safetensors", size)
    done = cli("run", "--run-id", "r", "--model-root", str(folder))
    assert done.code == 2, done.err
    check_remains(cli, done, "failed", at_least=0)
    assert "rlk-repro: found " in done.err and "checkpoint" in done.err
    assert "Traceback" not in done.err


FOREIGN_RAY = """
import sys, ray
context = ray.init(address="local", num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[1])
print(context.address_info["gcs_address"], flush=True)
sys.stdin.readline()
print(len([node for node in ray.nodes() if node["Alive"]]), flush=True)
"""


@pytest.mark.slow
def test_a_foreign_ray_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    folder = Path("/tmp") / f"rlkf-{os.getpid()}"
    foreign = subprocess.Popen(
        [sys.executable, "-c", FOREIGN_RAY, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert foreign.stdin is not None and foreign.stdout is not None
        address = foreign.stdout.readline().strip()
        done = cli.start("run", "--run-id", "r", env={"RAY_ADDRESS": address}).finish()
        assert done.code == 0, done.err
        assert done.strays == ()
        foreign.stdin.write("\n")
        foreign.stdin.flush()
        assert foreign.stdout.readline().split()[0] == "1"
    finally:
        foreign.kill()
        foreign.wait()
        shutil.rmtree(folder, ignore_errors=True)
