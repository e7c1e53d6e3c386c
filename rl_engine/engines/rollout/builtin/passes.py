"""The passes of an engine as evidence: what :mod:`log` decided, counted, a line where something changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Literal

from rl_engine.engines.rollout.builtin.log import Pass
from rl_engine.engines.rollout.builtin.memory import Memory, Work
from rl_engine.engines.rollout.builtin.sequence import Sequence
from rl_engine.records.types import PassRecord


@dataclasses.dataclass
class _Line:
    """A record that may go on: as its first pass began, and what later ones change of it."""

    start: PassRecord
    passes: int = 0
    pages_held: int = 0
    finished: tuple[tuple[int, int], ...] = ()

    def record(self) -> PassRecord:
        ends = {"passes": self.passes, "pages_held": self.pages_held, "finished": self.finished}
        return dataclasses.replace(self.start, **ends)  # type: ignore[arg-type]


class PassLog:
    """Records since :meth:`take`; passes in which the same samples take one token each are one record, and cost the
    engine a few comparisons each, however many samples they are."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._passes = self._shared = self._held = 0
        self._next: PassRecord | None = None  # None: the pass goes on with the last line

    def decided(self, work: Work, entry: Pass, waiting: Items[Sequence], memory: Memory, version: int) -> None:
        """The next pass, before it changes its samples; ``waiting`` is the queue that it leaves."""
        goes_on = self._goes_on(work, entry, waiting, memory, version)
        self._next = None if goes_on else self._described(work, entry, waiting, memory, version)
        self._held, self._shared = memory.pages - memory.available(), memory.shared

    def computed(self, finished: Items[Sequence], replayed: bool) -> None:
        """The pass is done; ``replayed`` as a graph, ``finished`` have left with it."""
        execution: Literal["eager", "graph"] = "graph" if replayed else "eager"
        if self._next is not None or self._lines[-1].start.execution != execution:
            start = self._next or dataclasses.replace(
                self._lines[-1].start, first=self._passes, shared=0, discarded=0, admitted=(), preempted=()
            )
            self._lines.append(_Line(dataclasses.replace(start, execution=execution)))
        line = self._lines[-1]
        line.passes, line.pages_held, line.finished = line.passes + 1, self._held, _names(finished)
        self._passes += 1

    def take(self) -> list[PassRecord]:
        """The records since the last call."""
        taken, self._lines = self._lines, []
        return [line.record() for line in taken]

    def _goes_on(self, work: Work, entry: Pass, waiting: Items[Sequence], memory: Memory, version: int) -> bool:
        """Whether the samples are those of the last pass, each with one token to compute then as now: as many, nobody
        new (who would come last), nobody gone."""
        if not self._lines or self._lines[-1].finished:
            return False
        last = self._lines[-1].start
        return (
            last.prefill == 0
            and len(work) == len(entry.actions) == last.samples
            and entry.actions[-1][0] == "compute"
            and memory.shared == self._shared
            and (last.waiting, last.pages, last.weight_version) == (len(waiting), memory.pages, version)
        )

    def _described(self, work: Work, entry: Pass, waiting: Items[Sequence], memory: Memory, version: int) -> PassRecord:
        samples = {sequence.number: sequence for sequence in (*waiting, *(sequence for sequence, _ in work))}
        back = [(number, tokens) for kind, number, tokens, _ in entry.actions if kind in ("preempt", "withdraw")]
        return PassRecord(
            step=min((sequence.job.step for sequence, _ in work), default=0),
            weight_version=version,
            first=self._passes,
            passes=1,
            samples=len(work),
            waiting=len(waiting),
            tokens=sum(count for _, count in work),
            prefill=sum(count for sequence, count in work if sequence.remaining > 1),
            shared=memory.shared - self._shared,
            discarded=sum(tokens for _, tokens in back),
            admitted=_names(samples[number] for kind, number, _, _ in entry.actions if kind == "admit"),
            preempted=_names(samples[number] for number, _ in back),
            finished=(),
            pages=memory.pages,
            pages_held=0,
            execution="eager",
        )


def _names(sequences: Iterable[Sequence]) -> tuple[tuple[int, int], ...]:
    return tuple((s.job.request.prompt, s.job.request.sample) for s in sequences)
