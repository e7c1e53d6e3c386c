"""What a check returns."""

from __future__ import annotations

import dataclasses

from rl_engine.records.errors import told_inside


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check. ``status`` is ``PASS``, ``FAIL`` or ``WARN``; ``hint`` is empty unless it helps."""

    name: str
    status: str
    found: str
    expected: str
    hint: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", told_inside(self.found))
