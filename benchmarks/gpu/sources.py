"""The code behind a family's figures and proofs: what it imports, at once or inside a function, and what it names.

Everything reachable from the family's module counts, so that no list has to be kept; ``ENDS`` are not followed. It is
read from the text: nothing of Triton or CUDA is imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu import ROOT

# Modules whose change moves no figure and no proof -> why.
ENDS = {
    "benchmarks.gpu": "what a result is made of, and how it is judged and written",
    "benchmarks.gpu.model": "sizes alone, which stand in every figure's name",
    "rl_engine.models.config": "reads those sizes",
    "rl_engine.ops": "names its modules",
    "rl_engine.ops.library": "the CPU's kernels; on a GPU the folder where a proof is kept",
    "rl_engine.qualify.gpu.stress": "repeats what proofs compare; no family runs it",
    "rl_engine.ops.operators": "hands providers out by name: those that are named are followed",
    "rl_engine.numerics.providers": "the table of those names",
}
PACKAGES = ("rl_engine", "benchmarks")


def sources(family: Path) -> list[Path]:
    """The files, sorted, ``family`` among them."""
    found, waiting = {family}, [family]
    while waiting:
        file = waiting.pop()
        tree = ast.parse(file.read_text())
        for module in (*_imports(tree), *_providers(tree), *(_names(tree) if file == family else ())):
            path = None if module in ENDS else _file(module)
            if path is not None and path not in found:
                found.add(path)
                waiting.append(path)
    return sorted(found)


def digest(files: list[Path]) -> str:
    """SHA-256 over files and where they lie in the checkout."""
    total = hashlib.sha256()
    for file in files:
        name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else Path(file.name)
        total.update(str(name).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def _file(module: str) -> Path | None:
    """Where a module of this repository lies; None for any other name."""
    if module.partition(".")[0] not in PACKAGES:
        return None
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _names(tree: ast.Module) -> Iterator[str]:
    """Strings; a family names the provers that it has run in other processes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _providers(tree: ast.Module) -> Iterator[str]:
    """Modules of ``provider("operator", name)``: the named one, or every one whose name stands in the file."""
    strings = set(_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "provider":
            operator, name = node.args
            assert isinstance(operator, ast.Constant), f"line {node.lineno}: which operator is not in the text"
            wanted = {name.value} if isinstance(name, ast.Constant) else strings
            known = _registry()[str(operator.value)]
            yield from (f"rl_engine.ops.{module}" for key, (module, _) in known.items() if key in wanted)


@functools.cache
def _registry() -> dict[str, dict[str, tuple[str, str]]]:
    """The table of providers of ``rl_engine/numerics/providers.py``."""
    path = _file("rl_engine.numerics.providers")
    assert path is not None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "REGISTRY":
            assert node.value is not None
            found: dict[str, dict[str, tuple[str, str]]] = ast.literal_eval(node.value)
            return {**found, "qk_norm": found["rms_norm"]}
    raise AssertionError("no table of providers")
