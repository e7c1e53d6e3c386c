"""Built-in engines on GPUs: every call computes on the engine's own one, whatever thread it comes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rl_engine.config.plan import Topology
from rl_engine.engines import builtin
from rl_engine.engines.builtin import BuiltinRolloutEngine, BuiltinTrainEngine
from rl_engine.orchestrators.actors import WorkerHost
from rl_engine.records.types import Side
from tests.helpers.synthetic_run import make_plan

Engine = BuiltinTrainEngine | BuiltinRolloutEngine


class Stopped(RuntimeError):
    """Nothing further is made than the place of a rank."""


def test_a_rollout_rank_has_its_number_among_all_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(make_plan(tmp_path), topology=Topology(2, 2, 2, 1, 2))
    places: list[int] = []

    def device_of(_: object, place: int) -> torch.device:
        places.append(place)
        raise Stopped

    monkeypatch.setattr(builtin, "use_threads", lambda _: None)
    monkeypatch.setattr(builtin, "device_of", device_of)

    def place(kind: type[Engine], side: Side, number: int, process: int) -> int:
        with pytest.raises(Stopped):
            kind.open(WorkerHost(plan, side, "engine", number, process, kind.processes(plan), ""))
        return places[-1]

    assert [place(BuiltinRolloutEngine, "rollout", e, rank) for e in range(2) for rank in range(2)] == [0, 1, 2, 3]
    assert place(BuiltinTrainEngine, "train", 0, 3) == 3


@pytest.mark.parametrize("method", ["score", "score_reference", "step", "save", "load", "export", "evidence"])
def test_calls_of_a_trainer_set_its_gpu(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _calls(BuiltinTrainEngine, method, monkeypatch)


@pytest.mark.parametrize("method", ["generate", "load_weights", "evidence"])
def test_calls_of_a_rollout_rank_set_its_gpu(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _calls(BuiltinRolloutEngine, method, monkeypatch)


def _calls(kind: type[Engine], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``method`` fails for want of an engine or arguments, after the GPU was chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    engine = kind.__new__(kind)
    engine.device = torch.device("cpu")
    with pytest.raises((AttributeError, TypeError)):
        getattr(engine, method)()
    assert chosen == []
    engine.device = torch.device("cuda", 1)
    with pytest.raises((AttributeError, TypeError)):
        getattr(engine, method)()
    assert chosen == [torch.device("cuda", 1)]
