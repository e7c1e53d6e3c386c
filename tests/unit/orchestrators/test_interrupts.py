"""Signals that end a run, each sent at a chosen moment: the exit code and the words are those of an interruption."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# One run whose steps are a sleep: signals before its process can hear, in its work, and at its last words.
SCRIPT = """
import contextlib, os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from rl_engine.orchestrators import runs, supervise

IGNORED, LATE, BUSY, LAST = {ignored!r}, {late!r}, {busy!r}, {last!r}
os.setpgid(0, 0)
for number in IGNORED:
    signal.signal(number, signal.SIG_IGN)
waiting = os.getpid()

def send(*numbers):
    for number in numbers:
        if number < 0:  # as a terminal does it, to every process of the group
            os.killpg(waiting, -number)
        else:
            os.kill(waiting, number)
        time.sleep(0.3)

class Word(supervise.Word):
    def __init__(self, descriptor):
        super().__init__(descriptor)
        send(*LATE)

def work(runs, display, word, rescore):
    send(*BUSY)
    time.sleep({seconds})
    return 0

def printed(plans, status, json_output):
    send(*LAST)
    print(status, flush=True)

supervise.Word = Word
runs._run_all, runs.print_runs = work, printed
runs._lost = lambda local, why, json_output: print("lost:", why, flush=True)
runs.LocalRun = lambda plan, display, earlier: SimpleNamespace(plan=plan, started=False, finished=False)
try:
    sys.exit(runs.run([None], json_output=False))
except KeyboardInterrupt:
    sys.exit(130)
"""
INT, TERM, HUP = 2, 15, 1


def ended(
    late: tuple[int, ...] = (),
    busy: tuple[int, ...] = (),
    last: tuple[int, ...] = (),
    ignored: tuple[int, ...] = (),
    seconds: float = 0.0,
) -> tuple[int, str]:
    """(exit code, what was printed) of a run that gets these signals."""
    text = SCRIPT.format(late=late, busy=busy, last=last, ignored=ignored, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("number", [TERM, HUP])
def test_a_signal_before_the_run_can_hear_it_waits(number: int) -> None:
    """Between the fork and the handlers; taken at once it would end the run's process without a word, exit 3."""
    assert ended(late=(number,), seconds=60) == (130, "interrupted")


def test_a_signal_in_the_work_ends_it_and_later_ones_do_not_disturb_its_last_words() -> None:
    assert ended(busy=(TERM,), last=(TERM, INT, HUP), seconds=60) == (130, "interrupted")


def test_two_signals_at_once_are_one() -> None:
    """The waiting process passes on what the whole group got, so that the run's own hears two, here in one moment."""
    assert ended(late=(-INT, -TERM), last=(-INT,), seconds=60) == (130, "interrupted")


def test_an_ignored_signal_stays_ignored() -> None:
    """``nohup``, and a background job of a script; the run ends by another signal."""
    assert ended(late=(HUP,), busy=(INT, HUP), ignored=(HUP, INT)) == (0, "succeeded")
    assert ended(busy=(HUP, TERM), ignored=(HUP, INT), seconds=60) == (130, "interrupted")
