"""One writer for one run directory: a lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from rl_engine.records.errors import UserError

ATTEMPTS, PAUSE = 4, 0.02


class RunLock:
    """An exclusive ``flock`` on the run directory itself: nothing is written, a killed process leaves no lock."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            UserError: another writer has it.
        """
        if self._descriptor is not None:
            return
        descriptor = os.open(self.run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _take(descriptor)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                return  # a file system without locks: the caller's discipline is all there is
            raise being_written(self.run_dir) from None
        self._descriptor = descriptor

    @property
    def held(self) -> bool:
        """Whether the lock is there; :meth:`acquire` goes without on a file system that has none."""
        return self._descriptor is not None

    def release(self) -> None:
        """Give the lock back; harmless without it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.release()


def being_written(run_dir: Path) -> UserError:
    """The refusal of a second writer."""
    return UserError(
        f"{run_dir} being written by another process",
        "a run that no process works on",
        f"follow it with `rlk-repro attach {run_dir.name}`, or end it with `rlk-repro stop`",
    )


def _take(descriptor: int) -> None:
    """The lock; one that is held for a moment, by :func:`is_live` of another process, is waited for."""
    for left in reversed(range(ATTEMPTS)):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(PAUSE)


def is_live(run_dir: Path) -> bool:
    """Whether a process is writing this run now."""
    lock = RunLock(run_dir)
    try:
        lock.acquire()
    except UserError:
        return True
    lock.release()
    return False
