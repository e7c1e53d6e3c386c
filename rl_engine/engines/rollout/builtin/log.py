"""The scheduler's log: every decision and every call from outside, in order; enough to do the same again."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from rl_engine.records.codec import RecordError, decode


class ReplayMismatch(RuntimeError):
    """The engine cannot do what the log says."""


@dataclasses.dataclass(frozen=True)
class Added:
    number: int


@dataclasses.dataclass(frozen=True)
class Cancelled:
    number: int


@dataclasses.dataclass(frozen=True)
class Loading:
    """New weights arrived; ``in_flight`` says what became of samples that had begun."""

    version: int
    in_flight: str


Action = tuple[str, int, int, int]  # (kind, sample, first token, tokens)


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        actions: in the order in which they were decided. ``admit`` joins the batch and computes, ``compute`` goes on,
            ``preempt`` makes room for an older sample, ``withdraw`` is the youngest making way itself.
        available: pages that nobody owned when the pass was decided.
        finished: samples that ended with it.
    """

    actions: tuple[Action, ...]
    available: int
    finished: tuple[int, ...] = ()


Entry = Added | Cancelled | Loading | Pass
_KINDS: dict[str, type[Added | Cancelled | Loading | Pass]] = {c.__name__: c for c in (Added, Cancelled, Loading, Pass)}


class SchedulerLog:
    """The last ``limit`` entries; ``dropped`` counts older ones, without which the log cannot be replayed."""

    def __init__(self, limit: int) -> None:
        self._entries: deque[Entry] = deque(maxlen=limit)
        self.dropped = 0

    def append(self, entry: Entry) -> None:
        self.dropped += len(self._entries) == self._entries.maxlen
        self._entries.append(entry)

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries)

    def write(self, path: Path) -> None:
        """One JSON line an entry.

        Raises:
            ReplayMismatch: older entries were dropped already.
        """
        if self.dropped:
            raise ReplayMismatch(f"{self.dropped} entries are gone: raise log_entries above {self._entries.maxlen}")
        path.write_text("".join(_line(entry) for entry in self._entries))


def _line(entry: Entry) -> str:
    return json.dumps({"entry": type(entry).__name__, **dataclasses.asdict(entry)}) + "\n"


def read_log(path: Path) -> list[Entry]:
    """The entries of :meth:`SchedulerLog.write`.

    Raises:
        ReplayMismatch: a line is none.
    """
    entries: list[Entry] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            body = json.loads(line)
            kind = _KINDS[body.pop("entry")]
            entries.append(decode(kind, body, f"line {number}"))
        except (ValueError, KeyError, TypeError, AttributeError, RecordError) as error:
            raise ReplayMismatch(f"line {number} of {path.name} is no entry of a scheduler's log") from error
    return entries


def passes(entries: Iterable[Entry]) -> list[Pass]:
    """The forward passes among the entries."""
    return [entry for entry in entries if isinstance(entry, Pass)]
