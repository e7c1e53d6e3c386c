"""What of a tree is source: in git and outside it, what runs and users leave beside it, and what must not slip by."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

from rl_engine.records.sources import FOLDERS, SUFFIXES, is_source, lies_in_sources, source_record, uncommitted
from rl_engine.records.types import SourceRecord

REPOSITORY = Path(__file__).resolve().parents[3]
FILES = {
    "pyproject.toml": "",
    "README.md": "read me",
    ".gitignore": (REPOSITORY / ".gitignore").read_text(),
    "rl_engine/__init__.py": "",
    "rl_engine/ops/build/tiles.py": "x = 1\n",
    "rl_engine/ops/csrc/gemm.c": "int x;\n",
    "rl_engine/ops/csrc/rlk.h": "int y;\n",
    "rl_engine/data/bundled/train.jsonl": "{}\n",
    "rl_engine/report/assets/page.css": "b {}\n",
    "configs/demo/cpu.json": "{}\n",
}
EDITED = tuple(name for name in FILES if name.startswith(FOLDERS))
# What a run writes in a checkout, and what users put there without making git ignore it.
OURS = (
    ".rlk-workspace/data/runs/convergence/r/plan.json",
    ".rlk-workspace/models/m/config.json",
    "rl_engine/ops/_build/gemm-table.json",
    "rl_engine/ops/_build/rlk-0.so",
    "rl_engine/__pycache__/__init__.cpython-311.pyc",
    "rl_engine/ops/.cpu.py.swp",
    "configs/.rlk-workspace/data/runs/convergence/r/plan.json",
    ".venv/lib/python3.11/site-packages/six.py",
    "build/lib/rl_engine/__init__.py",
    "rl_kernel.egg-info/PKG-INFO",
)
THEIRS = (
    "ws/data/runs/convergence/r/plan.json",
    "ws/vime/setup.py",
    "models/m/config.json",
    "out/r/environment-0000.json",
    "env/lib/python3.11/site-packages/six.py",
    "wandb/run.py",
    "run.log",
    "report.json",
    "nohup.out",
)


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.email=a@b.c", "-c", "user.name=n", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")


@pytest.fixture(params=["archive", "checkout", "dirty checkout"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small copy of this repository's form, without git, clean, or with uncommitted work."""
    root = tmp_path / "tree"
    for name, text in FILES.items():
        write(root, name, text)
    if request.param != "archive":
        commit(root)
    if request.param == "dirty checkout":
        write(root, "rl_engine/__init__.py", "edited = True\n")
        write(root, "rl_engine/new.py", "fresh = True\n")
    return root


def record(root: Path) -> SourceRecord:
    return source_record("s", root)


def test_what_is_no_source_changes_nothing(tree: Path) -> None:
    before = record(tree)
    for text in ("1", "22"):
        for name in (*OURS, *THEIRS):
            write(tree, name, text)
        assert record(tree) == before
    assert (before.revision is None) == (not (tree / ".git").exists())


@pytest.mark.parametrize("name", EDITED)
def test_an_edit_a_removal_and_a_touch(tree: Path, name: str) -> None:
    before, text = record(tree), (tree / name).read_text()
    write(tree, name, text + "\n")
    assert record(tree) != before
    write(tree, name, text)
    os.utime(tree / name, (1, 1))
    assert record(tree) == before  # the control: equal bytes are equal sources
    (tree / name).unlink()
    assert record(tree) != before


@pytest.mark.parametrize("name", ["rl_engine/ops/fresh.py", "rl_engine/ops/csrc/a.c", "configs/b/c.json", "torch.py"])
def test_a_new_source_file(tree: Path, name: str) -> None:
    seen = [record(tree)]
    for text in ("1\n", "2\n"):
        write(tree, name, text)
        seen.append(record(tree))
    assert len({state.diff_hash for state in seen}) == 3
    (tree / name).rename((tree / name).with_name("other" + Path(name).suffix))
    assert record(tree) not in seen


def test_the_words_of_a_checkout(tmp_path: Path) -> None:
    for name, text in FILES.items():
        write(tmp_path, name, text)
    commit(tmp_path)
    clean = record(tmp_path)
    assert clean.revision and not clean.dirty and clean.diff_hash is None and uncommitted(tmp_path) == []
    write(tmp_path, "README.md", "a tracked file counts wherever it lies")
    write(tmp_path, "rl_engine/new.py", "")
    write(tmp_path, "benchmarks/new.py", "")
    dirty = record(tmp_path)
    assert dirty.dirty and dirty.revision == clean.revision and dirty.diff_hash
    assert uncommitted(tmp_path) == ["README.md", "rl_engine/new.py"]
    assert uncommitted(tmp_path, (*FOLDERS, "benchmarks")) == ["README.md", "benchmarks/new.py", "rl_engine/new.py"]


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_an_edit_that_git_was_told_not_to_see(tmp_path: Path, flag: str) -> None:
    for name, text in FILES.items():
        write(tmp_path, name, text)
    commit(tmp_path)
    git(tmp_path, "update-index", flag, "rl_engine/__init__.py")
    seen = [record(tmp_path)]
    write(tmp_path, "rl_engine/__init__.py", "edited = True\n")
    seen.append(record(tmp_path))
    assert all(state.dirty for state in seen) and seen[0] != seen[1]
    assert uncommitted(tmp_path) == ["rl_engine/__init__.py"]


def test_a_sparse_checkout_is_clean(tmp_path: Path) -> None:
    for name, text in FILES.items():
        write(tmp_path, name, text)
    commit(tmp_path)
    git(tmp_path, "update-index", "--skip-worktree", "README.md")
    (tmp_path / "README.md").unlink()
    assert not record(tmp_path).dirty


def test_a_repository_among_the_sources(tmp_path: Path) -> None:
    for name, text in FILES.items():
        write(tmp_path, name, text)
    commit(tmp_path)
    for name in ("rl_engine/own/a.py", "rl_engine/own/notes.txt", "rl_engine/own/.hidden/a.py", "runs/own/a.py"):
        write(tmp_path, name, "1\n")
    for folder in ("rl_engine/own", "runs/own"):
        git(tmp_path / folder, "init", "-q")
    assert uncommitted(tmp_path) == ["rl_engine/own/a.py"]
    before = record(tmp_path)
    write(tmp_path, "rl_engine/own/a.py", "2\n")
    assert record(tmp_path) != before and before.dirty


def test_an_edit_of_equal_size_and_time(tmp_path: Path) -> None:
    for name, text in FILES.items():
        write(tmp_path, name, text)
    write(tmp_path, "rl_engine/ops/old.py", "x = 1\n")
    os.utime(tmp_path / "rl_engine/ops/old.py", (1, 1))
    commit(tmp_path)
    git(tmp_path, "config", "core.checkStat", "minimal")
    git(tmp_path, "config", "core.trustctime", "false")
    time.sleep(1.1)  # a git may know no parts of a second
    write(tmp_path, "rl_engine/ops/old.py", "x = 2\n")
    os.utime(tmp_path / "rl_engine/ops/old.py", (1, 1))
    assert uncommitted(tmp_path) == ["rl_engine/ops/old.py"]


@pytest.mark.parametrize("ignored", [True, False])
def test_a_foreign_repository_around_an_archive_is_not_its_revision(tmp_path: Path, ignored: bool) -> None:
    write(tmp_path, "theirs.py", "")
    write(tmp_path, ".gitignore", "rl-kernel/\n" if ignored else "")
    commit(tmp_path)
    root = tmp_path / "rl-kernel"
    for name, text in FILES.items():
        write(root, name, text)
    first = record(root)
    assert first.revision is None and uncommitted(root) is None
    write(root, "rl_engine/__init__.py", "edited = True\n")
    assert record(root) != first
    # The control: with the tree tracked, theirs is its revision, and their own files are not its changes.
    (root / ".gitignore").unlink()
    git(tmp_path, "add", "-f", "rl-kernel")
    git(tmp_path, "commit", "-q", "-m", "vendored")
    write(tmp_path, "theirs.py", "edited = True\n")
    assert record(root).revision and not record(root).dirty


def test_an_installed_package_lies_among_foreign_ones(tmp_path: Path) -> None:
    for name in ("rl_engine/a.py", "six.py", "configs/a.json", "torch/__init__.py"):
        write(tmp_path, name, "1")
    before = record(tmp_path)
    for name in ("six.py", "configs/a.json", "torch/__init__.py"):
        write(tmp_path, name, "2")
    assert record(tmp_path) == before and before.revision is None
    write(tmp_path, "rl_engine/a.py", "2")
    assert record(tmp_path) != before


def test_the_environment_names_no_other_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        write(root, "rl_engine/a.py", str(root))
        commit(root)
    wanted = record(one)
    monkeypatch.setenv("GIT_DIR", str(two / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(two))
    assert record(one) == wanted and wanted.revision


def test_a_git_that_fails_midway_is_no_clean_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_engine.records import sources

    write(tmp_path, "rl_engine/a.py", "")
    commit(tmp_path)
    asked: Callable[..., bytes | None] = sources._git
    monkeypatch.setattr(sources, "_git", lambda root, verb, *rest: None if verb == "diff" else asked(root, verb, *rest))
    found = record(tmp_path)
    assert found.revision is None and found.diff_hash


def test_every_kind_of_file_of_the_package_is_source() -> None:
    """Else a change of one would go unseen outside git."""
    for folder in FOLDERS:
        for path in (REPOSITORY / folder).rglob("*"):
            name = path.relative_to(REPOSITORY)
            words = path.name in ("README.md", "LICENSE", "py.typed")
            if path.is_file() and not words and not {"__pycache__", "_build"} & {*name.parts}:
                assert is_source(name) or name.name.startswith("."), f"{name}: add its kind to {SUFFIXES}"


def test_this_tree() -> None:
    assert is_source(PurePath("rl_engine/records/sources.py")) and not is_source(PurePath("docs/a.py"))
    assert dataclasses.asdict(source_record("rl_kernel", REPOSITORY))["diff_hash"] or not uncommitted(REPOSITORY)


def test_folders_among_the_sources(tmp_path: Path) -> None:
    (tmp_path / "rl_engine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "rl_engine")
    for name in ("rl_engine", "rl_engine/ws", "configs/demo/out", "link/ws"):
        assert lies_in_sources(tmp_path / name, tmp_path), name
    for name in (".", "..", "ws", "../rl_engine", "rl_engine/.rlk-workspace", "benchmarks/out"):
        assert not lies_in_sources(tmp_path / name, tmp_path), name
