"""What of a source tree is source, and its state: a git revision with its changes, or a digest of the files.

Source is what a run reads of the tree: modules, C kernels, profiles, bundled data and the files of a report. What a run
writes (its workspace, compiled kernels, a kept GPU proof) and what users put beside it is none, in git or not.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from rl_engine.records.types import SourceRecord

FOLDERS: tuple[str, ...] = ("rl_engine", "configs")
SUFFIXES: tuple[str, ...] = (".py", ".c", ".h", ".cu", ".json", ".jsonl", ".js", ".css", ".j2")
_MADE = ("__pycache__", "_build")
_GIT_SECONDS = 30
_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")


def source_record(name: str, root: Path, folders: Sequence[str] = FOLDERS) -> SourceRecord:
    """State of a source tree: git revision, whether it is dirty, and a SHA-256 over its uncommitted changes.

    Every change of a tracked file counts, and every untracked file that is source (:func:`is_source`) and not ignored.
    A tracked file that git was told not to look at (assume-unchanged, skip-worktree) counts as changed where it is.
    Outside git, without it, or where a foreign repository merely lies around the tree, the revision is None and
    ``diff_hash`` covers every source file.

    Args:
        name: the record's.
        root: the checkout, or the folder in which the package is installed.
        folders: folders below ``root`` that hold source.
    """
    revision = _git(root, "rev-parse", "HEAD")
    changed = None if revision is None else uncommitted(root, folders)
    if revision is None or changed is None:
        return SourceRecord(name=name, revision=None, dirty=False, diff_hash=_digest(root, _tree(root, folders)))
    digest = _digest(root, changed) if changed else None
    return SourceRecord(name=name, revision=revision.decode().strip(), dirty=bool(changed), diff_hash=digest)


def uncommitted(root: Path, folders: Sequence[str] = FOLDERS) -> list[str] | None:
    """Paths below ``root``, sorted, of what git finds changed; None where git tracks nothing of the tree or fails."""
    if not _git(root, "ls-files", "-z", "--", "."):
        return None
    changed = _git(root, "diff", "--name-only", "-z", "--relative", "--no-renames", "--no-ext-diff", "HEAD", "--", ".")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".")
    tagged = _git(root, "ls-files", "-v", "-z", "--", ".")
    if changed is None or untracked is None or tagged is None:
        return None
    fresh = (path for name in _names(untracked) for path in _files(root, name) if is_source(PurePath(path), folders))
    unseen = (name[2:] for name in _names(tagged) if name[0] == "S" or name[0].islower())
    return sorted({*_names(changed), *fresh, *(name for name in unseen if os.path.lexists(root / name))})


def _files(root: Path, name: str) -> Iterator[str]:
    """An untracked file; of a repository of its own, which git names as a folder, all files."""
    if not name.endswith("/"):
        yield name
        return
    for base, below, files in os.walk(root / name):
        below[:] = [folder for folder in below if _is_kept(PurePath(folder))]
        yield from (os.path.relpath(os.path.join(base, file), root) for file in files)


def is_source(path: PurePath, folders: Sequence[str] = FOLDERS) -> bool:
    """Whether a file at ``path``, relative to its tree, would be source: in a source folder, or a module beside them.

    Names that begin with a dot and what is compiled never are.
    """
    if path.suffix not in SUFFIXES or not _is_kept(path):
        return False
    return path.parts[0] in folders if len(path.parts) > 1 else path.suffix == ".py"


def lies_in_sources(path: Path, root: Path, folders: Sequence[str] = FOLDERS) -> bool:
    """Whether files written below the folder ``path`` would be taken for source of the tree ``root``."""
    try:
        relative = path.resolve().relative_to(root.resolve())
    except ValueError:
        return False
    return bool(relative.parts) and relative.parts[0] in folders and _is_kept(relative)


def _is_kept(path: PurePath) -> bool:
    return not any(part.startswith(".") or part in _MADE for part in path.parts)


def _tree(root: Path, folders: Sequence[str]) -> list[str]:
    """Source files of a tree without git. An installed package lies among foreign ones: then only its own folder."""
    is_checkout = (root / "pyproject.toml").is_file()
    found = [path.name for path in root.glob("*.py")] if is_checkout else []
    for folder in folders if is_checkout else folders[:1]:
        for base, below, files in os.walk(root / folder):
            below[:] = [name for name in below if _is_kept(PurePath(name))]
            found += [os.path.relpath(os.path.join(base, name), root) for name in files]
    return sorted(path for path in found if is_source(PurePath(path), folders) and (root / path).is_file())


def _digest(root: Path, paths: Sequence[str]) -> str:
    hasher = hashlib.sha256()
    for path in paths:
        hasher.update(os.fsencode(path) + b"\0" + _file_hash(root / path))
    return hasher.hexdigest()


def _file_hash(path: Path) -> bytes:
    hasher = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
    except OSError as error:
        hasher.update(f"unreadable: {error.strerror}".encode())
    return hasher.digest()


def _names(listing: bytes) -> Iterator[str]:
    return (os.fsdecode(name) for name in listing.split(b"\0")[:-1])


def _git(root: Path, *arguments: str) -> bytes | None:
    """Output of a git command about the repository around ``root``, whatever one the environment names; None: failed.

    A foreign checkout must not run its own configured programs when we only look at it, nor have its index rewritten.
    """
    settings = (
        *("core.fsmonitor=false", "core.hooksPath=/dev/null", "diff.autoRefreshIndex=true"),
        *("core.trustctime=true", "core.checkStat=default"),  # else an edit of equal size and time would be none
    )
    command = ["git", *(word for setting in settings for word in ("-c", setting)), "-C", str(root), *arguments]
    env = {key: value for key, value in os.environ.items() if key not in _ELSEWHERE} | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
