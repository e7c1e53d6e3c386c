"""./rlk makes, completes, repairs and updates .venv: a stand-in for Python records what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rl_engine.config.paths import REPOSITORY

# Stands in for python3.11: answers the version questions, makes a folder for venv, writes down what pip is asked.
FAKE = r"""#!/bin/sh
case "$1" in
    -c)
        case "$2" in
            *'(3, 11)'*) exit ${FAKE_OLD:-0} ;;
            *version_info*print* | *print*version_info*) echo 3.11.9 ;;
            *find_spec*) exit 1 ;;
        esac
        exit 0 ;;
    -m)
        case "$2" in
            venv)
                mkdir -p "$3/bin"
                cp "$0" "$3/bin/python"
                exit 0 ;;
            pip)
                shift 3
                echo "pip $*" >>"$FAKE_CALLS"
                case "$*" in *"${FAKE_FAIL:-never}"*) echo 'ERROR: no such version' >&2; exit 1 ;; esac
                [ -z "${FAKE_SLOW:-}" ] || sleep "$FAKE_SLOW"
                exit 0 ;;
            rl_engine.*)
                shift
                echo "ran $* PYTHONPATH=$PYTHONPATH"
                exit 7 ;;
        esac ;;
esac
exit 0
"""


TOOLS = ("sh", "dirname", "basename", "ls", "cat", "cksum", "grep", "sed", "tail", "date", "sleep")
TOOLS += ("mkdir", "rm", "mv", "cp", "uname", "env", "getconf")


class Sandbox:
    """A copy of the launcher with its requirement files and a PATH that has only the stand-in and basic tools."""

    def __init__(self, folder: Path, compiler: bool = True) -> None:
        self.root = folder / "checkout with space"
        self.root.mkdir()
        shutil.copy(REPOSITORY / "rlk", self.root / "rlk")
        shutil.copytree(REPOSITORY / "requirements", self.root / "requirements")
        tools = folder / "bin"
        tools.mkdir()
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None, name
            (tools / name).symlink_to(found)
        if compiler:
            (tools / "cc").symlink_to(shutil.which("true") or "/bin/true")
        python = tools / "python3.11"
        python.write_text(FAKE)
        python.chmod(0o755)
        self.calls = folder / "calls"
        self.env = {"PATH": str(tools), "HOME": str(folder), "FAKE_CALLS": str(self.calls)}

    def start(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "rlk"), *argv],
            cwd=self.root.parent,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *argv: str, **env: str) -> tuple[int, str, str]:
        child = self.start(*argv, **env)
        out, err = child.communicate(timeout=60)
        return child.returncode, out, err

    def pip(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


def test_first_use_installs_in_order_and_hands_over(sandbox):
    code, out, err = sandbox.run("plan", "--tp", "3")
    assert (code, out) == (7, f"ran rl_engine.entrypoints.repro plan --tp 3 PYTHONPATH={sandbox.root}\n"), err
    torch, lock, demo, own = sandbox.pip()
    assert torch.endswith("--no-deps torch==2.13.0")
    assert "--index-url" not in torch
    assert lock.endswith("requirements/lock.txt")
    assert "--no-deps -r" in demo
    assert demo.endswith("requirements/demo-no-deps.txt")
    assert own.endswith(f"--no-deps --no-build-isolation -e {sandbox.root}")
    lines = err.splitlines()
    assert "Download: about" in lines[0]  # the size comes before anything else
    assert sum("done in" in line for line in lines) == 5  # one line per step
    assert not (sandbox.root / ".venv/.rlk-lock").exists()
    assert sandbox.run("plan")[2] == ""
    assert len(sandbox.pip()) == 4  # nothing is installed twice


def test_torch_index_and_missing_compiler(tmp_path):
    sandbox = Sandbox(tmp_path, compiler=False)
    sandbox.run("plan", RLK_TORCH_INDEX_URL="http://127.0.0.1/cpu")
    calls = sandbox.pip()
    assert "--index-url http://127.0.0.1/cpu torch==2.13.0" in calls[0]
    assert not any("--index-url" in call for call in calls[1:])
    assert any(call.endswith("requirements/compiler.txt") for call in calls)


def test_a_failing_step_is_said_and_repaired(sandbox):
    code, out, err = sandbox.run("run", FAKE_FAIL="lock.txt")
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert any("ERROR: no such version" in line for line in lines)
    assert lines[-1].startswith("rlk-repro: found step '[3/5] locked packages' failing")
    assert "; hint: check the network" in lines[-1]
    assert not (sandbox.root / ".venv/.rlk-complete").exists()
    assert not (sandbox.root / ".venv/.rlk-lock").exists()
    assert sandbox.run("run")[0] == 7


def test_an_interrupted_install_is_repaired(sandbox):
    child = sandbox.start("run", FAKE_SLOW="30")
    deadline = time.monotonic() + 20
    while not sandbox.pip() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.terminate()
    child.communicate(timeout=20)
    assert child.returncode == 143
    assert not (sandbox.root / ".venv/.rlk-lock").exists()
    before = len(sandbox.pip())
    assert sandbox.run("run")[0] == 7
    assert len(sandbox.pip()) == before + 4


def test_a_lock_of_a_dead_process_is_taken_over(sandbox):
    lock = sandbox.root / ".venv/.rlk-lock"
    lock.mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (lock / "pid").write_text(f"{gone.pid}\n")
    assert sandbox.run("run")[0] == 7


def test_two_at_once_install_once(sandbox):
    both = [sandbox.start("plan", FAKE_SLOW="0.3") for _ in range(2)]
    texts = [child.communicate(timeout=60)[1] for child in both]
    assert [child.returncode for child in both] == [7, 7]
    assert len(sandbox.pip()) == 4
    assert sum("is installing into" in text for text in texts) == 1


def test_a_changed_lock_updates_in_place(sandbox):
    sandbox.run("plan")
    marker = sandbox.root / ".venv/bin/marker"
    marker.write_text("")
    lock = sandbox.root / "requirements/lock.txt"
    lock.write_text(lock.read_text() + "another==1.0\n")
    code, _, err = sandbox.run("plan")
    assert code == 7
    assert "requirements changed" in err
    assert marker.exists()
    assert len(sandbox.pip()) == 8


def test_no_suitable_python(sandbox):
    code, _, err = sandbox.run("run", FAKE_OLD="1")
    assert code == 2
    assert "expected Python 3.11 or 3.12 on PATH" in err
    assert sandbox.pip() == []


def test_the_test_tier_installs_its_tools_once(sandbox):
    for _ in range(2):
        assert sandbox.run("test")[0] == 0
    assert sum(call.endswith("requirements/dev.txt") for call in sandbox.pip()) == 1
    code, out, _ = sandbox.run("test", "--help")
    assert (code, out.splitlines()[0]) == (0, "usage: ./rlk test [--engines | --nightly] [pytest arguments]")


def test_through_a_link_on_a_path(sandbox, tmp_path):
    (sandbox.root / "bin").mkdir()
    shutil.copy(REPOSITORY / "bin/rlk-repro", sandbox.root / "bin/rlk-repro")
    link = tmp_path / "linked"
    link.symlink_to(os.path.relpath(sandbox.root / "bin/rlk-repro", tmp_path))
    done = subprocess.run(
        [str(link), "plan"], env=sandbox.env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split(" PYTHONPATH")[0]) == (7, "ran rl_engine.entrypoints.repro plan")
