"""Questions to other programs in child processes: doctor neither hangs nor dies of an answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from rl_engine.checks.finding import Finding
from rl_engine.config.child import run_child


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a child said: ``body`` is its JSON object, or ``error`` says in one line why there is none."""

    body: Mapping[str, object]
    error: str = ""

    def text(self, key: str) -> str:
        """The value of ``key`` as text; empty when it is absent or null."""
        value = self.body.get(key)
        return "" if value is None else str(value)


def ask(
    python: str, code: str, seconds: float, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Answer:
    """Runs ``code`` with ``python``; the last line it prints must be a JSON object."""
    out, error = run_child([python, "-c", code, *arguments], seconds, env)
    if error:
        return Answer({}, error)
    lines = [line for line in out.splitlines() if line.strip()]
    try:
        body = json.loads(lines[-1])
    except (IndexError, ValueError):
        return Answer({}, f"an answer that is not JSON: {out[-100:]!r}")
    return Answer(body) if isinstance(body, dict) else Answer({}, "an answer that is not an object")


def passed(name: str, found: str, expected: str) -> Finding:
    """A check that passed."""
    return Finding(name, "PASS", found, expected, "")


def judged(name: str, good: bool, found: str, expected: str, hint: str, otherwise: str = "FAIL") -> Finding:
    """PASS when ``good``, else ``otherwise`` with the hint."""
    return Finding(name, "PASS", found, expected, "") if good else Finding(name, otherwise, found, expected, hint)


def version_matches(found: str, wanted: str) -> bool:
    """Equal by the parts that ``wanted`` gives; a ``+local`` suffix is ignored: 2.18 accepts 2.18.3+cu12."""
    have, want = found.partition("+")[0].split("."), wanted.partition("+")[0].split(".")
    return have[: len(want)] == want


def version_at_least(found: str, wanted: str) -> bool:
    """Numeric comparison of the leading parts; text after the digits of a part is ignored."""

    def numbers(text: str) -> list[int]:
        parts = []
        for part in text.partition("+")[0].split("."):
            digits = "".join(character for character in part if character.isdigit())
            parts.append(int(digits) if digits else 0)
        return parts

    return numbers(found) >= numbers(wanted)
