"""Runs whose workspace lies in the tree that they run from, with and without git: it is no change of the sources."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_engine.records.reader import RunReader
from tests.e2e.harness import Cli, Done
from tests.e2e.kills import small_model

SETTINGS = ("--samples-per-prompt", "4", "--rollout-batch-size", "1", "--max-response-len", "6", "--fold-tokens", "64")
RUN = ("--mode", "consistency", "--data-source", "arithmetic", "--threads", "1", "--run-id", "r", *SETTINGS)


@pytest.fixture
def tree(sources: Path, tmp_path: Path) -> Path:
    """A copy of the sources as an archive gives it, with a model that lies in it as users put one there."""
    root = tmp_path / "tree"
    shutil.copytree(sources, root, ignore=shutil.ignore_patterns(".git"))
    (root / "pyproject.toml").write_text("")
    small_model(root / "models" / "small")
    return root


def run(root: Path, *arguments: str, rollouts: int = 1) -> tuple[Cli, tuple[str, ...]]:
    cli = Cli(root, root, ["--profile", "configs/demo/cpu-smollm2.json", "--model-root", "models/small"])
    return cli, (*RUN, "--rollouts", str(rollouts), *arguments)


def sources_gate(done: Done) -> str:
    """The status of gate ``sources`` in the run's validation; every other gate passes."""
    folder = Path(done.out.strip().splitlines()[-1].removeprefix("run_dir: "))
    found = {
        item["name"]: item["status"] for item in json.loads((folder / "validation-0000.json").read_text())["findings"]
    }
    gate = str(found.pop("sources"))
    assert set(found.values()) == {"PASS"} and len(found) > 20, found
    return gate


def test_an_archive_runs_from_its_own_folder(tree: Path) -> None:
    cli, arguments = run(tree)
    done = cli("run", *arguments)
    assert done.code == 0, done.err
    assert sources_gate(done) == "PASS"
    assert {source.revision for item in RunReader(cli.run_dir("r")).environments() for source in item.sources} == {None}


def has_stepped(cli: Cli) -> bool:
    path = cli.run_dir("r") / "steps.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") > 0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["--workspace=ws", "--data-root=data", "--output-root=runs"])
def test_a_checkout_holds_a_run_that_git_does_not_ignore(tree: Path, place: str) -> None:
    git = ("git", "-C", str(tree), "-c", "user.name=test", "-c", "user.email=test@example.invalid")
    for command in (("init", "-q"), ("add", "rl_engine", "configs", ".gitignore"), ("commit", "-q", "-m", "copy")):
        subprocess.run([*git, *command], check=True, capture_output=True)
    cli, arguments = run(tree, *place.split("="))
    done = cli("run", *arguments)
    assert done.code == 0, done.err
    assert sources_gate(done) == "PASS"
    folder = Path(done.out.strip().splitlines()[-1].removeprefix("run_dir: "))
    assert not any(source.dirty for item in RunReader(folder).environments() for source in item.sources)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_a_source_that_changes_during_a_run_fails_it(tree: Path, change: str) -> None:
    cli, arguments = run(tree, rollouts=60)
    command = cli.start("run", *arguments)
    command.wait_for(lambda: has_stepped(cli))
    if change == "edit":
        with open(tree / "rl_engine" / "ops" / "csrc" / "gemm.c", "a") as file:
            file.write("\n")
    elif change == "add":
        (tree / "rl_engine" / "fresh.py").write_text("")
    else:
        (tree / "configs" / "demo" / "one-gpu.json").unlink()
    done = command.finish()
    assert done.code == 1, done.err
    assert sources_gate(done) == "FAIL"


@pytest.mark.slow
def test_an_archive_resumes(tree: Path) -> None:
    cli, arguments = run(tree, rollouts=30)
    command = cli.start("run", *arguments)
    command.wait_for(lambda: has_stepped(cli))
    command.press_control_c()
    assert command.finish().code == 130
    done = cli("run", "--resume", "r")
    assert done.code == 0, done.err
    assert sources_gate(done) == "PASS"
