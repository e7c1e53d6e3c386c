"""Brings a source checkout to its pinned revision with the profile's patches, each proven by its git tree."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rl_engine.config.git import PATCH_AUTHOR, PATCH_EMAIL, Checkout, GitFailed, git, inspect
from rl_engine.config.profile import Patch, Repository
from rl_engine.records.errors import UserError

Talk = Callable[[str], None]

# A fixed identity and date: the same patches on the same revision are the same commits everywhere.
_IDENTITY = {
    f"GIT_{role}_{part}": value
    for role in ("AUTHOR", "COMMITTER")
    for part, value in (("NAME", PATCH_AUTHOR), ("EMAIL", PATCH_EMAIL), ("DATE", "2000-01-01T00:00:00Z"))
}


def prepare_source(name: str, repository: Repository, revision: str, root: Path, folder: Path, talk: Talk) -> None:
    """Clones or moves ``root`` to ``revision`` and applies the patches that are not there yet.

    A checkout with uncommitted changes is never touched. A clean one that is at something else is moved.

    Args:
        name: shown in messages.
        repository: URL and patches.
        revision: full commit id.
        root: the checkout.
        folder: folder of the profile, against which patch files are taken.
        talk: receives one line per action.

    Raises:
        UserError: not a repository, uncommitted changes, an unknown revision, or a patch that is wrong.
    """
    state = inspect(root, repository, revision)
    if state.kind == "other":
        raise UserError(
            f"{root}, which is not a git repository of its own", f"a {name} checkout or nothing", "move it away"
        )
    if state.kind in ("missing", "empty"):
        _clone(name, repository, root, talk)
        _move(name, repository, revision, root, talk)
        state = inspect(root, repository, revision)
    elif state.changes:
        shown = ", ".join(state.changes[:3]) + (" ..." if len(state.changes) > 3 else "")
        raise UserError(
            f"{len(state.changes)} uncommitted changes in {root} ({shown})",
            "a clean checkout: prepare never moves a dirty one",
            f"commit or remove them, or name another folder for {name}",
        )
    if state.patches is None:
        _refuse_losing_work(root, state)
        _move(name, repository, revision, root, talk)
        state = inspect(root, repository, revision)
    done = state.patches or 0
    for patch in repository.patches[done:]:
        _apply(name, patch, root, folder, talk)
    talk(f"{name}: {root} at {revision[:12]} with {len(repository.patches)} patches")


def _clone(name: str, repository: Repository, root: Path, talk: Talk) -> None:
    if repository.url is None:
        raise UserError(
            f"no {name} checkout at {root} and no URL in the profile", "one of the two", f"clone {name} there"
        )
    talk(f"{name}: cloning {repository.url}")
    partial = root.with_name(f".{root.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)  # an interrupted clone of ours; git cannot go on with one
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        git(partial.parent, "clone", "--no-checkout", "--", repository.url, partial.name, seconds=3600)
    except GitFailed as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{name} that cannot be cloned ({error})", repository.url, "check the network and the URL"
        ) from None
    if root.exists():
        root.rmdir()  # it was empty
    os.replace(partial, root)


def _refuse_losing_work(root: Path, state: Checkout) -> None:
    """A commit that no branch or tag holds would be hard to find again once the checkout moves."""
    try:
        email = git(root, "log", "-1", "--format=%ce", state.head, seconds=30)
        held = git(root, "for-each-ref", "--count=1", "--contains", state.head, seconds=120)
    except GitFailed:
        return  # a shallow or partial history cannot answer; the commit itself stays in the reflog
    if not held and email != PATCH_EMAIL:
        raise UserError(
            f"{root} at {state.head[:12]}, which no branch or tag holds",
            "a commit that can be found again",
            f"git -C {root} branch keep {state.head[:12]}",
        )


def _move(name: str, repository: Repository, revision: str, root: Path, talk: Talk) -> None:
    if not _has(root, revision):
        _fetch(name, repository, revision, root, talk)
    if not _has(root, revision):
        raise UserError(
            f"no revision {revision[:12]} in {name}", f"a commit of {repository.url or root}", "check the profile's pin"
        )
    try:
        git(root, "checkout", "--detach", revision)
    except GitFailed as error:
        raise UserError(
            f"{name} that cannot be moved ({error})", f"a checkout of {revision[:12]}", f"look at {root}"
        ) from None
    talk(f"{name}: at {revision[:12]}")


def _has(root: Path, revision: str) -> bool:
    try:
        git(root, "cat-file", "-e", f"{revision}^{{commit}}", seconds=60)
    except GitFailed:
        return False
    return True


def _fetch(name: str, repository: Repository, revision: str, root: Path, talk: Talk) -> None:
    if repository.url is None:
        return
    talk(f"{name}: fetching {revision[:12]} from {repository.url}")
    last = ""
    for wanted in (revision, "+refs/heads/*:refs/remotes/rlk-prepare/*"):
        try:
            git(root, "fetch", "--no-tags", "--", repository.url, wanted, seconds=3600)
            return
        except GitFailed as error:
            last = str(error)  # some servers refuse to serve a commit by its id: then every branch is fetched
    raise UserError(
        f"{name} that cannot be fetched ({last})",
        f"{revision[:12]} from {repository.url}",
        "check the network and the pin",
    )


def _apply(name: str, patch: Patch, root: Path, folder: Path, talk: Talk) -> None:
    file = folder / patch.file
    if patch.sha256 is None or patch.tree is None:
        raise UserError(
            f"patch {patch.file} of {name} without a recorded hash and tree",
            "both: a patch that merely applies proves nothing",
            "record sha256 and tree in a copied profile",
        )
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(
            f"patch {file} ({error.strerror})", "a readable patch file", "get the patch bundle, or correct the profile"
        ) from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != patch.sha256:
        raise UserError(
            f"patch {file} with SHA-256 {digest[:16]}",
            f"{patch.sha256[:16]} as the profile records",
            "get the recorded file",
        )
    try:
        git(root, "apply", "--index", "--whitespace=nowarn", str(file.resolve()))
    except GitFailed as error:
        raise UserError(
            f"patch {patch.file} that does not apply to {name} ({error})",
            "the patches of the profile, in its order, on the pinned revision",
            f"look at {root}; nothing was changed",
        ) from None
    tree = git(root, "write-tree")
    if tree != patch.tree:
        git(root, "read-tree", "-u", "--reset", "HEAD")
        raise UserError(
            f"tree {tree[:12]} of {name} after {patch.file}",
            f"{patch.tree[:12]} as the profile records",
            "it applies but gives other sources: check the pinned revision and the order; it was taken back",
        )
    commit = git(
        root, "commit-tree", tree, "-p", "HEAD", "-m", f"rlk prepare: {Path(patch.file).name}", extra=_IDENTITY
    )
    git(root, "checkout", "--detach", commit)
    talk(f"{name}: applied {Path(patch.file).name}, tree {tree[:12]}")
