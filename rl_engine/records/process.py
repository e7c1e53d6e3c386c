"""Which process is meant: a name that neither another process nor a step of the clock can take."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import psutil

from rl_engine.records.types import EventValue

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def process_fields(pid: int | None = None) -> dict[str, EventValue]:
    """What tells one process (this one by default) from every other.

    ``host`` and ``pid``; ``boot``, the machine's id since it started, and ``ticks``, when the process started, counted
    from there. Both are of no clock that can be set. ``started`` in seconds since 1970 is for people, and for machines
    that do not say the others.
    """
    pid = os.getpid() if pid is None else pid
    boot, ticks = _boot(), _ticks(pid)
    exact: dict[str, EventValue] = {} if boot is None or ticks is None else {"boot": boot, "ticks": ticks}
    return {"host": platform.node(), "pid": pid, "started": psutil.Process(pid).create_time(), **exact}


def is_of_this_machine(fields: Mapping[str, object]) -> bool:
    """Whether a process of these fields ran here, in this or an earlier session of the machine."""
    return fields.get("boot") == _boot() is not None or fields.get("host") == platform.node()


def living(fields: Mapping[str, object]) -> psutil.Process | None:
    """The process that :func:`process_fields` described, if it still lives on this machine."""
    pid = fields.get("pid")
    if not isinstance(pid, int) or not is_of_this_machine(fields):
        return None
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if "ticks" in fields:
            same = (fields.get("boot"), fields["ticks"]) == (_boot(), _ticks(pid))
        else:  # recorded by an earlier version
            same = process.create_time() == fields.get("started")
    except (psutil.Error, OverflowError, ValueError):
        return None
    return process if same else None


def _boot() -> str | None:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return None


def _ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``; the second, a name in parentheses, may hold anything."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
