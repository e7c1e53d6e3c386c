"""Who computes what in the next pass. First come, first served: the batch always holds the oldest samples.

A pass gives every caught-up sample its one token and spends the rest of the budget on prefill, oldest first, then on
samples from the queue. Where the pool has no page left, the youngest sample goes back to the queue and is computed
again later (its tokens are kept). The oldest sample can always go on, since the pool holds any single sample; nobody
waits for a younger one, so nobody starves.

Decisions follow from the samples, the settings and the drawn tokens alone: ranks that run the same calls decide alike.
"""

from __future__ import annotations

import bisect
import dataclasses

from rl_engine.engines.rollout.builtin.log import Action, Pass, ReplayMismatch
from rl_engine.engines.rollout.builtin.memory import Memory
from rl_engine.engines.rollout.builtin.sequence import RolloutSettings, Sequence


@dataclasses.dataclass(frozen=True)
class Foreseen:
    """One token of every sample of ``batch``, laid out while the pass before, of the same samples, is still computed:
    the next pass where no sample ends, joins or leaves until then.

    Attributes:
        work, actions: as the decision will have them, if nobody is admitted beside.
        touching: samples whose page begins or becomes full, in order.
        opened: pages that they need.
    """

    batch: list[Sequence]
    work: list[tuple[Sequence, int]]
    actions: list[Action]
    touching: list[Sequence]
    opened: int

    def holds(self, work: list[tuple[Sequence, int]]) -> bool:
        """Whether ``work`` is this pass, and nobody was admitted beside."""
        return work is self.work and len(work) == len(self.batch)


class Scheduler:
    """``running`` and ``waiting`` are in order of arrival."""

    def __init__(self, settings: RolloutSettings, memory: Memory) -> None:
        self.settings, self.memory = settings, memory
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._work: list[tuple[Sequence, int]] = []
        self._actions: list[Action] = []
        self._left = 0
        self._preempted = False
        self._decided = 0

    def queue(self, sequence: Sequence) -> None:
        sequence.queued = self._decided
        bisect.insort(self.waiting, sequence, key=lambda s: s.number)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sample out for good."""
        if _at(self.waiting, sequence.number) is sequence:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.memory.leave(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Back to the queue, without its keys."""
        self.remove(sequence)
        self.queue(sequence)

    def find(self, number: int) -> Sequence | None:
        return _at(self.running, number) or _at(self.waiting, number)

    def decide(
        self, begun_only: bool = False, foreseen: Foreseen | None = None
    ) -> tuple[list[tuple[Sequence, int]], Pass]:
        """The next pass, as (sample, tokens) and as its entry in the log; ``begun_only`` leaves samples without a
        response in the queue. ``foreseen`` may be wrong: it is used where it is what would be decided."""
        available = self._begin()
        if foreseen is not None and foreseen.batch == self.running and foreseen.opened <= available:
            self._adopt(foreseen)
        else:
            self._left = self.settings.budget - sum(s.remaining == 1 for s in self.running)
            for sequence in self.running.copy():
                if not self._preempted or sequence in self.running:
                    self._continue(sequence)
        if not self._preempted:
            self._admit(begun_only)
        return self._end(available)

    def foresee(self, batch: list[Sequence]) -> Foreseen | None:
        """The pass behind the one in flight, in which every sample of ``batch`` draws a token; None where others run
        too, or one surely ends."""
        memory = self.memory
        if batch != self.running or any(s.on_last for s in batch):
            return None
        touching = [s for s in batch if memory.touches(s.computed)]
        return Foreseen(
            batch=batch,
            work=[(s, 1) for s in batch],
            actions=[("compute", s.number, s.computed, 1) for s in batch],
            touching=touching,
            opened=sum(s.computed % self.settings.page == 0 for s in touching),
        )

    def _adopt(self, foreseen: Foreseen) -> None:
        """As :meth:`_continue` of every sample."""
        for sequence in foreseen.touching:
            room = self.memory.extend(sequence, 1)
            assert room, "a pass was foreseen without room"
            self.memory.announce(sequence, 1)
        self._work, self._actions = foreseen.work, foreseen.actions
        self._left = self.settings.budget - len(self._work)

    def _begin(self) -> int:
        self._work, self._actions, self._preempted = [], [], False
        return self.memory.available()

    def _end(self, available: int) -> tuple[list[tuple[Sequence, int]], Pass]:
        self.memory.settle()
        self._decided += 1
        return self._work, Pass(tuple(self._actions), available)

    def _continue(self, sequence: Sequence) -> None:
        own = sequence.remaining == 1  # its token is set aside already, and the last known one is never shared
        if own and not self.memory.touches(sequence.computed):
            self._schedule(sequence, 1, "compute")
            return
        if not own:
            if self._left == 0:
                return
            self.memory.match(sequence)
        count = 1 if own else min(sequence.remaining, self.settings.chunk, self._left)
        while not self.memory.extend(sequence, count):
            youngest = self.running[-1]
            self._preempt(youngest, "withdraw" if youngest is sequence else "preempt")
            if youngest is sequence:
                return
        self._left -= 0 if own else count
        self._compute(sequence, count, "compute")

    def _admit(self, begun_only: bool) -> None:
        for sequence in () if self._full else self.waiting.copy():
            if self._full:
                return
            if begun_only and not sequence.responses:
                continue
            if self.memory.missing(sequence) > self.memory.available():
                return
            self._join(sequence)
            count = min(sequence.remaining, self.settings.chunk, self._left)
            room = self.memory.extend(sequence, count)
            assert room, "a sample was admitted without room"
            self._left -= count
            self._compute(sequence, count, "admit")

    @property
    def _full(self) -> bool:
        return self._left == 0 or len(self.running) == self.settings.max_batch

    def _join(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.waited += self._decided - sequence.queued
        bisect.insort(self.running, sequence, key=lambda s: s.number)
        self.memory.join(sequence)
        self.memory.match(sequence)

    def _compute(self, sequence: Sequence, count: int, kind: str) -> None:
        self.memory.announce(sequence, count)
        self._schedule(sequence, count, kind)

    def _schedule(self, sequence: Sequence, count: int, kind: str) -> None:
        self._work.append((sequence, count))
        self._actions.append((kind, sequence.number, sequence.computed, count))

    def _preempt(self, sequence: Sequence, kind: str) -> None:
        self._actions.append((kind, sequence.number, sequence.computed, 0))
        self.withdraw(sequence)
        self._preempted = True
        sequence.preempted += 1

    def follow(self, entry: Pass) -> tuple[list[tuple[Sequence, int]], Pass]:
        """The pass of a log instead of one's own decision.

        Raises:
            ReplayMismatch: it is impossible here: the log is another run's.
        """
        available = self._begin()
        for kind, number, start, count in entry.actions:
            sequence = self.find(number)
            if sequence is None or (sequence in self.waiting) != (kind == "admit"):
                raise ReplayMismatch(f"{kind} of sample {number}, which is not {_place(kind)}")
            if kind == "admit":
                self._join(sequence)
            elif kind != "preempt":
                self.memory.match(sequence)
            if sequence.computed != start or sequence.remaining < count:
                raise ReplayMismatch(f"sample {number} has {sequence.computed} tokens computed, the log says {start}")
            if kind in ("preempt", "withdraw"):
                self._preempt(sequence, kind)
            elif self.memory.extend(sequence, count):
                self._compute(sequence, count, kind)
            else:
                raise ReplayMismatch(f"no room for {count} tokens of sample {number}")
        return self._end(available)


def _at(sequences: list[Sequence], number: int) -> Sequence | None:
    """The sample of this number among ``sequences``, which are in order of arrival."""
    place = bisect.bisect_left(sequences, number, key=lambda s: s.number)
    return sequences[place] if place < len(sequences) and sequences[place].number == number else None


def _place(kind: str) -> str:
    return "in the queue" if kind == "admit" else "in the batch"
