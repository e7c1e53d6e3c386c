"""Runs without Ray: the real loop, fleet, workers, records and gates in this process, so that a test can replace an
engine."""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_engine.config.plan import Plan
from rl_engine.config.resolve import resolve
from rl_engine.engines import registry
from rl_engine.engines.builtin import BuiltinRolloutEngine, BuiltinTrainEngine
from rl_engine.entrypoints.parser import parse
from rl_engine.entrypoints.repro import _request
from rl_engine.orchestrators import fleet, local
from rl_engine.orchestrators.actors import WorkerHost
from rl_engine.orchestrators.display import Display
from rl_engine.records.reader import RunReader


class _Stored:
    """A value in the object store: what was put does not change when its owner goes on."""

    def __init__(self, value: Any) -> None:
        self.value = copy.deepcopy(value)

    def get(self) -> Any:
        return self.value


class _Ray:
    """What a run asks of Ray: calls are over when they return, and nothing fails elsewhere."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

    put = _Stored

    @staticmethod
    def get(value: Any) -> Any:
        return [item.get() for item in value] if isinstance(value, list) else value.get()

    @staticmethod
    def wait(pending: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return pending, []


class _Call:
    """A method of an actor."""

    def __init__(self, method: Any, results: int = 1) -> None:
        self.method, self.results = method, results

    def options(self, num_returns: int) -> _Call:
        return _Call(self.method, num_returns)

    def remote(self, *arguments: Any) -> Any:
        found = self.method(*(a.get() if isinstance(a, _Stored) else a for a in arguments))
        return _Stored(found) if self.results == 1 else [_Stored(value) for value in found]


class _Actor:
    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> _Call:
        return _Call(getattr(self._worker, name))


class _Head:
    """A head whose actors live here."""

    ray, private = _Ray, Path("nowhere")

    def start(self, worker: type, *arguments: Any) -> _Actor:
        return _Actor(worker(*arguments))

    def check(self) -> None:
        """Nothing can die."""

    def stop(self, actors: list[Any]) -> None:
        """Nothing was started."""


def make_plan(folder: Path, profile: Path, model: Path, arguments: Sequence[str]) -> Plan:
    """The plan of ``run`` with these arguments, its workspace below ``folder``."""
    line = ["run", "--workspace", str(folder), "--profile", str(profile), "--model-root", str(model), *arguments]
    (resolved,) = resolve(_request(parse(line)))  # type: ignore[arg-type]
    return resolved.plan


def plain_run(
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    trainer: type[BuiltinTrainEngine] = BuiltinTrainEngine,
    rollout: type[BuiltinRolloutEngine] = BuiltinRolloutEngine,
) -> Path:
    """Runs ``plan`` to its end with these engines, without their start-up proof, or goes on with it; its directory, not
    validated."""
    monkeypatch.setattr(WorkerHost, "prove", lambda self: "0" * 64)
    for module in (registry, fleet):
        monkeypatch.setattr(module, "train_class", lambda _: trainer)
        monkeypatch.setattr(module, "rollout_class", lambda _: rollout)
    earlier = RunReader(plan.run_dir) if Path(plan.run_dir).exists() else None
    run = local.LocalRun(plan, Display(), earlier)
    run.claim()
    run.run(_Head(), types.SimpleNamespace(peaks={}, peak=0))  # type: ignore[arg-type]
    return Path(plan.run_dir)
