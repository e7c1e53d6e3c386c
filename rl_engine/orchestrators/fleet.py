"""The workers of a run as groups: every rank of the trainer, and every rank of every rollout engine.

All ranks of a group get the same calls with the same arguments. A group's answer is its first rank's; a rank that dies
ends the call with its name, however many others are waiting for it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from rl_engine.config.plan import Plan
from rl_engine.engines.snapshot import shard_digests, snapshot_digests
from rl_engine.engines.types import Request, Sample, WeightSnapshot
from rl_engine.orchestrators.actors import RolloutWorker, TrainWorker
from rl_engine.orchestrators.causes import memory_kills
from rl_engine.orchestrators.ray_head import Head
from rl_engine.records.types import PassRecord, Side

POLL_SECONDS = 0.25
DEATH_SECONDS = 5.0  # how long the cause of a lost peer is waited for
Advance = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Member:
    """One worker process."""

    actor: Any
    side: Side
    engine: str
    rank: int

    @property
    def name(self) -> str:
        return f"{'trainer' if self.side == 'train' else 'rollout engine'} {self.engine} rank {self.rank}"


class Fleet:
    """Starts the plan's workers and calls them.

    Attributes:
        trainer: ranks of the trainer, in order.
        engines: ranks of every rollout engine.
        memory_kills: how many processes the kernel had killed for want of memory when the workers were started.
    """

    def __init__(self, head: Head, plan: Plan) -> None:
        self.head, self.ray, self.plan = head, head.ray, plan
        self.memory_kills = memory_kills()
        shape = plan.topology
        self.trainer = [
            self._member(TrainWorker, "train", "train", rank) for rank in range(shape.train_tp * shape.train_cp)
        ]
        self.engines = [
            [
                self._member(RolloutWorker, "rollout", f"rollout-{number}", rank, number)
                for rank in range(shape.rollout_tp * shape.rollout_cp)
            ]
            for number in range(shape.rollout_engines)
        ]
        self.members = [*self.trainer, *(member for ranks in self.engines for member in ranks)]

    def _member(self, worker: type, side: Side, engine: str, rank: int, *more: int) -> Member:
        store = f"file://{self.head.private}/{self.plan.run_id}-{engine}"
        return Member(self.head.start(worker, self.plan, engine, rank, store, *more), side, engine, rank)

    def stop(self) -> None:
        """Ends every worker."""
        self.head.stop([member.actor for member in self.members])

    # -- calls

    def wait(self, references: Sequence[Any], tick: Callable[[], None] | None = None) -> list[Any]:
        """Results of all references, in order.

        Raises:
            RayError: the first failure; a worker's death goes before what it made others fail with.
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
            raise next((error for error in failures if not _lost_peer(error)), failures[0])
        return [self.ray.get(reference) for reference in references]

    def every(self, method: str) -> list[tuple[Member, Any]]:
        """``method()`` of every worker."""
        results = self.wait([getattr(member.actor, method).remote() for member in self.members])
        return list(zip(self.members, results, strict=True))

    def passes(self) -> list[tuple[str, list[PassRecord]]]:
        """Every rollout engine's passes since the last call, as its first rank tells them: all ranks decide alike."""
        leaders = [ranks[0] for ranks in self.engines]
        found = self.wait([member.actor.passes.remote() for member in leaders])
        return [(member.engine, records) for member, records in zip(leaders, found, strict=True)]

    def train(self, method: str, *arguments: Any, advance: Advance | None = None) -> Any:
        """``method`` on every trainer rank; the first one's result."""
        shared = [self.ray.put(argument) for argument in arguments]
        references = [getattr(member.actor, method).remote(*shared) for member in self.trainer]
        return self.wait(references, self._ticker(advance, [self.trainer[0]]))[0]

    def generate(
        self, requests: list[Request], step: int, stop_tokens: tuple[int, ...], advance: Advance | None = None
    ) -> tuple[list[Sample], float]:
        """(samples, seconds of the slowest engine); which engine draws a sample does not change it."""
        parts = [requests[number :: len(self.engines)] for number in range(len(self.engines))]
        calls = [
            [member.actor.generate.remote(part, step, stop_tokens) for member in ranks]
            for ranks, part in zip(self.engines, parts, strict=True)
            if part
        ]
        leaders = [ranks[0] for ranks in self.engines]
        self.wait([reference for call in calls for reference in call], self._ticker(advance, leaders))
        results = [self.ray.get(call[0]) for call in calls]
        return [sample for samples, _ in results for sample in samples], max(seconds for _, seconds in results)

    def _ticker(self, advance: Advance | None, members: list[Member]) -> Callable[[], None] | None:
        if advance is None:
            return None

        def tick() -> None:
            progress = self.ray.get([member.actor.progress.remote() for member in members])
            advance(sum(done for done, _ in progress), sum(total for _, total in progress))

        return tick

    # -- weights

    def export(self) -> tuple[list[Any], dict[str, str]]:
        """(snapshots in the object store, digest of every whole tensor) of the trainer's present weights."""
        ranks = self.trainer[: self.plan.topology.train_tp]  # CP ranks hold the same rows
        pairs = [member.actor.export.options(num_returns=2).remote() for member in ranks]
        snapshots = [snapshot for snapshot, _ in pairs]
        digests = self.wait([digest for _, digest in pairs])
        if len(ranks) == 1:
            return snapshots, digests[0]
        return snapshots, snapshot_digests(self.ray.get(snapshots))

    def load(self, snapshots: list[Any]) -> None:
        """Every rollout rank takes its rows of the snapshots."""
        self.wait([m.actor.load_weights.remote(*snapshots) for ranks in self.engines for m in ranks])

    def held(self, snapshots: list[Any], whole: dict[str, str]) -> list[tuple[Member, bool]]:
        """For every rollout rank: whether it holds exactly the exported bits of its rows."""
        members = [member for ranks in self.engines for member in ranks]
        found = self.wait([member.actor.held.remote() for member in members])
        parts: list[WeightSnapshot] | None = None
        verdicts = []
        for member, (rows, digests) in zip(members, found, strict=True):
            expected = whole
            if self.plan.topology.rollout_tp > 1:
                parts = parts or self.ray.get(snapshots)
                expected = shard_digests(parts, rows)
            verdicts.append((member, digests == expected))
        return verdicts


def _lost_peer(error: Exception) -> bool:
    return type(getattr(error, "cause", None)).__name__ == "PeerLost"
