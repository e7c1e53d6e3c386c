"""Names and safe access of the files in a run directory.

A run directory may come from a stranger: names are checked, links are never followed, only regular files are opened,
and every read has a limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from rl_engine.records.codec import RecordError
from rl_engine.records.errors import UserError

PLAN, STATE, EVENTS, STEPS, LOG, COMPLETE = (
    "plan.json",
    "state.jsonl",
    "events.jsonl",
    "steps.jsonl",
    "run.log",
    "COMPLETE",
)
SAMPLES_DIR, ROUTES_DIR, WEIGHTS_DIR, PASSES_DIR = "samples", "routes", "weights", "passes"

JSON_LIMIT = 64 << 20
TENSOR_LIMIT = 1 << 30
LINE_LIMIT = 1 << 20
ENTRY_LIMIT = 200_000
_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


def check_component(name: str, what: str) -> str:
    """``name`` if it is one safe path component (letters, digits, ``._+-``, at most 128), else a UserError."""
    if not _COMPONENT.fullmatch(name):
        raise UserError(
            f"{what} {name[:80]!r}",
            "one path component: at most 128 letters, digits, '.', '_', '+' and '-', the first a letter or digit",
            f"choose another {what}",
        )
    return name


def samples_name(step: int, suffix: str) -> str:
    """``samples/step-NNNNN.<suffix>``."""
    return f"{SAMPLES_DIR}/step-{step:05d}.{suffix}"


def routes_name(engine: str, rank: int, attempt: int = 0) -> str:
    """``routes/<engine>-<rank>.json``; later attempts of a resumed run carry their number."""
    tail = f".attempt-{attempt}" if attempt else ""
    return f"{ROUTES_DIR}/{check_component(engine, 'engine name')}-{int(rank)}{tail}.json"


def passes_name(engine: str, attempt: int = 0) -> str:
    """``passes/<engine>.jsonl``; later attempts of a resumed run carry their number."""
    tail = f".attempt-{attempt}" if attempt else ""
    return f"{PASSES_DIR}/{check_component(engine, 'engine name')}{tail}.jsonl"


def weights_name(version: int) -> str:
    """``weights/<version>.json``."""
    return f"{WEIGHTS_DIR}/{int(version)}.json"


def numbered_name(kind: str, number: int) -> str:
    """``<kind>-NNNN.json`` for ``environment`` and ``validation``."""
    return f"{kind}-{number:04d}.json"


@contextlib.contextmanager
def _parent_fd(root: Path, relative: str) -> Iterator[tuple[int, str]]:
    """Descriptor of the folder holding ``relative``, opened component by component without following links."""
    *folders, name = relative.split("/")
    if any(part in ("", ".", "..") for part in [*folders, name]):
        raise RecordError(f"path {relative[:120]!r}", "a plain path inside the run directory")
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor, name
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_regular(root: Path, relative: str) -> Iterator[int]:
    """Read-only descriptor of a regular file below ``root``.

    Raises:
        RecordError: missing, a link anywhere below ``root``, or not a regular file.
    """
    try:
        with _parent_fd(root, relative) as (parent, name):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecordError(f"{relative}: {reason}", "a regular file in the run directory") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RecordError(f"{relative}: not a regular file", "a regular file in the run directory")
        yield descriptor
    finally:
        os.close(descriptor)


def read_bounded(root: Path, relative: str, limit: int) -> bytes:
    """The bytes of a regular file below ``root``, at most ``limit`` of them; a longer file is a RecordError."""
    with open_regular(root, relative) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise RecordError(f"{relative}: {size} bytes", f"at most {limit} bytes")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        raise RecordError(f"{relative}: more than {limit} bytes", f"at most {limit} bytes")
    return data


def read_lines(root: Path, relative: str, limit: int, line_limit: int) -> Iterator[bytes]:
    """The lines of a regular file below ``root``, one in memory at a time, without their ends. A last line without its
    end is left out: :func:`torn_tail` tells of it.

    Raises:
        RecordError: a file of more than ``limit`` bytes, a line of more than ``line_limit``.
    """
    with open_regular(root, relative) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise RecordError(f"{relative}: {size} bytes", f"at most {limit} bytes")
        read = 0
        while line := file.readline(line_limit + 1):
            read += len(line)
            if len(line) > line_limit or read > limit:
                raise RecordError(f"{relative}: a line above {line_limit} bytes", "lines as a run writes them")
            if not line.endswith(b"\n"):
                return
            yield line[:-1]


def torn_tail(root: Path, relative: str) -> tuple[int, int]:
    """(bytes of whole lines, bytes after the last of them) of a regular file below ``root``.

    Raises:
        RecordError: more than ``LINE_LIMIT`` bytes after it: no line that a crash could have torn.
    """
    with open_regular(root, relative) as descriptor:
        size = os.fstat(descriptor).st_size
        start = max(0, size - LINE_LIMIT)
        newline = os.pread(descriptor, size - start, start).rfind(b"\n")
    if newline < 0 and start:
        raise RecordError(f"{relative}: more than {LINE_LIMIT} bytes after its last whole line", "whole lines")
    whole = start + newline + 1
    return whole, size - whole


def list_files(root: Path) -> list[str]:
    """Every file below ``root`` as sorted relative paths with '/' between components.

    Raises:
        RecordError: a link, a device, a socket or a pipe; a name that is not UTF-8; more than ``ENTRY_LIMIT`` entries.
    """
    found: list[str] = []
    pending = [""]
    entries = 0
    while pending:
        folder = pending.pop()
        with os.scandir(root / folder if folder else root) as scan:
            for entry in scan:
                relative = f"{folder}/{entry.name}" if folder else entry.name
                entries += 1
                if entries > ENTRY_LIMIT:
                    raise RecordError(f"more than {ENTRY_LIMIT} entries", "a run directory")
                if not relative.isprintable():
                    raise RecordError(f"file name {relative[:80]!r}", "a printable name")
                if entry.is_dir(follow_symlinks=False):
                    pending.append(relative)
                elif entry.is_file(follow_symlinks=False):
                    found.append(relative)
                else:
                    raise RecordError(f"{relative}: a link or special file", "regular files and folders only")
    return sorted(found)


def list_folder(root: Path, folder: str) -> list[str]:
    """Sorted names in a sub-folder of ``root``; empty where the folder does not exist. Links are not followed."""
    try:
        with _parent_fd(root, f"{folder}/.x") as (descriptor, _):
            names = os.listdir(descriptor)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(f"{folder}: {error.strerror}", "a folder in the run directory") from error
    if len(names) > ENTRY_LIMIT:
        raise RecordError(f"{folder}: more than {ENTRY_LIMIT} entries", "a run directory")
    return sorted(names)
