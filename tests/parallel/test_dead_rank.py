"""A rank that dies in a run on Ray: the run ends in seconds with exit code 3 and names engine and rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rl_engine.records.reader import RunReader
from tests.e2e.harness import Cli, copy_sources, profile, save_model


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sources, a small model whose heads two ranks can share)."""
    folder = tmp_path_factory.mktemp("run")
    return copy_sources(folder / "sources"), save_model(folder / "model", heads=8, kv_heads=4)


@pytest.mark.parametrize(
    ("engine", "named", "rank"),
    [
        ("train", "trainer train rank 1", 1),
        pytest.param("rollout-0", "rollout engine rollout-0 rank 1", 1, marks=pytest.mark.slow),
        pytest.param("train", "trainer train rank 0", 0, marks=pytest.mark.slow),
    ],
)
def test_a_dead_rank_is_named(
    command_line: tuple[Path, Path], tmp_path: Path, engine: str, named: str, rank: int
) -> None:
    """Its peers wait for it inside an exchange; what they then raise must not hide whose death it was."""
    sources, model = command_line
    layout = {"tp_size": 2, "cp_size": 1, "rollout_tp_size": 2}
    cli = Cli(sources, tmp_path, ["--profile", str(profile(tmp_path, **layout)), "--model-root", str(model)])
    command = cli.start("run", "--rollouts", "500", "--run-id", "r")
    folder = cli.run_dir("r")
    steps = folder / "steps.jsonl"
    command.wait_for(lambda: steps.exists() and steps.read_bytes().count(b"\n") >= 1, seconds=400.0)
    started = [event.fields for event in RunReader(folder).events() if event.kind == "worker_started"]
    pids = {(fields["engine"], fields["rank"]): fields["pid"] for fields in started}
    assert set(pids) == {("train", 0), ("train", 1), ("rollout-0", 0), ("rollout-0", 1)}
    assert set(pids.values()) <= set(command.processes("ray::")), "a rank is no process of its own"
    killed = time.monotonic()
    os.kill(pids[engine, rank], signal.SIGKILL)
    done = command.finish(300.0)
    assert time.monotonic() - killed < 90.0  # seconds on a quiet machine
    assert done.code == 3, done.err
    assert f"{named} (process {pids[engine, rank]}) died" in done.err
    assert "Traceback" not in done.err
    assert done.strays == ()
    reader = RunReader(folder)
    assert [state.name for state in reader.states()] == ["planned", "running", "failed"]
    died = [event.fields for event in reader.events() if event.kind == "worker_died"]
    assert [(fields["engine"], fields["rank"]) for fields in died] == [(engine, rank)]
