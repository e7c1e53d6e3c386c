"""A run on a GPU sees to its proof first; a proof that fails or breaks off ends the run in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from rl_engine.config.plan import Plan
from rl_engine.orchestrators import gpu_proof
from rl_engine.orchestrators.gpu_proof import ensure_proof
from rl_engine.records.errors import UserError
from tests.helpers.synthetic_run import make_plan


class Said:
    """A display that only remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def task(self, text: str) -> object:
        return contextlib.nullcontext()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return dataclasses.replace(make_plan(tmp_path), backend="cuda", mode="consistency", model_root="/a model")


def interpreter(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> Path:
    """Stands in for Python; what it was called with is in the file."""
    script, said = folder / "python", folder / "arguments"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setattr(gpu_proof.sys, "executable", str(script))
    return said


def test_a_proof_is_made_or_kept(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Said()
    said = interpreter(monkeypatch, tmp_path, "echo proving >&2; echo 3 s >&2; echo 'qualified in 9 s' >&2; echo data")
    ensure_proof([plan], display)  # type: ignore[arg-type]
    assert display.lines == ["proving", "qualified in 9 s"]
    words = said.read_text().splitlines()
    assert words[2:] == ["qualify", "--provider", "gpu", "--model-root", "/a model"]
    interpreter(monkeypatch, tmp_path, "echo 'proven earlier' >&2")
    ensure_proof([plan], display)  # type: ignore[arg-type]
    assert display.lines[2:] == ["proven earlier"]


@pytest.mark.parametrize("changed", [{"backend": "cpu"}, {"mode": "native"}])
def test_other_plans_need_none(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
) -> None:
    said = interpreter(monkeypatch, tmp_path, "exit 1")
    ensure_proof([dataclasses.replace(plan, **changed)], Said())  # type: ignore[arg-type]
    assert not said.exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'adamw triton m: 3 of 9 DIFFER'; echo more; exit 1", r"\(first adamw triton m: 3 of 9 DIFFER\)"),
        ("echo 'rlk-repro: found no GPU that torch sees' >&2; exit 2", "no GPU that torch sees"),
        ("kill -9 $$", "no proof of this GPU's operators"),
    ],
)
def test_a_run_without_a_proof_is_refused(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    interpreter(monkeypatch, tmp_path, body)
    with pytest.raises(UserError, match=message):
        ensure_proof([plan], Said())  # type: ignore[arg-type]


def test_a_signal_ends_the_proof_and_all_it_started(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = tmp_path / "children"
    interpreter(monkeypatch, tmp_path, f"sleep 300 & echo $! > {children}; echo $$ >> {children}; sleep 300")

    def later() -> None:
        while not children.exists() or children.read_text().count("\n") < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=later, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        ensure_proof([plan], Said())  # type: ignore[arg-type]
    left = [int(pid) for pid in children.read_text().split()]
    deadline = time.monotonic() + 30
    while any(map(_lives, left)) and time.monotonic() < deadline:  # killed; the system takes them away
        time.sleep(0.02)
    assert not any(map(_lives, left))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
