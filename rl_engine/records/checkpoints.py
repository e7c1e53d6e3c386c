"""Checkpoints of a run: complete or absent, checked when read, the last two kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from rl_engine.records import paths
from rl_engine.records.codec import RecordError, decode, encode, parse_json
from rl_engine.records.errors import UserError
from rl_engine.records.files import require_folder, sync_folder, write_atomic
from rl_engine.records.private import FOLDER_MODE

FOLDER = "checkpoints"
KEEP = 2
_NAME = re.compile(r"step-([0-9]{5,9})")
_MANIFEST = "manifest.json"
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class CheckpointFile:
    """Content of one file of a checkpoint."""

    sha256: str
    size: int


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """``checkpoints/step-NNNNN/manifest.json``: the state from which step ``next_step`` starts."""

    plan_digest: str
    next_step: int
    weight_version: int
    files: dict[str, CheckpointFile]


def write_checkpoint(
    run_dir: Path, plan_digest: str, next_step: int, weight_version: int, save: Callable[[Path], None]
) -> Path:
    """Let ``save`` write its files into an empty folder, then make it a checkpoint in one rename; older ones go.

    Raises:
        OSError: the disk is full or failing; earlier checkpoints are intact and no partial one is left in their way.
    """
    root = run_dir / FOLDER
    root.mkdir(FOLDER_MODE, exist_ok=True)
    require_folder(root)
    final, partial = root / f"step-{next_step:05d}", root / f".step-{next_step:05d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(FOLDER_MODE)
    try:
        save(partial)
        files = {}
        for name in paths.list_files(partial):
            with open(partial / name, "rb") as file:
                os.fsync(file.fileno())
            files[name] = _hash(partial, name)
        manifest = Checkpoint(plan_digest, next_step, weight_version, files)
        body = json.dumps(encode(manifest), sort_keys=True, indent=1) + "\n"
        write_atomic(partial / _MANIFEST, body.encode())
        # A resumed run may reach the same step again; a rename cannot replace a folder that is not empty.
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(root)
    for step in _steps(run_dir)[:-KEEP]:
        shutil.rmtree(root / f"step-{step:05d}", ignore_errors=True)
    return final


def latest_checkpoint(
    run_dir: Path, plan_digest: str, at_most: int | None = None
) -> tuple[Path, Checkpoint, tuple[str, ...]]:
    """``(folder, manifest, passed over)`` of the newest checkpoint whose every byte is what its manifest says.

    ``passed over`` says in words why newer ones were not taken. ``at_most`` is the largest ``next_step`` of use: the
    checkpoint of a step that did not finish is of none.

    Raises:
        UserError: no usable checkpoint, with the reasons.
    """
    reasons: list[str] = []
    for step in reversed(_steps(run_dir)):
        if at_most is not None and step > at_most:
            continue
        folder = run_dir / FOLDER / f"step-{step:05d}"
        try:
            manifest = _verified(folder)
            if manifest.plan_digest != plan_digest or manifest.next_step != step:
                raise RecordError(f"{folder.name} of another plan or step", "this run's checkpoint")
            return folder, manifest, tuple(reasons)
        except RecordError as error:
            reasons.append(error.found)
    detail = f" ({'; '.join(reasons)})" if reasons else ""
    raise UserError(f"no usable checkpoint in {run_dir}{detail}", "a checkpoint to resume from", "start a new run")


def checkpoint_folders(run_dir: Path) -> dict[int, Path]:
    """``next_step`` -> folder of every checkpoint that is there, by name: no byte is looked at."""
    return {step: run_dir / FOLDER / f"step-{step:05d}" for step in _steps(run_dir)}


def _verified(folder: Path) -> Checkpoint:
    name = f"{folder.name}/{_MANIFEST}"
    manifest = decode(Checkpoint, parse_json(paths.read_bounded(folder, _MANIFEST, paths.JSON_LIMIT), name), name)
    present = [entry for entry in paths.list_files(folder) if entry != _MANIFEST]
    if present != sorted(manifest.files):
        raise RecordError(f"{folder.name}: files missing or added", "the files of its manifest")
    for entry, expected in manifest.files.items():
        if _hash(folder, entry) != expected:
            raise RecordError(f"{folder.name}/{entry}: other bytes", "the bytes of its manifest")
    return manifest


def _hash(folder: Path, name: str) -> CheckpointFile:
    hasher, size = hashlib.sha256(), 0
    with paths.open_regular(folder, name) as descriptor:
        while block := os.read(descriptor, _BLOCK):
            hasher.update(block)
            size += len(block)
    return CheckpointFile(sha256=hasher.hexdigest(), size=size)


def _steps(run_dir: Path) -> list[int]:
    return sorted(
        int(match[1]) for name in paths.list_folder(run_dir, FOLDER) if (match := _NAME.fullmatch(name)) is not None
    )
