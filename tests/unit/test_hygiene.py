"""What no file of the repository may hold: unstable sums, unsafe loading, leftovers, names of one machine."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 600
SKIPPED = {"__pycache__", "_build", "build", "dist", "node_modules"}
VISIBLE = {".ci", ".gitignore"}
BINARY = {".so", ".safetensors", ".npy", ".parquet", ".png", ".gz"}
CODE = ("rl_engine", "benchmarks", "tests")

TREE_SUM = "rl_engine/ops/triton_functions.py"  # the one file that may call tl.sum: it writes the contract's tree
MAKES_A_PICKLE = "tests/unit/checks/test_checks_security.py"  # proves that none is ever opened
REGISTRIES = "|".join(
    ("py" + r"pi\.org", "python" + r"hosted\.org", "download\\.py" + r"torch\.org", "artifact" + "ory")
)
MACHINE_PATHS = r"(?<![\w.-])/(?:work/\w|root/\.|home/\w{2,}/|tmp/\w)"
LEFTOVERS = r"\b(?:TO" + "DO|FIX" + "ME|XX" + r"X)\b|NotImplemented" + "Error"


def files() -> Iterator[Path]:
    """Every text file of the checkout that is ours: no hidden folder, no build product, no run."""
    for folder, names, here in os.walk(ROOT):
        names[:] = sorted(
            n for n in names if n not in SKIPPED and not n.endswith(".egg-info") and (n[0] != "." or n in VISIBLE)
        )
        for name in sorted(here):
            path = Path(folder, name)
            if (name[0] != "." or name in VISIBLE) and path.suffix not in BINARY:
                yield path


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in files():
        if path.suffix == ".py" and name(path).startswith(CODE):
            yield name(path), ast.parse(path.read_text(), str(path))


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))


def _keyword(call: ast.Call, key: str) -> object:
    """The constant given for a keyword, or None."""
    values = [word.value.value for word in call.keywords if word.arg == key and isinstance(word.value, ast.Constant)]
    return values[0] if values else None


def banned(file: str, tree: ast.Module) -> Iterator[str]:
    """One line for every banned call or import of a file."""
    for node in ast.walk(tree):
        line = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            if file != MAKES_A_PICKLE and {"pickle", "cloudpickle", "dill", "marshal"} & set(modules):
                yield f"{line}: pickle"
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func)
        if called == "tl.atomic_add":
            yield f"{line}: tl.atomic_add adds in any order"
        if called == "tl.sum" and file != TREE_SUM:
            yield f"{line}: tl.sum outside {TREE_SUM}: its order changes with warps and versions"
        if called.endswith((".index_put_", ".index_put")) and (_keyword(node, "accumulate") or len(node.args) > 2):
            yield f"{line}: index_put with accumulate is not repeatable"
        if called.endswith((".index_add_", ".scatter_add_")) and file.startswith("rl_engine/ops"):
            yield f"{line}: {called.rpartition('.')[2]} names no order"
        if called == "torch.load" and _keyword(node, "weights_only") is not True:
            yield f"{line}: torch.load without weights_only=True"
        if _keyword(node, "shell") is True or called in ("os.system", "os.popen"):
            yield f"{line}: a shell"
        if called.rpartition(".")[2] in ("NotImplemented" + "Error",):
            yield f"{line}: unfinished"


def test_no_banned_call() -> None:
    assert [fault for file, tree in sources() for fault in banned(file, tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "tl.atomic_add(p, x)",
        "y = tl.sum(x, 0)",
        "t.index_put_((i,), v, accumulate=True)",
        "t.index_put_((i,), v, True)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "import pickle",
        "from pickle import loads",
        "subprocess.run('ls', shell=True)",
        "os.system('ls')",
    ],
)
def test_banned_calls_are_caught(code: str) -> None:
    assert len(list(banned("rl_engine/models/x.py", ast.parse(code)))) == 1


def test_files_are_short() -> None:
    long = {
        name(path): lines
        for path in files()
        if path.suffix in (".py", ".sh", ".md", "") and "csrc" not in path.parts and path.name not in ("LICENSE",)
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def _matches(pattern: str, *, skipped: tuple[str, ...] = ()) -> list[str]:
    found = []
    for path in files():
        if path == Path(__file__).resolve() or name(path).startswith(skipped) or path.suffix == ".jsonl":
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{name(path)}:{number}: {line.strip()[:120]}")
    return found


def test_nothing_is_left_for_later() -> None:
    assert _matches(LEFTOVERS) == []


def test_no_machine_and_no_registry_is_named() -> None:
    assert _matches(MACHINE_PATHS) == []
    assert _matches(REGISTRIES) == []
