"""Collection of :class:`EnvironmentRecord`: what a process runs on, with secrets removed."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Literal

from rl_engine.records.redact import redact_variables
from rl_engine.records.types import EnvironmentRecord, SourceRecord, ThreadSettings

_DISTRIBUTIONS: tuple[str, ...] = (
    "torch",
    "numpy",
    "ray",
    "transformers",
    "safetensors",
    "tokenizers",
    "triton",
    "vllm",
)
_DISTRIBUTIONS += ("megatron-core", "transformer-engine", "math-verify", "rl-kernel")
_GIT_SECONDS = 30


def utc_now() -> str:
    """The current time, UTC, ISO 8601 with microseconds and ``Z``."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def installed_versions() -> dict[str, str]:
    """Versions of the distributions that can change numbers, of those installed; nothing is imported."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_record(name: str, root: Path) -> SourceRecord:
    """State of a source tree: git revision, whether it is dirty, and a SHA-256 over its uncommitted changes.

    Untracked files that are not ignored count as changes by name and content. Outside git (or without it) the
    revision is None and ``diff_hash`` covers every ``.py``, ``.c`` and ``.json`` file below ``root``.
    """
    revision = _git(root, "rev-parse", "HEAD")
    if revision is None:
        return SourceRecord(name=name, revision=None, dirty=False, diff_hash=_tree_hash(root))
    difference = _git(root, "diff", "--binary", "HEAD") or b""
    untracked = (_git(root, "ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0")[:-1]
    if not difference and not untracked:
        return SourceRecord(name=name, revision=revision.decode().strip(), dirty=False, diff_hash=None)
    hasher = hashlib.sha256(difference)
    for path in sorted(untracked):
        hasher.update(b"\0" + path + b"\0" + _file_hash(root / os.fsdecode(path)))
    return SourceRecord(name=name, revision=revision.decode().strip(), dirty=True, diff_hash=hasher.hexdigest())


def collect_environment(
    *,
    phase: Literal["start", "end"],
    role: Literal["driver", "train", "rollout"],
    engine: str,
    rank: int,
    device: str,
    contract_id: str,
    contract_digest: str,
    qualification_digest: str | None,
    threads: ThreadSettings | None,
    sources: tuple[SourceRecord, ...] = (),
    driver: str | None = None,
) -> EnvironmentRecord:
    """The record of the calling process; only what it cannot know itself is passed in."""
    return EnvironmentRecord(
        time=utc_now(),
        phase=phase,
        role=role,
        engine=engine,
        rank=rank,
        host=platform.node(),
        device=device,
        driver=driver,
        python=sys.version.split()[0],
        platform=platform.platform(),
        versions=installed_versions(),
        threads=threads,
        contract_id=contract_id,
        contract_digest=contract_digest,
        qualification_digest=qualification_digest,
        sources=sources,
        variables=redact_variables(),
    )


def _git(root: Path, *arguments: str) -> bytes | None:
    command = ["git", "-C", str(root), *arguments]
    # A foreign checkout must not run its own configured programs when we only look at it.
    command[1:1] = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _file_hash(path: Path) -> bytes:
    hasher = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
    except OSError as error:
        hasher.update(f"unreadable: {error.strerror}".encode())
    return hasher.digest()


def _tree_hash(root: Path) -> str:
    hasher = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".c", ".h", ".json") and path.is_file():
            hasher.update(os.fsencode(path.relative_to(root)) + b"\0" + _file_hash(path))
    return hasher.hexdigest()
