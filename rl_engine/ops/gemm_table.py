"""Which proven kernel runs a matrix product on this GPU: one choice per (kind, shape, rows), written by ``qualify``.

Every choice has the same bits, so the table changes speed alone; it still names only candidates that were proven on
this device with these versions and these sources, and a table of another device, driver, version or source is refused.
It also names the models whose other operators were proven beside the products; a proof that failed takes its place.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_engine.ops import cublaslt, device, triton_gemm
from rl_engine.ops.library import cache_folder
from rl_engine.ops.triton_gemm import Tile

NAME = "gemm-table.json"
SCHEMA = "rlkernel.gemm-table.v2"
KINDS = ("forward", "residual", "dx", "logits", "dh", "fold")


PREPARED = 4096  # forms of a call that are kept ready
Call = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], None]


class NotQualified(RuntimeError):
    """No proof that holds here; the message says what is missing and which command makes one."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A Triton tile, or an algorithm of cuBLASLt (hex); ``microseconds`` when it was chosen.

    ``others``: proven algorithms that the library's ranking may prefer at this row count.
    """

    tile: Tile | None
    algorithm: str | None
    microseconds: float = 0.0
    others: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        assert (self.tile is None) != (self.algorithm is None)

    def record(self) -> dict[str, Any]:
        tile = None if self.tile is None else dataclasses.asdict(self.tile)
        return {"tile": tile, "algorithm": self.algorithm, "microseconds": self.microseconds}

    @property
    def provider(self) -> str:
        return "triton" if self.tile is not None else "cublaslt"


@dataclasses.dataclass
class Table:
    """Choices and what they hold for.

    Attributes:
        identity: device, driver, versions and sources.
        entries: "kind columns x depth" -> [(rows, choice)], rows ascending; a choice holds up to its rows, the last one
            beyond.
        proven: the same names -> every algorithm of cuBLASLt (hex) that was proven on the shape; at row counts between
            the measured ones the library's own ranking chooses among them.
        digest: SHA-256 over identity, choices and proven cases of the last proof.
        models: sizes of a model -> digest of the whole proof of its operators.
        failed: what the last proof failed at; nothing runs by such a table.
    """

    identity: dict[str, str]
    entries: dict[str, list[tuple[int, Choice]]]
    digest: str = ""
    proven: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    models: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: str = ""
    prepared: dict[tuple[Any, ...], Call] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def choose(self, kind: str, columns: int, depth: int, rows: int, *, near: bool = False) -> Choice:
        """The choice for a product of ``rows``; with ``near`` that of the nearest shape of the kind.

        Raises:
            NotQualified: the shape was not proven.
        """
        name = key(kind, columns, depth)
        if name not in self.entries and near:
            name = self._nearest(kind, columns, depth) or name
        found = self.entries.get(name)
        if not found:
            raise NotQualified(
                f"{kind} of {columns} x {depth} was not proven on this GPU: run rlk-repro qualify with this model"
            )
        most, choice = next((entry for entry in found if rows <= entry[0]), found[-1])
        if choice.algorithm is None or rows == most:
            return choice
        return dataclasses.replace(choice, others=self._others(name))

    @functools.cached_property
    def _sets(self) -> dict[str, frozenset[bytes]]:
        return {name: frozenset(bytes.fromhex(text) for text in found) for name, found in self.proven.items()}

    def _others(self, name: str) -> frozenset[bytes]:
        return self._sets.get(name, frozenset())

    def _nearest(self, kind: str, columns: int, depth: int) -> str | None:
        """The name of the entry of the kind that has one axis in common and the other nearest."""
        best, distance = None, math.inf
        for name in self.entries:
            other, shape = name.split(" ")
            n, k = (int(word) for word in shape.split("x"))
            if other == kind and (n == columns) != (k == depth):
                gap = abs(math.log(n / columns)) + abs(math.log(k / depth))
                best, distance = (name, gap) if gap < distance else (best, distance)
        return best

    def json(self) -> str:
        entries = {name: [[rows, choice.record()] for rows, choice in found] for name, found in self.entries.items()}
        body = {"schema": SCHEMA, "identity": self.identity, "digest": self.digest, "entries": entries}
        body |= {"proven": self.proven, "models": self.models, "failed": self.failed}
        return json.dumps(body, indent=1, sort_keys=True)

    def joined(self, other: Table) -> Table:
        """This table, and what the other one holds beside it; of another identity it holds nothing."""
        if other.identity != self.identity or other.failed or self.failed:
            return self
        return dataclasses.replace(
            self,
            entries={**other.entries, **self.entries},
            proven={**other.proven, **self.proven},
            models={**other.models, **self.models},
            prepared={},
        )

    @staticmethod
    def parse(text: str) -> Table:
        """
        Raises:
            ValueError, KeyError, TypeError: the text is no table.
        """
        body = json.loads(text)
        if body["schema"] != SCHEMA:
            raise ValueError(f"schema {body['schema']}, expected {SCHEMA}")
        entries = {
            name: [(int(rows), _choice(choice)) for rows, choice in found] for name, found in body["entries"].items()
        }
        proven = {name: [str(text) for text in found] for name, found in body["proven"].items()}
        models = {str(name): str(digest) for name, digest in body["models"].items()}
        return Table(dict(body["identity"]), entries, str(body["digest"]), proven, models, str(body["failed"]))


def _choice(body: dict[str, Any]) -> Choice:
    tile = None if body["tile"] is None else Tile(**body["tile"])
    return Choice(tile, body["algorithm"], float(body["microseconds"]))


def key(kind: str, columns: int, depth: int) -> str:
    assert kind in KINDS, kind
    return f"{kind} {columns}x{depth}"


@functools.cache
def sources() -> str:
    """SHA-256 over the code that a proof is about: every operator's Python files."""
    total, folder = hashlib.sha256(), Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        total.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


@functools.cache
def identity() -> dict[str, str]:
    """What a proof holds for: device, driver, library versions and sources.

    Raises:
        NotQualified: the driver says no version; a proof could not name what it holds for.
    """
    import triton

    try:
        version = device.driver()
    except OSError as error:
        raise NotQualified(f"the driver's version is unknown: {error}") from error

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "driver": version,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cublaslt": str(cublaslt.version()) if torch.version.cuda else "none",
        "sources": sources(),
    }


def path() -> Path:
    return cache_folder() / NAME


def _kept() -> Table | None:
    """The table that lies on this machine's disk, whatever it was made for; None where there is none."""
    try:
        return Table.parse(path().read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return None


@functools.cache
def current() -> Table:
    """The table of this machine, read once.

    Raises:
        NotQualified: there is none, it was made for something else, or the last proof failed.
    """
    table = _kept()
    if table is None:
        raise NotQualified("the GPU's matrix products are not proven here: run rlk-repro qualify")
    changed = [name for name, value in identity().items() if table.identity.get(name) != value]
    if changed:
        raise NotQualified(f"the proof is stale (other {' and '.join(changed)}): run rlk-repro qualify")
    if table.failed:
        raise NotQualified(f"the last proof failed ({table.failed}): no operator runs by it")
    return table


def keep(table: Table) -> None:
    """Writes the table for this machine and puts it in force; shapes and models that were proven before stay.

    A table that says ``failed`` takes everything's place.
    """
    before, target = _kept(), path()
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".tmp")
    fresh.write_text((table if before is None else table.joined(before)).json())
    fresh.replace(target)
    current.cache_clear()


def run(choice: Choice, a: Tensor, b: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """``out = a b^T`` (+ residual) by a choice."""
    if choice.tile is not None:
        triton_gemm.product(a, b, out, choice.tile, residual)
    else:
        assert choice.algorithm is not None
        cublaslt.product(a, b, out, bytes.fromhex(choice.algorithm), residual, proven=choice.others)


def by_table(kind: str, a: Tensor, b: Tensor, out: Tensor, old: Tensor | None = None, *, near: bool = False) -> None:
    """``out = a b^T`` (+ old) by the table of this machine; what a call of this form needs is prepared once.

    Operands that the copy engine cannot read (an odd offset or stride) take a pointer tile, which has the same bits.

    Raises:
        NotQualified: no fresh proof, or none of this shape.
    """
    table = current()
    places = a.data_ptr() | b.data_ptr() | out.data_ptr() | (0 if old is None else old.data_ptr())
    strides = (a.stride(), b.stride(), out.stride(), None if old is None else old.stride())
    form = (kind, a.shape, b.shape, strides, places & 15, near)
    call = table.prepared.get(form)
    if call is None:
        if len(table.prepared) >= PREPARED:
            table.prepared.clear()
        call = table.prepared[form] = _prepare(table, kind, a, b, out, old, near)
    call(a, b, out, old)


def _prepare(table: Table, kind: str, a: Tensor, b: Tensor, out: Tensor, old: Tensor | None, near: bool) -> Call:
    choice = table.choose(kind, b.shape[0], b.shape[1], a.shape[0], near=near)
    if not a.shape[0]:
        return lambda a, b, out, old: None
    if not aligned(a, b, out, old):
        tile = triton_gemm.default_tile(a.shape[0], b.shape[0], tma=False)
        return lambda a, b, out, old: triton_gemm.product(a, b, out, tile, old)
    if choice.tile is not None:
        chosen = choice.tile
        return lambda a, b, out, old: triton_gemm.product(a, b, out, chosen, old)
    return cublaslt.prepare(a, b, out, bytes.fromhex(choice.algorithm or ""), old, proven=choice.others)


def aligned(*operands: Tensor | None) -> bool:
    """Whether every operand can be read by the copy engine; what cannot takes a pointer tile, with the same bits."""
    return all(x is None or triton_gemm.copyable(x) for x in operands)
