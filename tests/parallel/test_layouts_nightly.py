"""The long tier: all pairs of layouts, fifty updates, real weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_engine.models.config import read_config
from tests.helpers.models import sampling, train_settings
from tests.parallel.conftest import Baseline, make_baseline
from tests.parallel.scene import Layout, Scene
from tests.parallel.test_layouts import LAYOUTS, check_memory, check_traffic, run_layout

pytestmark = pytest.mark.slow

TRAINING = ((1, 1), *((layout.tp, layout.cp) for layout in LAYOUTS))
DONE = {(layout.tp, layout.cp, layout.rollout_tp) for layout in LAYOUTS} | {(1, 1, 1)}
PAIRS = [
    Layout(tp, cp, rollout)
    for tp, cp in TRAINING
    for rollout in (1, 2, 4, 8)
    if (tp, cp, rollout) not in DONE  # every day's
]


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_pair_equals_one_rank(layout: Layout, one_rank: Baseline, tmp_path: Path) -> None:
    ended = run_layout(layout, one_rank, tmp_path)
    check_memory(ended, layout, one_rank.config)
    check_traffic(ended, layout, one_rank)


@pytest.fixture(scope="module")
def fifty_updates(one_rank: Baseline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    """Short samples, a learning rate that keeps the model alive, tensors compared at the start, middle and end."""
    scene = dataclasses.replace(
        one_rank.scene,
        prompts=((1, 3), (3, 2), (40, 2)),
        train=train_settings(fold_tokens=20, lr=1e-4),
        updates=50,
        compared=(0, 24, 49),
    )
    yield from make_baseline(scene, one_rank.config, tmp_path_factory.mktemp("parallel") / "fifty")


@pytest.mark.parametrize("layout", [Layout(2, 2, 4), Layout(1, 4, 2), Layout(4, 1, 1)], ids=str)
def test_fifty_updates(layout: Layout, fifty_updates: Baseline, tmp_path: Path) -> None:
    steps = fifty_updates.facts["steps"]
    assert len({step["gradient norm"] for step in steps}) == 50
    assert all(step["ratio mismatches"] == 0 for step in steps)
    assert len({tuple(map(tuple, step["tokens"])) for step in steps}) > 40, "the model says the same thing for ever"
    run_layout(layout, fifty_updates, tmp_path)


@pytest.fixture(scope="module")
def real_weights(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    """30 layers, 9 query and 3 KV heads, tied head."""
    scene = Scene(
        checkpoint=smollm2,
        prompts=((3, 2), (41, 2)),
        sampling=sampling(max_response_len=12, stop_tokens=(2,)),
        train=train_settings(fold_tokens=64, lr=1e-5),
        compared=(1,),
    )
    yield from make_baseline(scene, read_config(smollm2), tmp_path_factory.mktemp("parallel") / "smollm2-one")


@pytest.mark.parametrize(
    "layout",
    [Layout(1, 1, 3), Layout(1, 2, 1), Layout(1, 4, 3), Layout(3, 1, 1, engines=3), Layout(3, 2, 3, shuffled=True)],
    ids=str,
)
def test_smollm2(layout: Layout, real_weights: Baseline, tmp_path: Path) -> None:
    ended = run_layout(layout, real_weights, tmp_path)
    check_memory(ended, layout, real_weights.config)
