"""A living run is found whatever the clock says, and nothing is said of it before its lock was asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rl_engine.orchestrators import detached
from rl_engine.records import lock, process
from rl_engine.records.codec import canonical_digest, encode
from rl_engine.records.errors import UserError
from rl_engine.records.process import living, process_fields
from rl_engine.records.reader import RunReader
from rl_engine.records.writer import RunWriter
from tests.helpers.synthetic_run import make_plan

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import sys, time
from pathlib import Path
from rl_engine.records.writer import RunWriter
writer = RunWriter.open(Path(sys.argv[1]))
writer.state("running")
print("runs", flush=True)
time.sleep(float(sys.argv[2]))
"""


def working(run: Path, seconds: float = 60.0) -> subprocess.Popen[str]:
    """A process that works on ``run``, which is new."""
    body = encode(make_plan(run))
    RunWriter.create(run, body, canonical_digest(body)).close()
    words = [sys.executable, "-c", CHILD, str(run), str(seconds)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert child.stdout is not None and child.stdout.readline() == "runs\n"
    child.stdout.close()
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()


def step_the_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """What ``settimeofday`` does to the start of a process in seconds since 1970: Linux counts it from the boot, and
    the boot's own time follows the clock."""
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + seconds)


@pytest.mark.parametrize("seconds", [0.0, 3600.0, -3600.0, 0.01])
def test_a_process_is_itself_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        fields = process_fields(child.pid)
        earlier = {name: fields[name] for name in ("host", "pid", "started")}
        step_the_clock(monkeypatch, seconds)
        found = living(fields)
        assert found is not None and found.pid == child.pid
        # The control: by its time alone it is another one.
        assert (living(earlier) is None) == bool(seconds)
    finally:
        child.kill()
        child.wait()
    assert living(fields) is None


@pytest.mark.parametrize("changes", [{"boot": "another"}, {"ticks": 1}, {"pid": 1}, {"pid": 1 << 70}, {"pid": "x"}])
def test_another_process_is_not_taken_for_it(changes: dict[str, object]) -> None:
    assert living({**process_fields(), **changes}) is None


def test_another_name_of_this_host_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = process_fields()
    monkeypatch.setattr(process.platform, "node", lambda: "renamed")
    assert living(fields) is not None
    assert living({**fields, "boot": "another"}) is None


def test_stop_ends_a_living_run_after_a_clock_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run-1"
    child = working(run)
    try:
        step_the_clock(monkeypatch, 7200.0)
        assert detached.stop(str(run), json_output=False) == 0
        assert not psutil.pid_exists(child.pid)  # `stop` waited for it, and here it is its parent
        assert RunReader(run).states()[-1].name == "interrupted"
    finally:
        end(child)


def lose_its_name(run: Path) -> None:
    """As where the process lives in another container: the lock is all that tells of it."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for line in lines:
        line["fields"].update(pid=(1 << 22) + 5)
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_nothing_is_said_before_the_lock_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run-1"
    child = working(run)
    try:
        lose_its_name(run)
        with pytest.raises(UserError, match="held by a process that is not to be found here"):
            detached.stop(str(run), json_output=False)
        assert RunReader(run).states()[-1].name == "running"
        threading.Timer(1.0, child.kill).start()
        begun = time.monotonic()
        assert detached.attach(str(run), json_output=False) == 3
        assert time.monotonic() - begun > 0.8
        assert "is gone, and left the run running" in capsys.readouterr().err
    finally:
        end(child)


def test_without_locks_a_living_run_is_known_by_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network folder whose server has no locks."""

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    run = tmp_path / "run-1"
    child = working(run)
    try:
        monkeypatch.setattr(lock.fcntl, "flock", no_locks)
        for attempt in (RunWriter.take_over, RunWriter.open):
            with pytest.raises(UserError, match="being written by another process"):
                attempt(run)
    finally:
        end(child)
    RunWriter.take_over(run).close()
    assert RunReader(run).states()[-1].name == "interrupted"
