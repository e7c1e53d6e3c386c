"""What a git checkout is at: revision, tree, uncommitted changes. Asks git, changes nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rl_engine.config.profile import Repository
from rl_engine.records.errors import UserError

# Set on the commits that carry a profile's patches, so that they are told from a user's own work.
PATCH_AUTHOR = "rlk-prepare"
PATCH_EMAIL = "prepare@rl-kernel.invalid"


class GitFailed(Exception):
    """A git command failed; the message is the last line it printed."""


def git(root: Path, *arguments: str, seconds: float = 600.0, extra: Mapping[str, str] | None = None) -> str:
    """Output of a git command in ``root``: never asks for a password, runs no hook of the repository.

    Raises:
        UserError: git is not installed.
        GitFailed: it failed or took longer than ``seconds``.
    """
    elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY")
    env = {key: value for key, value in os.environ.items() if key not in elsewhere}
    env.update(GIT_TERMINAL_PROMPT="0", LC_ALL="C", **(extra or {}))
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", *arguments]
    try:
        done = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except FileNotFoundError:
        raise UserError("no git", "git on PATH", "install git") from None
    except subprocess.TimeoutExpired:
        raise GitFailed(f"git {arguments[0]} took longer than {seconds:g} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"]
        raise GitFailed(lines[-1].strip())
    return done.stdout.strip()


@dataclasses.dataclass(frozen=True)
class Checkout:
    """State of a folder: ``kind`` is ``missing``, ``empty``, ``other`` (not a repository of its own) or ``git``.

    ``changes`` are uncommitted paths, untracked ones included; ``patches`` is how many of the profile's patches stand
    on the pinned revision, or None when the checkout is at something else.
    """

    kind: str
    head: str = ""
    tree: str = ""
    changes: tuple[str, ...] = ()
    patches: int | None = None


def inspect(root: Path, repository: Repository | None, revision: str | None) -> Checkout:
    """The state of ``root`` against the profile's revision and patches."""
    if not root.exists():
        return Checkout("missing")
    if not root.is_dir():
        return Checkout("other")
    if not any(root.iterdir()):
        return Checkout("empty")
    try:
        top = Path(git(root, "rev-parse", "--show-toplevel", seconds=30))
        if top.resolve() != root.resolve():
            return Checkout("other")
        head, tree = git(root, "rev-parse", "HEAD", "HEAD^{tree}", seconds=30).split()
        listing = git(
            root, "status", "--porcelain", "--untracked-files=normal", "--ignore-submodules=none", seconds=120
        )
    except (GitFailed, ValueError) as error:
        if "safe.directory" in str(error):
            hint = f"git config --global --add safe.directory {root}"
            raise UserError(f"{root}, which another user owns", "a checkout that git trusts", hint) from None
        return Checkout("other")
    changes = tuple(line[3:] if len(line) > 3 else line for line in listing.splitlines())
    return Checkout("git", head, tree, changes, _patches_applied(root, repository, revision, head))


def _patches_applied(root: Path, repository: Repository | None, revision: str | None, head: str) -> int | None:
    """Walks down from HEAD: each of our commits must carry the recorded tree of its patch, and stand on the pin."""
    if revision is None:
        return None
    if head == revision:
        return 0
    if repository is None:
        return None
    for count in range(1, len(repository.patches) + 1):
        try:
            if git(root, "rev-parse", f"HEAD~{count}", seconds=30) != revision:
                continue
            trees = [git(root, "rev-parse", f"HEAD~{count - 1 - level}^{{tree}}", seconds=30) for level in range(count)]
        except GitFailed:
            return None
        recorded = [patch.tree for patch in repository.patches[:count]]
        return count if trees == recorded else None
    return None
