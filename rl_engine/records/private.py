"""Folders and files in places where other users may write: nothing of theirs is used, nothing follows their links."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from rl_engine.records.errors import UserError

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def check_place(path: Path) -> None:
    """That no other user laid ``path`` or a folder above it: in a folder where everyone may write (``/tmp``), what is
    there already must be this user's or root's. Links are judged by who made them, and not followed.

    Raises:
        UserError: another user's.
    """
    path = Path(os.path.abspath(path))
    for child in (path, *path.parents[:-1]):
        try:
            found, above = os.lstat(child), os.stat(child.parent)
        except FileNotFoundError:
            continue
        if above.st_mode & stat.S_IWOTH and found.st_uid not in (os.geteuid(), 0):
            raise UserError(
                f"{child} of user {found.st_uid}, in a folder where everyone may write",
                "a place that is this user's own",
                "choose another --workspace, or remove it",
            )


def make_folder(path: Path, mode: int = FOLDER_MODE) -> Path:
    """``path`` as a folder of this user, by default one that nobody else may enter; its parents are made as any are.

    Raises:
        UserError: what is there is a link, no folder, or another user's.
    """
    check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise UserError(f"{path}, which is no folder of this user", "a folder of its own", "remove it") from None
    return path


def open_own(path: str, flags: int, mode: int = FILE_MODE) -> int:
    """An opener for :func:`open` that writes only to a regular file of this user with one name, made where it is not
    there; links are not followed, and what does not qualify is not even emptied.

    Raises:
        UserError: a link, another user's file, no regular file, or one that has another name too.
    """
    refused = UserError(f"{path}, which is no plain file of this user", "a file of its own, or none", "remove it")
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads
            raise refused from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise refused
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_shared(path: str, flags: int) -> int:
    """:func:`open_own` for files that others may read, as the user's umask says."""
    return open_own(path, flags, 0o666)
