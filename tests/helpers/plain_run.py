"""Runs without Ray: the real loop, workers, records and gates in this process, so that a test can replace a worker."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_engine.config.plan import Plan
from rl_engine.config.resolve import resolve
from rl_engine.engines.types import Request, Sample, TensorRows
from rl_engine.entrypoints.parser import parse
from rl_engine.entrypoints.repro import _request
from rl_engine.orchestrators import fleet, local
from rl_engine.orchestrators.actors import RolloutWorker, TrainWorker
from rl_engine.orchestrators.display import Display
from rl_engine.records.reader import RunReader
from rl_engine.records.types import PassRecord


class _NoRay:
    """What a run asks of Ray: objects are themselves, and nothing fails elsewhere."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

    @staticmethod
    def get(value: Any) -> Any:
        return value


class _Fleet(fleet.Fleet):
    """One trainer rank and one rollout engine of one rank, called directly."""

    def __init__(self, plan: Plan, trainer: type[TrainWorker], rollout: type[RolloutWorker]) -> None:
        self.plan = plan
        self.trainer = [fleet.Member(trainer(plan, "train"), "train", "train", 0)]
        self.engines = [[fleet.Member(rollout(plan, "rollout-0"), "rollout", "rollout-0", 0)]]
        self.members = [*self.trainer, *self.engines[0]]

    def stop(self) -> None:
        """Nothing was started."""

    def every(self, method: str) -> list[tuple[fleet.Member, Any]]:
        return [(member, getattr(member.actor, method)()) for member in self.members]

    def passes(self) -> list[tuple[str, list[PassRecord]]]:
        return [("rollout-0", self.engines[0][0].actor.passes())]

    def train(self, method: str, *arguments: Any, advance: Any = None) -> Any:
        return getattr(self.trainer[0].actor, method)(*arguments)

    def generate(
        self, requests: list[Request], step: int, stop_tokens: tuple[int, ...], advance: Any = None
    ) -> tuple[list[Sample], float]:
        return self.engines[0][0].actor.generate(requests, step, stop_tokens)

    def export(self) -> tuple[list[Any], dict[str, str]]:
        snapshot, digests = self.trainer[0].actor.export()
        # As an object store has them: what was exported does not change when the trainer goes on.
        rows = {name: TensorRows(part.first, part.bits.copy()) for name, part in snapshot.tensors.items()}
        return [dataclasses.replace(snapshot, tensors=rows)], digests

    def load(self, snapshots: list[Any]) -> None:
        self.engines[0][0].actor.load_weights(*snapshots)

    def held(self, snapshots: list[Any], whole: dict[str, str]) -> list[tuple[fleet.Member, bool]]:
        (member,) = self.engines[0]
        return [(member, member.actor.held()[1] == whole)]


def make_plan(folder: Path, profile: Path, model: Path, arguments: Sequence[str]) -> Plan:
    """The plan of ``run`` with these arguments, its workspace below ``folder``."""
    line = ["run", "--workspace", str(folder), "--profile", str(profile), "--model-root", str(model), *arguments]
    (resolved,) = resolve(_request(parse(line)))  # type: ignore[arg-type]
    return resolved.plan


def plain_run(
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    trainer: type[TrainWorker] = TrainWorker,
    rollout: type[RolloutWorker] = RolloutWorker,
) -> Path:
    """Runs ``plan`` to its end with these workers, without their start-up proof, or goes on with it; its directory, not
    validated."""
    for worker in (trainer, rollout):
        monkeypatch.setattr(worker, "_prove", lambda self: "0" * 64)
    monkeypatch.setattr(local, "Fleet", lambda head, plan: _Fleet(plan, trainer, rollout))
    earlier = RunReader(plan.run_dir) if Path(plan.run_dir).exists() else None
    run = local.LocalRun(plan, Display(), earlier)
    run.claim()
    run.run(types.SimpleNamespace(ray=_NoRay), types.SimpleNamespace(peaks={}, peak=0))  # type: ignore[arg-type]
    return Path(plan.run_dir)
