"""Imports between the rooms of ``rl_engine`` go the ways that docs/concepts/architecture.md draws, and no other."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rl_engine"

# Room -> rooms that it may import; ``numerics`` and ``records`` stand at the bottom.
ARROWS: dict[str, frozenset[str]] = {
    room: frozenset(targets.split())
    for room, targets in {
        "numerics": "records",
        "records": "numerics",
        "families": "",
        "config": "families numerics records",
        "rewards": "numerics records",
        "data": "numerics records",
        "ops": "numerics",
        "parallel": "numerics",
        "models": "families ops parallel numerics",
        "qualify": "ops models numerics records",
        "engines": "models parallel ops numerics records config",
        "checks": "records config numerics",
        "diagnose": "records config numerics checks",
        "report": "records config numerics checks diagnose",
        "prepare": "config data records",
        "orchestrators": "engines rewards data records config checks qualify numerics",
        "integrations": "entrypoints config",
    }.items()
}
EVERYTHING = frozenset(ARROWS) | {"entrypoints"}
ARROWS["entrypoints"] = EVERYTHING

# Third-party packages with a home: package -> folders that may import it at all.
HOMES = {
    "ray": ("orchestrators",),
    "vllm": ("engines/rollout/vllm",),
    "megatron": ("engines/train/megatron",),
}
LAZY = ("transformers",)  # costs seconds to import: only inside functions
WITHOUT_TORCH = (
    "numerics",
    "records",
    "families",
    "config",
    "rewards",
    "data",
    "checks",
    "diagnose",
    "report",
    "entrypoints",
)


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module; ``lazy`` where it stands inside a function, so that importing the file does not run it."""

    file: Path
    line: int
    module: str
    lazy: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def imports(path: Path, package: Path) -> Iterator[Import]:
    """Every import statement of a file, with relative ones resolved and type-only ones left out."""
    folder = path.relative_to(package.parent).parent.parts

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            if module == package.name:  # `from rl_engine import ops` names a room
                for alias in node.names:
                    yield Import(path, node.lineno, f"{module}.{alias.name}", lazy)
            else:
                yield Import(path, node.lineno, module, lazy)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text(), str(path)), False)


def faults(package: Path) -> list[str]:
    """One line for every import that the rules do not allow."""
    found = []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        room = inside.parts[0] if len(inside.parts) > 1 else ""
        for item in imports(path, package):
            wrong = _fault(item, room, inside.as_posix(), package.name)
            if wrong:
                found.append(f"{inside}:{item.line}: {wrong}")
    return found


def _fault(item: Import, room: str, inside: str, package: str) -> str | None:
    if item.top == package:
        target = item.module.split(".")[1] if "." in item.module else ""
        if target in EVERYTHING and target != room and target not in ARROWS.get(room, frozenset()):
            return f"room {room or package} imports {item.module}"
        if room == "entrypoints" and not item.lazy:
            return f"{item.module} at import time, expected the standard library only"
        return None
    homes = HOMES.get(item.top)
    if homes and not inside.startswith(tuple(home + "/" for home in homes)):
        return f"{item.top} outside {' and '.join(homes)}"
    if item.top in LAZY and not item.lazy:
        return f"{item.top} at import time, expected inside a function"
    if room in ("entrypoints", "") and not item.lazy and item.top not in sys.stdlib_module_names:
        return f"{item.top} at import time, expected the standard library only"
    if room in WITHOUT_TORCH and item.top == "torch" and not item.lazy:
        return "torch at import time, expected inside a function"
    return None


def test_every_import_follows_an_arrow() -> None:
    assert faults(PACKAGE) == []


def test_every_room_has_a_row() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= EVERYTHING, f"no arrows are written for {sorted(rooms - EVERYTHING)}"


def test_the_page_draws_the_same_arrows() -> None:
    page = (ROOT / "docs/concepts/architecture.md").read_text()
    drawn: dict[str, set[str]] = {}
    for rooms, targets in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]*) \|", page, re.MULTILINE):
        for room in re.findall(r"`(\w+)`", rooms):
            drawn[room] = set(EVERYTHING) if targets.startswith("every room") else set(re.findall(r"`(\w+)`", targets))
    assert drawn == {room: set(targets) for room, targets in ARROWS.items()}


def test_wrong_imports_are_caught(tmp_path: Path) -> None:
    package = tmp_path / "rl_engine"
    bad = {
        "ops/a.py": "def f():\n    from rl_engine.models import decoder\n",
        "ops/b.py": "from rl_engine import engines\n",
        "ops/c.py": "from ..config import plan\n",
        "checks/d.py": "import torch\n",
        "checks/e.py": "def f():\n    import ray\n",
        "engines/f.py": "from transformers import AutoModel\n",
        "entrypoints/g.py": "from rl_engine.config import plan\n",
        "entrypoints/h.py": "import numpy\n",
        "engines/rollout/i.py": "import vllm\n",
    }
    good = {
        "checks/j.py": "def f():\n    import torch\n",
        "orchestrators/k.py": "import ray\nfrom rl_engine.checks import validate\n",
        "ops/l.py": "from . import a\nfrom rl_engine.numerics import bits\n",
        "entrypoints/m.py": "def f():\n    from rl_engine.orchestrators import local\n",
    }
    for name, text in {**bad, **good}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = faults(package)
    assert {line.partition(":")[0] for line in found} == set(bad), found


def test_a_broken_machine_can_be_judged_without_torch() -> None:
    """What the syntax cannot show: nothing behind these modules loads torch or Ray either."""
    rooms = (
        "records.reader",
        "config.resolve",
        "checks.validate",
        "checks.doctor",
        "diagnose.cli",
        "diagnose.locate",
        "report.cli",
        "report.page",
        "entrypoints.repro",
    )
    lines = [f"import rl_engine.{name}" for name in rooms]
    lines.append("import sys; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
