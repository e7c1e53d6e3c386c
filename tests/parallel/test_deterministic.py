"""``--gradients deterministic``: the same layout repeats its bits; TP does not change them, CP does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.helpers.ranks import Ended, run_ranks
from tests.parallel.conftest import Baseline
from tests.parallel.scene import Layout, work
from tests.parallel.test_layouts import check_equal


def run(layout: Layout, baseline: Baseline, folder: Path) -> list[Ended]:
    train = dataclasses.replace(baseline.scene.train, gradients="deterministic")
    scene = dataclasses.replace(baseline.scene, train=train)
    return run_ranks(work, layout.size, folder, scene, layout, baseline.folder)


def test_tensor_parallelism_alone_changes_nothing(filtered: Baseline, tmp_path: Path) -> None:
    layout = Layout(2, 1)
    check_equal(run(layout, filtered, tmp_path), layout, filtered)


@pytest.mark.parametrize("layout", [Layout(1, 2), pytest.param(Layout(2, 2), marks=pytest.mark.slow)], ids=str)
def test_repeats_and_is_not_invariant(layout: Layout, filtered: Baseline, tmp_path: Path) -> None:
    """Two runs differ from one rank in the same elements by the same bits, and not from each other."""
    first, second = (run(layout, filtered, tmp_path / name) for name in ("first", "second"))
    for a, b in zip(first, second, strict=True):
        assert a.result["steps"] == b.result["steps"]
        assert a.result["faults"] == b.result["faults"] != []
        assert a.result["own digests"] == b.result["own digests"]
    assert first[0].result["steps"][0]["logprobs"] == filtered.facts["steps"][0]["logprobs"]
    assert first[0].result["steps"][0]["gradient norm"] != filtered.facts["steps"][0]["gradient norm"]
    layers = sum(n for purpose, n in first[0].result["sent"].items() if purpose.startswith("dW"))
    assert layers == 0, "tokens were exchanged for dW"
