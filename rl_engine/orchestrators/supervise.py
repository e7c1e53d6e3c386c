"""A run in a process of its own: whatever ends that process, its run says so and nothing of it lives on.

When Ray's head dies, Ray ends the process that uses it at once and without a word; so do the kernel's memory killer
and a `kill -9`. The process that the user started therefore only waits: it passes signals on, each as ``RELAYED``, and
speaks up when the run's own process could not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from rl_engine.orchestrators.causes import memory_kills, of_exit
from rl_engine.orchestrators.interrupts import ENDING, RELAYED

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SI_USER = 0
EXIT_SECONDS = 20.0


class Word:
    """The run's side: what its supervisor must know before it is too late to say."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def folder(self, path: Path) -> None:
        """A folder to remove if this process does not."""
        self._say(f"folder {path}")

    def ended(self, code: int) -> None:
        """All is said and done: from here on this process only exits, with ``code``."""
        self._say(f"ended {code}")

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, (line + "\n").encode("utf-8", "surrogateescape"))


def supervise(lost: Callable[[str], None]) -> Word:
    """Returns in a new process, which is to do the run; the calling one waits for it and never returns.

    In the new process the signals that end a run are blocked, since nobody there could say anything yet.

    Args:
        lost: called in the waiting process, with the reason in words, when the run ended without a word and its
            processes and folders are gone.

    Raises:
        SystemExit: in the waiting process, with the run's exit code, or 3 where it had none of its own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent, held = os.getpid(), {*ENDING, RELAYED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*held, signal.SIGCHLD})
    kills = memory_kills()
    child = os.fork()
    if not child:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        _prctl(_PR_SET_PDEATHSIG, RELAYED)
        if os.getppid() != parent:  # it died before it could be told
            os.kill(os.getpid(), RELAYED)
        signal.pthread_sigmask(signal.SIG_SETMASK, held | set(mask))
        os.close(reading)
        return Word(writing)
    os.close(writing)
    said, status = _wait(child, reading)
    _clean_up(said)
    codes = [int(line.removeprefix("ended ")) for line in said if line.startswith("ended ")]
    if codes:
        raise SystemExit(codes[0])
    lost(of_exit(status, memory_kills() - kills))
    raise SystemExit(3)


def _wait(child: int, reading: int) -> tuple[list[str], int]:
    """(lines that the child said, its wait status); signals that are not ignored here are passed on meanwhile."""
    text, deadline = b"", float("inf")
    while True:
        found = signal.sigtimedwait({*ENDING, signal.SIGCHLD}, 1.0)
        # A terminal's own signal has reached every process of its group already.
        ending = found is not None and found.si_signo in ENDING and found.si_code <= _SI_USER
        if ending and signal.getsignal(found.si_signo) is not signal.SIG_IGN:
            os.kill(child, RELAYED)
        done, status = os.waitpid(child, os.WNOHANG)
        # What the run started may hold the pipe's other end: only what is there is read.
        while select.select([reading], [], [], 0)[0] and (block := os.read(reading, 65536)):
            text += block
        said = text.decode("utf-8", "surrogateescape").splitlines()
        if done:
            os.close(reading)
            return said, status
        if deadline == float("inf") and any(line.startswith("ended ") for line in said):
            deadline = time.monotonic() + EXIT_SECONDS
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)  # Ray's own exit, which may wait for what is gone


def _clean_up(said: list[str]) -> None:
    """Ends what the run's process left behind, by id. What of it is gone by now says nothing of the cause: Ray's head
    dies with the process that started it."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=10)
    for line in said:
        if line.startswith("folder "):
            shutil.rmtree(line.removeprefix("folder "), ignore_errors=True)


def _prctl(option: int, value: int) -> None:
    """Linux' prctl; elsewhere the run does without."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
