"""Every refusal that the code can print, read from its source, with a sentence on the cause of each group."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rl_engine"
ERRORS = {"UserError": 3, "RecordError": 2, "UnsupportedModel": 3, "WeightMismatch": 3}

# Where a message comes from -> why one sees it. The longest matching prefix counts.
CAUSES: dict[str, tuple[str, str]] = {
    "checks/": ("Checks", "A run directory, or this machine, is not what a check needs to judge it."),
    "config/": ("Options and profiles", "The command line, a variable or a profile asks for something that cannot be."),
    "config/codec": ("Plans", "A plan.json is damaged, or another version wrote it."),
    "config/git": ("Source checkouts", "git could not answer about a pinned source."),
    "config/preflight": ("Before a run", "Something that the run needs is missing, or this version cannot do it."),
    "config/profile": ("Profiles", "The profile's JSON has a wrong key, value or revision."),
    "config/topology": ("Layouts", "The ranks, tensor and context parallel sizes do not fit each other or the model."),
    "data/": ("Prompts and the demo model", "A prompt file has a wrong row, or the demo model's package is missing."),
    "diagnose/": ("Semantic doctor", "The log cannot be read as rollout and train logprobs of the same tokens."),
    "engines/": ("Engines", "The model, its weights or the run's inputs do not suit the built-in engines."),
    "entrypoints/": ("Command line", "The verb or flag does not exist, or the folder that it names."),
    "families/": ("Checkpoints", "The checkpoint asks for what the decoder does not compute, or its files do not fit."),
    "models/": ("Models", "The checkpoint's architecture or files are not what the decoder computes."),
    "ops/": ("Operators", "An operator cannot be computed here: no compiler, or a kernel that does not build."),
    "orchestrators/": ("Running", "The run cannot start, or Ray is not as it must be."),
    "orchestrators/matrix": ("Topology matrix", "The matrix names no layouts, or wrong ones."),
    "prepare/": ("prepare", "A source, a download or its content is not what the profile records."),
    "qualify/": ("qualify", "The provider or the model to prove is not there."),
    "records/": ("Records", "A file of a run directory is missing, damaged, too large or a link; or already exists."),
    "report/": ("report", "There is nothing to show, or the output folder must not be written to."),
    "rewards/": ("Rewards", "The reward that the profile names does not exist, or its checker did not start."),
}


@dataclasses.dataclass(frozen=True)
class Message:
    """One refusal: its place, and its three parts with ``…`` where the code fills something in."""

    file: str
    found: str
    expected: str
    hint: str


def collect() -> list[Message]:
    """Every refusal of the package, by file and line."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        for call in _calls(ast.parse(path.read_text(), str(path))):
            texts = [_text(node) for node in call.args[:3]]
            texts += [""] * (3 - len(texts))
            found.append(Message(name, *texts))
    return list(dict.fromkeys(found))


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called in ERRORS and len(node.args) >= 2:
                yield node


def _text(node: ast.expr) -> str:
    """The constant parts of an expression, ``…`` for the rest."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "…"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body)} / {_text(node.orelse)}"
    return "…"


def cause(file: str) -> tuple[str, str]:
    """(title, sentence) of the group that a file belongs to.

    Raises:
        KeyError: a file that no group covers; add one to ``CAUSES``.
    """
    known = [prefix for prefix in CAUSES if file.startswith(prefix)]
    if not known:
        raise KeyError(file)
    return CAUSES[max(known, key=len)]


def page(note: str) -> str:
    """The page of all messages, grouped by cause."""
    parts = ["# Messages\n", note, _HEAD]
    groups: dict[tuple[str, str], list[Message]] = {}
    for message in collect():
        groups.setdefault(cause(message.file), []).append(message)
    for title, sentence in sorted(groups):
        parts.append(f"## {title}\n\n{sentence}\n")
        lines = ["| Found | Expected | Hint |", "| --- | --- | --- |"]
        for message in groups[title, sentence]:
            lines.append("| " + " | ".join(map(_cell, (message.found, message.expected, message.hint))) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    text = " ".join(text.split())
    for letter in "\\|*_<>[]`":
        text = text.replace(letter, "\\" + letter)
    return text if text.strip("…") else "(from the case)"


_HEAD = """A mistake that you can correct ends with exit code 2 and one line,
`rlk-repro: found …, expected …; hint: …`. Below is every such line that the code can print, read from its source; `…`
stands for what the case fills in. Look for the words after `found`. Longer explanations are in
[Troubleshooting](../guides/troubleshooting.md).
"""
