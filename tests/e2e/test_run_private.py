"""A run where everyone may write: other users neither read nor write anything of it, and nothing of it stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_engine.records.reader import RunReader
from tests.e2e.harness import Cli, Command
from tests.e2e.kills import make_cli, small_model

NOBODY = 65534
LONG = ("--rollouts", "5000", "--run-id", "r")


@pytest.fixture
def sticky(tmp_path: Path) -> Iterator[Path]:
    """A folder like ``/tmp``."""
    folder = Path(tempfile.mkdtemp(prefix="rlks-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def open_to_others(folder: Path) -> set[Path]:
    """What another user could write to, and the files that they could read, below ``folder``."""
    found = set()
    for entry in folder.iterdir():
        bits = mode(entry)
        if entry.is_symlink():
            continue
        if bits & stat.S_IWOTH or (entry.is_file() and bits & stat.S_IROTH):
            found.add(entry)
        if entry.is_dir() and bits & stat.S_IXOTH:
            found |= open_to_others(entry)
    return found


def seen_by_nobody(folder: Path) -> set[Path]:
    """The same, as the system lets user ``nobody`` see it."""
    words = ["find", str(folder), "-mindepth", "1", "(", "-type", "f", "-readable", "-o", "-writable", ")"]
    words += ["!", "-type", "l", "-print"]
    nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/", **nobody)  # type: ignore[call-overload]
    return {Path(line) for line in done.stdout.splitlines()}


def check_modes(cli: Cli, sticky: Path) -> Path:
    """Modes of a run's files while it runs; returns its folder outside the run directory."""
    (scratch,) = sticky.glob("rlk-run-*")
    assert (mode(scratch), mode(scratch / "p")) == (0o700, 0o700)
    assert mode(scratch / "r") == 0o777, "Ray opens its folder to everyone: the reason for the one around it"
    proofs = list((scratch / "p").glob("proof-*"))
    assert {path.suffix for path in proofs} == {".json", ".lock"} and {mode(path) for path in proofs} == {0o600}
    run = cli.run_dir("r")
    for path in (run, *run.rglob("*")):
        if not path.name.endswith(".partial") and "checkpoints" not in path.parts:
            assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    mine = open_to_others(sticky)
    assert mine == {sticky / "profile.json", sticky / "sums.jsonl"}, mine  # the test's own
    if os.geteuid() == 0:
        assert seen_by_nobody(sticky) == mine
    return scratch


def kill_together(command: Command, cli: Cli) -> None:
    """The waiting process and the run's own, before either can clean up after the other."""
    begun = [event.fields["pid"] for event in RunReader(cli.run_dir("r")).events() if event.kind == "attempt"]
    for pid in (command.child.pid, int(begun[0])):
        os.kill(pid, signal.SIGSTOP)
    for pid in (command.child.pid, int(begun[0])):
        os.kill(pid, signal.SIGKILL)


def test_a_run_where_everyone_may_write(sources: Path, sticky: Path, tmp_path: Path) -> None:
    cli = make_cli(sources, small_model(tmp_path / "model"), sticky)
    command = cli.start("run", *LONG, env={"TMPDIR": str(sticky)})
    steps = cli.run_dir("r") / "steps.jsonl"
    command.wait_for(lambda: steps.exists() and steps.read_bytes().count(b"\n") >= 2)
    scratch = check_modes(cli, sticky)
    kill_together(command, cli)
    command.child.wait()
    assert scratch.exists()
    done = cli("stop", "r", env={"TMPDIR": str(sticky)})
    assert done.code == 0 and f"removed {scratch}" in done.err, done
    assert not scratch.exists()
    assert command.finish().strays == (), "Ray's agents would outlive the process that started them by a minute"
    assert [state.name for state in RunReader(cli.run_dir("r")).states()][-1] == "interrupted"
