"""Workers on GPUs: every call computes on the worker's own one, whatever thread it comes on."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from rl_engine.orchestrators.actors import RolloutWorker, TrainWorker
from tests.helpers.synthetic_run import make_plan


def test_a_rollout_rank_has_its_number_among_all_engines(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    plan = types.SimpleNamespace(topology=types.SimpleNamespace(rollout_tp=2, rollout_cp=1))  # type: ignore[assignment]
    places = [RolloutWorker(plan, f"rollout-{e}", rank, "", e)._place() for e in range(2) for rank in range(2)]
    assert places == [0, 1, 2, 3] and TrainWorker(plan, "train", 3)._place() == 3


@pytest.mark.parametrize("method", ["score", "step", "save", "restore", "export"])
def test_calls_of_a_trainer_set_its_gpu(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _calls(TrainWorker(make_plan(tmp_path), "train"), method, monkeypatch)


@pytest.mark.parametrize("method", ["generate", "load_weights"])
def test_calls_of_a_rollout_rank_set_its_gpu(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _calls(RolloutWorker(make_plan(tmp_path), "rollout-0"), method, monkeypatch)


def _calls(worker: TrainWorker | RolloutWorker, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``method`` fails for want of an engine or arguments, after the GPU was chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    worker.device = torch.device("cpu")
    with pytest.raises((AttributeError, TypeError)):
        getattr(worker, method)()
    assert chosen == []
    worker.device = torch.device("cuda", 1)
    with pytest.raises((AttributeError, TypeError)):
        getattr(worker, method)()
    assert chosen == [torch.device("cuda", 1)]
