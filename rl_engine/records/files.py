"""Durable writes below a run directory: nothing half-written is ever seen under its final name.

Files are made readable by their user alone, since they hold prompts and answers.
"""

from __future__ import annotations

import os
from pathlib import Path

from rl_engine.records import paths
from rl_engine.records.codec import RecordError
from rl_engine.records.errors import UserError
from rl_engine.records.private import FILE_MODE


def append_durable(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Append ``data`` and fsync (unless ``sync`` is off); links are not followed.

    On a failed or short write the file is cut back to its former length.

    Raises:
        OSError: the disk is full or failing; earlier lines are intact.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        size = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, data)
            if sync:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Write a new file or replace one: temporary file in the same folder, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_exclusive(path: Path, data: bytes, what: str) -> None:
    """Write a file that must not exist yet.

    Raises:
        UserError: the file exists.
    """
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _publish(temporary, path)
    except FileExistsError:
        raise UserError(f"{path} already there", f"no {what} of that name", "choose another name") from None
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _publish(temporary: Path, path: Path) -> None:
    """Give a finished file its name, refusing an existing one, which rename() alone would replace."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links.
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        os.rename(temporary, path)


def cut_torn_tail(path: Path) -> int:
    """Remove what follows the last newline (a line that a crash interrupted); returns the bytes removed.

    Raises:
        RecordError: no link, device or pipe is opened, and what is longer than any line is no torn one.
    """
    whole, torn = paths.torn_tail(path.parent, path.name)
    if torn:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, whole)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return torn


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_folder(path: Path) -> None:
    """Raise a RecordError unless ``path`` is a folder and not a link."""
    if path.is_symlink() or not path.is_dir():
        raise RecordError(f"{path.name}: not a folder", "a folder in the run directory")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
