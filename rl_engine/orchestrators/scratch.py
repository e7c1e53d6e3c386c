"""A run's folder outside its run directory: Ray's sockets and logs, the start-up proofs, the ranks' rendezvous.

Ray opens its own folder to everyone (mode 0777), so it gets one inside a folder that only this user may enter, and what
is ours lies in another one beside it. The run's process holds a lock on the whole, which dies with it: a folder whose
lock is free is nobody's, and :func:`sweep` removes it. Only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rl_engine.records.errors import UserError

PREFIX = "rlk-run-"
RAY, OWN = "r", "p"
MARK = "RLK_RUN_FOLDER"  # an environment variable of every process that a run starts
# A Unix socket's path has at most 107 bytes. Below the base come 17 of ours, "/r", and at most 64 of Ray's.
LONGEST_BASE = 24
TRIES = 16
END_SECONDS = 10.0
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """The folder ``root``; ``ray`` is for Ray to make, ``own`` is there.

    Raises:
        UserError: nowhere to make one.
    """

    def __init__(self) -> None:
        self.root, self._lock = _make()
        self.ray, self.own = self.root / RAY, self.root / OWN
        self.own.mkdir(0o700)

    def remove(self) -> None:
        """The folder with all that is in it, and the lock."""
        # A process that is just ending may still write a last line into the folder.
        deadline = time.monotonic() + END_SECONDS
        while self.root.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.root, ignore_errors=True)
            time.sleep(0.05)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep() -> list[str]:
    """Removes this user's folders of runs whose process is gone, and ends what those started and nobody collected.

    Returns the folders. A file system without locks keeps its folders, since nobody can tell there.
    """
    gone = []
    for base in _bases():
        for path in _left(base):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, _OPEN)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _end_processes(path)
                    shutil.rmtree(path, ignore_errors=True)
                    gone.append(path)
                finally:
                    os.close(descriptor)
    return gone


def _end_processes(root: str) -> None:
    """Kills this user's processes that carry the mark of ``root`` in their environment, as whatever a run starts does:
    of Ray some live on for a minute."""
    mark = f"{MARK}={root}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # gone, or another user's
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(int(pid), signal.SIGKILL)


def _left(base: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if (
                    entry.name.startswith(PREFIX)
                    and entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                ):
                    yield entry.path


def _bases() -> list[str]:
    return list(dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")))


def _make() -> tuple[Path, int | None]:
    """(a new folder, the lock on it or None where there are no locks); one that a sweep took away meanwhile is made
    again."""
    for base in _bases():
        plain = base.isascii() and not any(letter.isspace() for letter in base)
        if not plain or len(base) > LONGEST_BASE or not os.access(base, os.W_OK | os.X_OK):
            continue
        for _ in range(TRIES):
            root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                return root, _locked(root)
    raise UserError(
        f"no folder for Ray's sockets ({tempfile.gettempdir()})",
        "a writable one with a short, plain path",
        "set TMPDIR=/tmp",
    )


def _locked(root: Path) -> int | None:
    """
    Raises:
        FileNotFoundError, BlockingIOError: a sweep has it.
    """
    descriptor = os.open(root, _OPEN)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            os.close(descriptor)
            return None
        os.stat(root)  # a sweep may have had the lock before
    except (FileNotFoundError, BlockingIOError):
        os.close(descriptor)
        raise
    return descriptor
