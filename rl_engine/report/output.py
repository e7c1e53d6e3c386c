"""The folder that a report is written into: only files of ours are replaced, and nothing through a link."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rl_engine.records import paths
from rl_engine.records.codec import printable
from rl_engine.records.errors import UserError
from rl_engine.records.files import write_atomic

MARK = "report.json"
SCHEMA = "rlkernel.report.v1"
MODE = 0o666  # as the umask says: a report is to be shown, and has no prompt in it


class ReportFolder:
    """Writes files below one folder and remembers their names.

    Raises:
        UserError: a link, a folder with files that no report wrote, or a place inside a run directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[str] = []
        self._check()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / MARK, self._mark({}), MODE)
        except OSError as error:
            raise UserError(
                f"{printable(str(folder))}: {error.strerror}", "a folder that can be written to", "--output DIR"
            ) from None

    def _check(self) -> None:
        folder = self.folder
        shown = printable(str(folder))
        if folder.is_symlink():
            raise UserError(f"a link {shown}", "a folder of its own for the report", "--output DIR")
        if not folder.exists():
            inside = folder.absolute()
        elif not folder.is_dir():
            raise UserError(f"a file {shown}", "a folder for the report", "--output DIR")
        else:
            inside = folder.resolve()
            if any(folder.iterdir()) and not _is_ours(folder / MARK):
                raise UserError(f"files that are no report's in {shown}", "an empty or new folder", "--output DIR")
        for parent in (inside, *inside.parents):
            if os.path.lexists(parent / paths.PLAN):
                raise UserError(f"{shown}, inside a run directory", "a folder outside every run", "--output DIR")

    def write(self, name: str, data: bytes) -> None:
        """Write or replace ``name`` (``/`` between components); never through a link."""
        path = self.folder
        for part in name.split("/")[:-1]:
            path = path / part
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise UserError(f"{printable(str(path))}, which is no folder", "a folder of the report", "remove it")
            path.mkdir(exist_ok=True)
        try:
            write_atomic(self.folder / name, data, MODE)
        except OSError as error:
            raise UserError(
                f"{printable(str(self.folder / name))}: {error.strerror}", "room and permission", "--output DIR"
            ) from None
        self.files.append(name)

    def finish(self, body: dict[str, object]) -> None:
        """The manifest, with ``body`` and every file's name."""
        write_atomic(self.folder / MARK, self._mark(body), MODE)

    def _mark(self, body: dict[str, object]) -> bytes:
        return (json.dumps({"schema": SCHEMA, **body, "files": sorted(self.files)}, indent=1) + "\n").encode()


def _is_ours(path: Path) -> bool:
    try:
        body = json.loads(paths.read_bounded(path.parent.resolve(), path.name, 1 << 20))
    except (UserError, OSError, ValueError):
        return False
    return isinstance(body, dict) and body.get("schema") == SCHEMA
