"""``python -m benchmarks gpu``: proves and times the GPU operators in one call on one device.

The digest of the code behind a family's figures (``sources.py``) is stored with them. A family is one module of this
folder with two names:

- ``prove(device)``: yields :class:`Proof` rows, operators against their anchors and controls that must be caught;
- ``measure(device)``: yields :class:`Row` rows, one per figure of the table of musts.

Both are generators: what they yielded before their time ran out is written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = "rlkernel.gpu.v1"
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

# family -> module; a module that a checkout lacks is an error, nothing is skipped silently.
FAMILIES = {
    "gemm": "benchmarks.gpu.gemm",
    "logp": "benchmarks.gpu.logp",
    "attention": "benchmarks.gpu.attention",
    "rows": "benchmarks.gpu.rows",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured, with its sizes.
        value: the figure; a ratio (times as fast as the baseline), or a share of a limit.
        must, aim: bounds of the figure; None where the table names none.
        baseline: what the figure is relative to, in words.
        at_most: True where smaller is better (memory).
        detail: times in microseconds, choices and sizes behind the figure.
    """

    name: str
    value: float
    must: float | None
    aim: float | None
    baseline: str
    at_most: bool = False
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def verdict(self) -> str:
        """``aim``, ``must`` or ``missed``; ``seen`` where no bound exists."""
        reached = [
            bound is not None and (self.value <= bound if self.at_most else self.value >= bound)
            for bound in (self.aim, self.must)
        ]
        if self.must is None:
            return "seen"
        return "aim" if reached[0] else "must" if reached[1] else "missed"


@dataclasses.dataclass(frozen=True)
class Proof:
    """One comparison of bits. A control must differ, everything else must not."""

    name: str
    elements: int
    differing: int
    control: bool = False

    @property
    def holds(self) -> bool:
        return (self.differing > 0) == self.control


@dataclasses.dataclass
class Result:
    """All rows of one family; of its proofs the JSON keeps the counts, the controls and what failed."""

    family: str
    digest: str
    device: dict[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)
    proofs: list[Proof] = dataclasses.field(default_factory=list)
    ended: str = "complete"

    def json(self) -> str:
        body = {"schema": SCHEMA, **dataclasses.asdict(self)}
        body["rows"] = [{**dataclasses.asdict(row), "verdict": row.verdict()} for row in self.rows]
        body["proofs"] = {
            "held": sum(proof.holds for proof in self.proofs),
            "of": len(self.proofs),
            "outputs": sum(proof.elements for proof in self.proofs),
            "controls": sorted({proof.name for proof in self.proofs if proof.control and proof.holds}),
            "failed": [dataclasses.asdict(proof) for proof in self.proofs if not proof.holds],
        }
        return json.dumps(body, indent=1) + "\n"


def stored(family: str) -> dict[str, Any] | None:
    """The committed result of a family, None before its first."""
    path = RESULTS / f"gpu-{family}.json"
    return json.loads(path.read_text()) if path.is_file() else None
