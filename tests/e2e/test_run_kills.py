"""Killed runs go on: no finished step is lost, and the bits are those of a run that nobody killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Cli
from tests.e2e.kills import TARGETS, Kill, run_session

KILLS = 5


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_no_kill_loses_a_finished_step(quick_cli: Cli, reference: Path, seed: int) -> None:
    """Five kills a session: one in CI, sixty kills nightly. Every process in turn, half of them in a checkpoint."""
    kills: list[Kill] = []
    run_session(quick_cli, seed, KILLS, reference, kills.append)
    assert len(kills) == KILLS and {kill.target for kill in kills} == set(TARGETS)
    assert any(kill.moment != "start" for kill in kills)
