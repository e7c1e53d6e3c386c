"""What the pages tell a user to type exists, their links lead somewhere, and CI runs the README's test command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_engine.entrypoints.parser import FORWARDED, VERBS, parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\./rlk|(?<![\w.`/-])rlk-repro)(?: .*)?$")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def commands(page: Path) -> Iterator[list[str]]:
    """Every command line of a page's shell blocks, without the program's name."""
    for language, block in FENCE.findall(page.read_text()):
        if language not in ("sh", "bash", "shell", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            found = COMMAND.search(line.removeprefix("$ ").split(" #")[0].strip())
            if found:
                yield shlex.split(found.group())[1:]


CASES = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in commands(page)]


@pytest.mark.parametrize(("page", "line"), CASES, ids=[f"{page}: {' '.join(line)}" for page, line in CASES])
def test_command_parses(page: str, line: list[str]) -> None:
    """Verbs whose own room parses the rest are looked at by name only."""
    if line[:1] == ["test"]:
        assert "--nightly" in (ROOT / "rlk").read_text()
    elif line[0] in FORWARDED:
        _parse_forwarded(line)
    elif "--help" not in line:
        assert parse(line).verb == line[0]


def _parse_forwarded(line: list[str]) -> None:
    if line[0] == "bench":
        from benchmarks.__main__ import parser

        parser().parse_args(line[1:])
    assert line[0] in VERBS


def test_readme_has_the_two_commands() -> None:
    first = list(commands(ROOT / "README.md"))[:2]
    assert first == [["run"], ["test"]]


def test_ci_runs_the_readme_test_command() -> None:
    lines = [line for line in (ROOT / ".ci/run").read_text().splitlines() if "rlk" in line and not line.startswith("#")]
    assert lines == ["./rlk test"]


def test_readme_shows_a_sample_of_the_output() -> None:
    text = (ROOT / "README.md").read_text()
    sample = text.partition("<!-- sample:begin -->")[2].partition("<!-- sample:end -->")[0]
    assert "exactly on-policy" in sample and "the control holds" in sample and "run_dir:" in sample


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        target
        for target, _ in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
