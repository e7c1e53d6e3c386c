"""A family with sharded vectors: biases of q, k and v are cut with their heads, and count once in the gradient norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_engine.models.checkpoint import save_checkpoint
from rl_engine.models.sharding import Sharding
from tests.helpers.models import qwen2, qwen2_weights, sampling, train_settings
from tests.helpers.ranks import Rank, run_ranks
from tests.parallel.conftest import STOPS, Baseline, make_baseline
from tests.parallel.scene import Layout, Scene, work
from tests.parallel.test_layouts import check_equal, check_memory, check_traffic


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    """A tied Qwen2 whose heads and MLP are ragged at CP 2 and TP 2."""
    config = qwen2(
        layers=2, hidden=576, intermediate=301, heads=12, kv_heads=6, head_dim=48, vocabulary=1500, tied=True
    )
    folder = tmp_path_factory.mktemp("parallel") / "qwen2"
    folder.mkdir()
    save_checkpoint(folder, qwen2_weights(config, 5))
    scene = Scene(
        checkpoint=folder,
        prompts=((2, 2), (30, 3)),
        sampling=sampling(max_response_len=8, stop_tokens=STOPS),
        train=train_settings(fold_tokens=64, lr=1e-4),
    )
    yield from make_baseline(scene, config, folder.with_name("qwen2-one"))


@pytest.mark.parametrize("layout", [Layout(2, 2, rollout_tp=3), Layout(1, 3, rollout_tp=2)], ids=str)
def test_layout_equals_one_rank(layout: Layout, biased: Baseline, tmp_path: Path) -> None:
    for facts in biased.facts["steps"]:
        assert facts["logprobs"] == facts["rollout logprobs"]
        assert facts["ratio mismatches"] == 0
    ended = run_ranks(work, layout.size, tmp_path, biased.scene, layout, biased.folder)
    check_equal(ended, layout, biased)
    check_memory(ended, layout, biased.config)
    check_traffic(ended, layout, biased)


def counted_as_a_norm(rank: Rank, scene: Scene, layout: Layout, baseline: Path) -> object:
    Sharding.is_replicated = (  # type: ignore[method-assign]
        lambda sharding, merged: "norm" in merged.rsplit(".", 2)[-2] or merged.endswith(".bias")
    )
    return work(rank, scene, layout, baseline)


def test_a_bias_counted_on_one_rank_shows(biased: Baseline, tmp_path: Path) -> None:
    """The control: biases taken for vectors that every TP rank holds."""
    scene = dataclasses.replace(biased.scene, updates=1, compared=(0,))
    ended = run_ranks(counted_as_a_norm, 2, tmp_path, scene, Layout(2, 1), biased.folder)
    facts, expected = ended[0].result["steps"][0], biased.facts["steps"][0]
    assert facts["logprobs"] == expected["logprobs"]
    assert facts["gradient norm"] != expected["gradient norm"]
