"""prepare against real git repositories: clone, pin, dirty, wrong revision, patches."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from rl_engine.config.git import inspect
from rl_engine.config.profile import Patch, Repository
from rl_engine.prepare.sources import prepare_source
from rl_engine.records.errors import UserError

IDENTITY = {f"GIT_{role}_{part}": "x" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}


def git(root: Path, *arguments: str) -> str:
    env = {**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": "/dev/null"}
    return subprocess.run(
        ["git", *arguments], cwd=root, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


class Upstream:
    """A bare repository with three commits on main, and two patches on the second commit."""

    def __init__(self, folder: Path) -> None:
        work = folder / "work"
        work.mkdir()
        git(work, "init", "-q", "-b", "main")
        self.commits = []
        for number in range(3):
            (work / "a.txt").write_text("".join(f"line {i}\n" for i in range(10)) + f"version {number}\n")
            git(work, "add", ".")
            git(work, "commit", "-q", "-m", str(number))
            self.commits.append(git(work, "rev-parse", "HEAD"))
        self.bare = folder / "bare.git"
        git(folder, "clone", "-q", "--bare", str(work), str(self.bare))
        git(work, "checkout", "-q", "--detach", self.commits[1])
        self.patches = []
        for number, (old, new) in enumerate((("line 0\n", "LINE 0\n"), ("LINE 0\n", "LINE ZERO\n"))):
            text = (work / "a.txt").read_text()
            (work / "a.txt").write_text(text.replace(old, new))
            file = folder / f"{number}.patch"
            file.write_text(git(work, "diff") + "\n")
            git(work, "commit", "-q", "-am", "patch")
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            self.patches.append(Patch(file=file.name, sha256=digest, tree=git(work, "rev-parse", "HEAD^{tree}")))

    def repository(self, patches: list[Patch] | None = None) -> Repository:
        return Repository(url=str(self.bare), patches=patches or [])


@pytest.fixture
def upstream(tmp_path):
    return Upstream(tmp_path)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkout"


def run(upstream, root, commit: str, patches=None, said: list[str] | None = None) -> None:
    prepare_source(
        "vime", upstream.repository(patches), commit, root, root.parent, (said if said is not None else []).append
    )


def test_clone_pin_and_repeat(upstream, root):
    said: list[str] = []
    run(upstream, root, upstream.commits[0], said=said)
    assert git(root, "rev-parse", "HEAD") == upstream.commits[0]
    assert any("cloning" in line for line in said)
    again: list[str] = []
    run(upstream, root, upstream.commits[0], said=again)
    assert len(again) == 1  # nothing left to do
    run(upstream, root, upstream.commits[2])
    assert git(root, "rev-parse", "HEAD") == upstream.commits[2]


def test_an_empty_folder_is_filled(upstream, root):
    root.mkdir()
    run(upstream, root, upstream.commits[1])
    assert (root / "a.txt").exists()


def test_a_commit_that_is_not_here_yet_is_fetched(upstream, root, tmp_path):
    run(upstream, root, upstream.commits[0])
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(upstream.bare), str(other))
    (other / "a.txt").write_text("new\n")
    git(other, "commit", "-q", "-am", "new")
    git(other, "push", "-q", "origin", "HEAD:refs/heads/side")
    new = git(other, "rev-parse", "HEAD")
    run(upstream, root, new)
    assert git(root, "rev-parse", "HEAD") == new


@pytest.mark.parametrize("change", ["edit", "new", "staged"])
def test_a_dirty_checkout_is_never_moved(upstream, root, change):
    run(upstream, root, upstream.commits[0])
    (root / ("b.txt" if change == "new" else "a.txt")).write_text("mine")
    if change == "staged":
        git(root, "add", ".")
    with pytest.raises(UserError, match="uncommitted changes"):
        run(upstream, root, upstream.commits[2])
    assert git(root, "rev-parse", "HEAD") == upstream.commits[0]
    assert (root / ("b.txt" if change == "new" else "a.txt")).read_text() == "mine"


def test_a_commit_that_nothing_holds_is_not_left(upstream, root):
    run(upstream, root, upstream.commits[0])
    (root / "a.txt").write_text("work\n")
    git(root, "commit", "-q", "-am", "my work")
    with pytest.raises(UserError, match="branch keep"):
        run(upstream, root, upstream.commits[2])
    git(root, "branch", "keep")
    run(upstream, root, upstream.commits[2])


def test_wrong_revision_missing_url_and_not_a_repository(upstream, root, tmp_path):
    with pytest.raises(UserError, match="no revision"):
        run(upstream, root, "0" * 40)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "file").write_text("x")
    with pytest.raises(UserError, match="not a git repository"):
        run(upstream, plain, upstream.commits[0])
    with pytest.raises(UserError, match="cannot be cloned"):
        prepare_source("vime", Repository(url=str(tmp_path / "none.git")), "0" * 40, tmp_path / "x", tmp_path, print)
    assert not (tmp_path / "x").exists()
    with pytest.raises(UserError, match="no URL"):
        prepare_source("vime", Repository(), "0" * 40, tmp_path / "x", tmp_path, print)


def test_a_folder_inside_another_repository_is_not_a_checkout(upstream, root):
    run(upstream, root, upstream.commits[0])
    inner = root / "inner"
    inner.mkdir()
    (inner / "file").write_text("x")
    with pytest.raises(UserError, match="of its own"):
        run(upstream, inner, upstream.commits[0])


def test_patches_in_order_reach_the_recorded_trees(upstream, root):
    run(upstream, root, upstream.commits[1], upstream.patches)
    assert git(root, "rev-parse", "HEAD^{tree}") == upstream.patches[1].tree
    assert git(root, "rev-parse", "HEAD~2") == upstream.commits[1]
    assert git(root, "status", "--porcelain") == ""
    head = git(root, "rev-parse", "HEAD")
    said: list[str] = []
    run(upstream, root, upstream.commits[1], upstream.patches, said)
    assert (len(said), git(root, "rev-parse", "HEAD")) == (1, head)  # already applied
    state = inspect(root, upstream.repository(upstream.patches), upstream.commits[1])
    assert (state.patches, state.changes) == (2, ())


def test_the_second_patch_goes_on_the_first(upstream, root):
    run(upstream, root, upstream.commits[1], upstream.patches[:1])
    run(upstream, root, upstream.commits[1], upstream.patches)
    assert git(root, "rev-parse", "HEAD^{tree}") == upstream.patches[1].tree


def test_wrong_order_wrong_tree_wrong_file(upstream, root, tmp_path):
    first, second = upstream.patches
    with pytest.raises(UserError, match="does not apply"):
        run(upstream, root, upstream.commits[1], [second, first])
    assert git(root, "status", "--porcelain") == ""
    other = first.model_copy(update={"tree": "1" * 40})
    with pytest.raises(UserError, match="as the profile records"):
        run(upstream, root, upstream.commits[1], [other])
    assert git(root, "status", "--porcelain") == ""
    # The same patch on another revision applies, and gives other sources: only the tree tells.
    with pytest.raises(UserError, match="as the profile records"):
        run(upstream, root, upstream.commits[2], [first])
    with pytest.raises(UserError, match="without a recorded hash"):
        run(upstream, root, upstream.commits[1], [Patch(file=first.file)])
    (tmp_path / first.file).write_text("changed")
    with pytest.raises(UserError, match="SHA-256"):
        run(upstream, root, upstream.commits[1], [first])
    with pytest.raises(UserError, match="readable patch file"):
        run(upstream, root, upstream.commits[1], [first.model_copy(update={"file": "none.patch"})])
