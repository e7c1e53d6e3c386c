"""Memory of a run: its peak, as the proportional set size of all processes, and what a worker gives back."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import TracebackType

import psutil


def return_memory() -> None:
    """Gives the C library's free memory back to the system.

    An actor's calls run on several threads, and each has an arena of its own that never serves another's: what one call
    freed, the next would take anew. Does nothing where the C library has no ``malloc_trim``.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_resident() -> int:
    """Bytes that this process held at its peak, pages that it shares with others included."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def proportional_sizes() -> dict[int, int]:
    """Bytes by process id of this process and what it started, now. Those that end or cannot be read are left out."""
    me = psutil.Process()
    sizes = {}
    for process in [me, *me.children(recursive=True)]:
        try:
            sizes[process.pid] = process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return sizes


class MemoryWatch:
    """Samples every process' size every two seconds on a thread of its own.

    Attributes:
        peak: bytes of all processes together, at most.
        peaks: bytes of every process, at most, by id.
    """

    def __init__(self, seconds: float = 2.0) -> None:
        self.peak = 0
        self.peaks: dict[int, int] = {}
        self._seconds = seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        while not self._end.wait(self._seconds):
            sizes = proportional_sizes()
            self.peak = max(self.peak, sum(sizes.values()))
            self.peaks.update({pid: max(size, self.peaks.get(pid, 0)) for pid, size in sizes.items()})
