"""What a check returns."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check. ``status`` is ``PASS``, ``FAIL`` or ``WARN``; ``hint`` is empty unless it helps."""

    name: str
    status: str
    found: str
    expected: str
    hint: str
