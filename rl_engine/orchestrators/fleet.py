"""The engines of a run as the loop calls them: one trainer, and rollout engines that share the requests.

All processes of an engine get the same calls with the same arguments. An engine's answer is its first process'; one
that dies ends the call with its name, however many others are waiting for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_engine.config.plan import Plan
from rl_engine.engines.protocol import EngineEvidence, Held, Logprobs, Rows
from rl_engine.engines.registry import rollout_class, train_class
from rl_engine.engines.types import Request, Sample, Scored, UpdateResult
from rl_engine.orchestrators.actors import RolloutWorker, TrainWorker, WorkerHost
from rl_engine.orchestrators.causes import RunFailed
from rl_engine.orchestrators.display import Advance, Display
from rl_engine.orchestrators.ray_head import Head
from rl_engine.records.types import Side

POLL_SECONDS = 0.25
DEATH_SECONDS = 5.0  # how long the cause of a lost peer is waited for
Explain = Callable[[Exception], Exception]


@dataclasses.dataclass(frozen=True)
class Member:
    """One worker process; ``rank`` is its number in its engine."""

    actor: Any
    side: Side
    engine: str
    rank: int

    @property
    def name(self) -> str:
        return f"{'trainer' if self.side == 'train' else 'rollout engine'} {self.engine} rank {self.rank}"


@dataclasses.dataclass(frozen=True)
class Exported:
    """Weights of one version: ``parts`` in the object store, every process' one, and the words about them.

    ``rows`` and ``digests`` are of every whole HF tensor.
    """

    version: int
    parts: list[Any]
    rows: Rows
    digests: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Samples, and the seconds of the slowest engine."""

    samples: list[Sample]
    seconds: float


class Calls:
    """Calls of worker processes, and how the user sees them.

    Args:
        explain: our error for one of Ray's.
    """

    def __init__(self, head: Head, display: Display, mode: str, explain: Explain) -> None:
        self.head, self.ray, self.display, self.mode = head, head.ray, display, mode
        self._explain = explain

    def wait(self, references: Sequence[Any], tick: Callable[[], None] | None = None) -> list[Any]:
        """Results of all references, in order.

        Raises:
            Exception: what ``explain`` makes of the first failure; a worker's death goes before what it made others
                fail with.
            HeadFailed: Ray itself died.
        """
        pending, failures, deadline = list(references), [], None
        while pending and (deadline is None or time.monotonic() < deadline):
            self.head.check()
            ready, pending = self.ray.wait(pending, timeout=POLL_SECONDS)
            for reference in ready:
                try:
                    self.ray.get(reference)
                except self.ray.exceptions.RayError as error:
                    failures.append(error)
                    # A lost peer is named by its own death, which may be noticed a moment later.
                    deadline = deadline or time.monotonic() + (DEATH_SECONDS if _lost_peer(error) else 0.0)
            if tick is not None and not ready:
                tick()
        if failures:
            first = next((error for error in failures if not _lost_peer(error)), failures[0])
            raise self._explain(first) from first
        return [self.ray.get(reference) for reference in references]

    def each(self, members: Sequence[Member], method: str, *arguments: Any) -> list[tuple[Member, Any]]:
        """``method`` of every member."""
        results = self.wait([getattr(member.actor, method).remote(*arguments) for member in members])
        return list(zip(members, results, strict=True))

    @contextlib.contextmanager
    def told(self, what: str, members: Sequence[Member]) -> Iterator[Callable[[], None] | None]:
        """Shows ``what`` while it is done. Gives what asks ``members`` for their progress, where that can be seen."""
        with self.display.task(f"{self.mode}: {what}") as advance:
            yield self._ticker(advance, members) if self.display.console.is_terminal else None

    def _ticker(self, advance: Advance, members: Sequence[Member]) -> Callable[[], None]:
        def tick() -> None:
            progress = self.ray.get([member.actor.progress.remote() for member in members])
            advance(sum(done for done, _ in progress), sum(total for _, total in progress))

        return tick


class Trainer:
    """The train engine."""

    def __init__(self, calls: Calls, members: list[Member]) -> None:
        self.calls, self.members = calls, members

    def score(self, samples: list[Sample]) -> Scored:
        """The trainer's own logprobs of the samples, and the reference's where the loss has a KL term."""
        scored: Scored = self._all("scoring", "score", samples)
        return scored

    def step(
        self, samples: list[Sample], advantages: list[float], old: Logprobs, reference: Logprobs | None
    ) -> UpdateResult:
        """One update."""
        result: UpdateResult = self._all("training", "step", samples, advantages, old, reference)
        return result

    def save(self, folder: str) -> None:
        """The trainer's state as files in ``folder``."""
        self._all("saving its state", "save", folder)

    def restore(self, folder: str) -> None:
        """The trainer's state from ``folder``."""
        self._all("restoring the trainer", "restore", folder)

    def export(self, version: int) -> Exported:
        """The present weights, which must be ``version``; only words about them come to this process.

        Raises:
            RunFailed: ranks that hold the same tensor have different bits of it.
        """
        calls = [member.actor.export.options(num_returns=3).remote(version) for member in self.members]
        parts = [part for part, _, _ in calls]
        rows = self.calls.wait([rows for _, rows, _ in calls])
        words = self.calls.wait([digests for _, _, digests in calls])
        whole = {name: (0, max(r[name][1] for r in rows if name in r)) for name in sorted(set().union(*rows))}
        digests: dict[str, str] = {}
        for own_rows, own_words in zip(rows, words, strict=True):
            for name, word in own_words.items():
                if own_rows[name] == whole[name] and digests.setdefault(name, word) != word:
                    raise RunFailed(f"ranks of the trainer hold different bits of {name}")
        missing = [(name, *whole[name]) for name in whole if name not in digests]
        digests.update(zip((name for name, _, _ in missing), self.row_digests(parts, missing), strict=True))
        return Exported(version, parts, whole, digests)

    def keep(self, weights: Exported, path: str) -> None:
        """Exported weights as one file."""
        self.calls.wait([self.members[0].actor.keep.remote(path, *weights.parts)])

    def row_digests(self, parts: list[Any], rows: Sequence[tuple[str, int, int]]) -> list[str]:
        """Digest of rows (name, first, last + 1) of exported weights; the trainer's processes share the work."""
        count = len(self.members)
        shares = [rows[number::count] for number in range(count)]
        calls = [m.actor.digests.remote(share, *parts) for m, share in zip(self.members, shares, strict=True) if share]
        found = self.calls.wait(calls)
        return [found[place % count][place // count] for place in range(len(rows))]

    def _all(self, what: str, method: str, *arguments: Any) -> Any:
        shared = [self.calls.ray.put(argument) for argument in arguments]
        with self.calls.told(what, self.members[:1]) as tick:
            return self.calls.wait([getattr(m.actor, method).remote(*shared) for m in self.members], tick)[0]


class Rollout:
    """The rollout engines."""

    def __init__(self, calls: Calls, engines: list[list[Member]], plan: Plan) -> None:
        self.calls, self.engines, self.plan = calls, engines, plan
        self.members = [member for engine in engines for member in engine]

    def generate(self, requests: list[Request], step: int, stop_tokens: tuple[int, ...]) -> Drawn:
        """The requests' samples; which engine draws one does not change it."""
        parts = [requests[number :: len(self.engines)] for number in range(len(self.engines))]
        calls = [
            [member.actor.generate.remote(part, step, self.plan.sampling, stop_tokens) for member in engine]
            for engine, part in zip(self.engines, parts, strict=True)
            if part
        ]
        with self.calls.told("generating", [engine[0] for engine in self.engines]) as tick:
            self.calls.wait([reference for call in calls for reference in call], tick)
        results = [self.calls.ray.get(call[0]) for call in calls]
        return Drawn([sample for samples, _ in results for sample in samples], max(seconds for _, seconds in results))

    def load(self, weights: Exported) -> None:
        """Every process takes its rows."""
        self.calls.wait([member.actor.load_weights.remote(*weights.parts) for member in self.members])

    def held(self) -> list[tuple[Member, Held]]:
        """What every rank computes with."""
        return [(member, held) for member, all_held in self.calls.each(self.members, "held") for held in all_held]


class Fleet:
    """Starts the plan's engines.

    Attributes:
        trainer, rollout: the two sides.
        members: every worker process.

    Raises:
        UserError: an engine that cannot be loaded.
    """

    def __init__(self, head: Head, plan: Plan, display: Display, explain: Explain) -> None:
        self.head, self.plan = head, plan
        self.calls = Calls(head, display, plan.mode, explain)
        train, rollout = train_class(plan), rollout_class(plan)
        self.capabilities = {"train": train.capabilities, "rollout": rollout.capabilities}
        self.trainer = Trainer(self.calls, self._engine(TrainWorker, "train", "train", 0, train.processes(plan)))
        engines = [
            self._engine(RolloutWorker, "rollout", f"rollout-{number}", number, rollout.processes(plan))
            for number in range(plan.topology.rollout_engines)
        ]
        self.rollout = Rollout(self.calls, engines, plan)
        self.members = [*self.trainer.members, *self.rollout.members]

    def _engine(self, worker: type, side: Side, engine: str, number: int, processes: int) -> list[Member]:
        store = f"file://{self.head.private}/{self.plan.run_id}-{engine}"
        hosts = [WorkerHost(self.plan, side, engine, number, process, processes, store) for process in range(processes)]
        return [Member(self.head.start(worker, host), side, engine, host.process) for host in hosts]

    def declares(self, side: Side, kind: str) -> bool:
        """Whether the side's engine declares that it records ``kind``."""
        return kind in self.capabilities[side].evidence

    def every(self, method: str, *arguments: Any) -> list[tuple[Member, Any]]:
        """``method`` of every worker."""
        return self.calls.each(self.members, method, *arguments)

    def evidence(self, members: Sequence[Member]) -> list[tuple[Member, EngineEvidence]]:
        """What every rank behind ``members`` tells of itself."""
        return [(member, rank) for member, ranks in self.calls.each(members, "evidence") for rank in ranks]

    def holds(self, weights: Exported) -> list[tuple[Member, int, bool]]:
        """(process, rank, whether it holds exactly the exported bits of its rows) of every rollout rank."""
        held = self.rollout.held()
        incomplete = _incomplete(held, weights.rows)
        parts = {
            (name, *rows)
            for _, rank in held
            for name, rows in rank.rows.items()
            if name in weights.rows and rows != weights.rows[name]
        }
        wanted = sorted(parts)
        words = dict(zip(wanted, self.trainer.row_digests(weights.parts, wanted), strict=True))
        words |= {(name, *rows): weights.digests[name] for name, rows in weights.rows.items()}
        return [
            (
                *(member, rank.rank),
                rank.version == weights.version and member.engine not in incomplete and _same(rank, words),
            )
            for member, rank in held
        ]

    def stop(self) -> None:
        """Ends every worker."""
        self.head.stop([member.actor for member in self.members])


def _same(rank: Held, words: Mapping[tuple[str, int, int], str]) -> bool:
    """Whether a rank's rows have the digests that the trainer finds for them."""
    if set(rank.rows) != set(rank.digests):
        return False
    return all(rank.digests[name] == words.get((name, *own)) for name, own in rank.rows.items())


def _incomplete(held: Sequence[tuple[Member, Held]], rows: Rows) -> set[str]:
    """Engines whose ranks do not hold all rows of every tensor between them."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for member, rank in held:
        for name, own in rank.rows.items():
            found.setdefault((member.engine, name), []).append(own)
    engines = {member.engine for member, _ in held}
    return {engine for engine in engines for name in rows if not _covers(found.get((engine, name), []), rows[name])}


def _covers(pieces: list[tuple[int, int]], whole: tuple[int, int]) -> bool:
    place = whole[0]
    for first, last in sorted(pieces):
        if first <= place:
            place = max(place, last)
    return place == whole[1]


def _lost_peer(error: Exception) -> bool:
    return type(getattr(error, "cause", None)).__name__ == "PeerLost"
