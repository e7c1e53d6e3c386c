"""Any TP and CP on either side gives one rank's bits: tokens, logprobs, every gradient, norm, state and weight."""

from __future__ import annotations

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.parallel import Traffic
from rl_engine.engines.train.batching import fold_units
from rl_engine.engines.types import Sample
from rl_engine.models.config import ModelConfig
from rl_engine.ops import Operators
from rl_engine.parallel import zigzag_runs
from tests.helpers.fused import FusedCpuRope, UnroundedRope, fused_operators
from tests.helpers.ranks import Ended, run_ranks
from tests.parallel.conftest import Baseline
from tests.parallel.controls import draws, train_controls
from tests.parallel.scene import TENSORS, Layout, Scene, whole_bytes, work

# Every training layout once, every rollout TP at least once; what else must not matter rides along.
LAYOUTS = (
    Layout(2, 1, rollout_tp=4, shuffled=True),
    Layout(1, 2, rollout_tp=2, max_tokens=1200),
    Layout(2, 2, rollout_tp=1, engines=3, recompute=True),
    Layout(2, 4, rollout_tp=8),
    Layout(4, 2, rollout_tp=2, max_tokens=4096),
    Layout(8, 1, rollout_tp=4, max_tokens=1120),
    Layout(1, 8, rollout_tp=1),
)


@dataclasses.dataclass(frozen=True)
class FusedScene(Scene):
    """The same with QK norm and rotation as one operator."""

    rope: type[FusedCpuRope] = FusedCpuRope

    def operators(self) -> Operators:
        return fused_operators(self.rope)


FACTS = ("lengths", "tokens", "rollout logprobs", "retained", "logprobs", "reference logprobs", "ratio mismatches")
FACTS += ("gradient norm", "loss", "kl", "entropy", "changed", "elements")


def check_equal(ended: list[Ended], layout: Layout, baseline: Baseline) -> None:
    """Every rank has the baseline's facts; all ranks together compared every row of every tensor, none differed."""
    for rank in ended:
        report = rank.result
        assert report["faults"] == [], f"rank {rank.index}: {len(report['faults'])} tensors differ"
        for step, (facts, expected) in enumerate(zip(report["steps"], baseline.facts["steps"], strict=True)):
            for name in FACTS:
                if name in facts or rank.index < layout.tp * layout.cp:
                    assert facts.get(name) == expected.get(name), f"rank {rank.index}, step {step}: {name}"
        assert all(report["held"]), "a rollout rank holds other bits than the trainer exported"
    assert ended[0].result["digests"] == baseline.facts["digests"]
    check_coverage(ended, layout, baseline)


def check_coverage(ended: list[Ended], layout: Layout, baseline: Baseline) -> None:
    """Gradients and state: each row on exactly one rank (norms: one rank of every TP group member's own copy);
    weights: on every CP rank."""
    times: dict[tuple[str, str], collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for rank in ended:
        for quantity, name, first, last in rank.result["covered"]:
            times[quantity, name].update(range(first, last))
    shapes = baseline.config.tensor_shapes()
    assert set(times) == {(f"{q}{s}", name) for q in TENSORS for s in baseline.scene.compared for name in shapes}
    for (quantity, name), rows in times.items():
        copies = layout.tp if "norm" in name else 1
        copies *= layout.cp if quantity.startswith("weight") else 1
        assert rows == dict.fromkeys(range(shapes[name][0]), copies), f"{quantity} of {name}"


def check_memory(ended: list[Ended], layout: Layout, config: ModelConfig) -> None:
    """Each rank holds its shard and no more: bytes add up to the model's, norms counted once per TP rank."""
    whole, norms = whole_bytes(config)
    linear = sum(2 * math.prod(s) for n, s in config.tensor_shapes().items() if "_proj.weight" in n)
    held = [rank.result["bytes"] for rank in ended if "bytes" in rank.result]  # after the last update
    assert len(held) == layout.tp * layout.cp
    assert all(rank["parameters"] == rank["stated"] for rank in held)
    assert sum(rank["parameters"] for rank in held) == layout.cp * (whole + (layout.tp - 1) * norms)
    assert max(rank["parameters"] for rank in held) <= 1.25 * whole / layout.tp + norms
    copies = [rank["copies"] for rank in held]
    assert sum(copies) == (layout.cp * linear if layout.tp > 1 else 0)
    assert max(copies) <= 1.02 * linear / layout.tp or layout.tp == 1
    elements = (whole + (layout.tp - 1) * norms) // 2
    assert sum(rank["gradients"] for rank in held) == 4 * elements
    assert sum(rank["optimizer"] for rank in held) == 12 * elements
    assert max(rank["optimizer"] for rank in held) <= 1.3 * 12 * elements / len(held) + 12 * norms
    rollout = [rank.result["rollout bytes"] for rank in ended if "rollout bytes" in rank.result]
    assert len(rollout) == layout.rollout_tp
    assert sum(rollout) == whole + (layout.rollout_tp - 1) * norms


def check_traffic(ended: list[Ended], layout: Layout, baseline: Baseline) -> None:
    """Bytes sent by every trainer rank, by purpose, are those of the formula, to the byte."""
    scene, config = baseline.scene, baseline.config
    for rank in ended[: layout.tp * layout.cp]:
        traffic = Traffic(config, layout.tp, layout.cp, rank.index % layout.tp, rank.index // layout.tp)
        expected = traffic.copies()
        for step, facts in enumerate(baseline.facts["steps"]):
            asked = scene.requests(config.vocabulary, step)
            samples = [(request.tokens, tokens) for request, tokens in zip(asked, facts["tokens"], strict=True)]
            score, update = traffic.update(
                samples, scene.train.fold_tokens, layout.max_tokens, recompute=layout.recompute
            )
            expected = expected + score + update
        assert {k: v for k, v in rank.result["sent"].items() if v} == dict(expected), f"rank {rank.index}"


def run_layout(layout: Layout, baseline: Baseline, folder: Path) -> list[Ended]:
    ended = run_ranks(work, layout.size, folder, baseline.scene, layout, baseline.folder)
    check_equal(ended, layout, baseline)
    for file in folder.glob("weights*"):
        file.unlink()
    return ended


# -- the inputs are worth comparing


def test_lengths_cross_every_limit(one_rank: Baseline) -> None:
    """Ragged; short ones leave CP ranks without a token of a sample, or of a whole micro-batch."""
    idle: list[int] = []
    for facts in one_rank.facts["steps"]:
        lengths = facts["lengths"]
        assert min(lengths) <= 7
        assert max(lengths) > 1100
        assert len({len(tokens) for tokens in facts["tokens"]}) > 2, "responses are not ragged"
        assert any(not runs for length in lengths for runs in zigzag_runs(length, 8)), "no empty share at CP 8"
        units = fold_units(lengths, one_rank.scene.train.fold_tokens)
        assert len(units) > 3
        assert any(len(unit) > 1 for unit in units)
        idle += [r for unit in units for r in range(8) if not any(zigzag_runs(lengths[i], 8)[r] for i in unit)]
    assert idle, "every rank has a token in every micro-batch"


def test_updates_are_real(one_rank: Baseline) -> None:
    """Trainer and rollout agree, most elements and tensors move, and the second step's tokens come from the update."""
    for facts in one_rank.facts["steps"]:
        assert facts["logprobs"] == facts["rollout logprobs"]
        assert facts["ratio mismatches"] == 0
        assert facts["changed"] > 0.5 * facts["elements"]
        assert float.fromhex(facts["gradient norm"]) > 1.0, "nothing is clipped"
    assert one_rank.facts["steps"][1]["tokens"] != one_rank.facts["without update"]
    start = load_file(one_rank.scene.checkpoint / "model.safetensors")
    end = load_file(one_rank.folder / "weight1.safetensors")
    moved = [name for name in start if not bool((start[name] == end[name]).all())]
    assert len(moved) > 0.9 * len(start)
    gradients = load_file(one_rank.folder / "gradient1.safetensors")
    assert all(gradient.count_nonzero() for gradient in gradients.values())


# -- equality


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_equals_one_rank(layout: Layout, one_rank: Baseline, tmp_path: Path) -> None:
    ended = run_layout(layout, one_rank, tmp_path)
    check_memory(ended, layout, one_rank.config)
    check_traffic(ended, layout, one_rank)


def test_a_rotation_that_takes_qk_norm_along(one_rank: Baseline, tmp_path: Path) -> None:
    """On both sides, with gradients too; the control leaves out the rounding between norm and rotation."""
    layout = Layout(2, 2, rollout_tp=2)
    fused = dataclasses.replace(one_rank, scene=FusedScene(**vars(one_rank.scene)))
    check_traffic(run_layout(layout, fused, tmp_path), layout, fused)
    scene = FusedScene(**{**vars(one_rank.scene), "updates": 1, "compared": (0,)}, rope=UnroundedRope)
    ended = run_ranks(work, layout.size, tmp_path / "control", scene, layout, one_rank.folder)
    assert all(len(rank.result["faults"]) > 4 for rank in ended)
    assert ended[0].result["steps"][0]["logprobs"] != one_rank.facts["steps"][0]["logprobs"]


@pytest.mark.parametrize("layout", [Layout(2, 2, rollout_tp=2), Layout(3, 1, rollout_tp=6)], ids=str)
def test_retained_sets_and_reference(layout: Layout, filtered: Baseline, tmp_path: Path) -> None:
    """Temperature, top-k and top-p over vocabulary shards, scoring with masks, the KL term, a tied head."""
    facts = filtered.facts["steps"][0]
    assert {len(row) for rows in facts["retained"] for row in rows} - {20}, "top-p cuts nothing"
    shard = 2500 // 2
    assert any(min(row) < shard <= max(row) for rows in facts["retained"] for row in rows), "no set crosses shards"
    assert any(float.fromhex(step["kl"]) > 0 for step in filtered.facts["steps"])
    run_layout(layout, filtered, tmp_path)


# -- controls: the usual ways to be parallel do differ on these inputs


def samples_of(baseline: Baseline, step: int = 0) -> list[Sample]:
    """What the baseline drew in ``step``, without the long sample."""
    asked = baseline.scene.requests(baseline.config.vocabulary, step)
    return [
        Sample(
            prompt=request.prompt,
            sample=request.sample,
            prompt_tokens=np.array(request.tokens, dtype=np.int32),
            response_tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            retained=None,
            weight_version=0,
            engine="baseline",
            finish_reason="length",
        )
        for request, tokens in zip(asked, baseline.facts["steps"][step]["tokens"], strict=True)
        if len(request.tokens) < 1000
    ]


@pytest.fixture(scope="module")
def controls(one_rank: Baseline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("controls")
    ended = run_ranks(train_controls, 2, folder, one_rank.scene, samples_of(one_rank))
    return ended[0].result | {f"{name} on rank 1": value for name, value in ended[1].result.items()}


@pytest.mark.parametrize("name", ["exact tp2", "exact cp2", "row-parallel on one rank", "summed dW on one rank"])
def test_without_the_fault_nothing_differs(controls: dict[str, Any], name: str) -> None:
    """Each control's code is exact where nothing is exchanged."""
    assert controls[name]["faults"] == []
    assert controls[name]["norm"] == controls["exact"]["norm"]
    assert controls[name]["logprobs"] == controls["exact"]["logprobs"]


@pytest.mark.parametrize(
    ("name", "forward"), [("stock linear and attention", True), ("row-parallel", True), ("summed dW", False)]
)
def test_control_differs(controls: dict[str, Any], name: str, forward: bool) -> None:
    found, exact = controls[name], controls["exact"]
    changed = np.count_nonzero(np.array(found["logprobs"]) != np.array(exact["logprobs"]))
    assert (changed > 0) == forward
    assert found["norm"] != exact["norm"]
    assert len(found["faults"]) > 4, "hardly a gradient differs"


def test_noise_by_slot_differs(one_rank: Baseline) -> None:
    """Keyed by identity, tokens do not depend on the batch; keyed by slot, they do."""
    scene, expected = one_rank.scene, one_rank.facts["steps"][0]["tokens"][:6]
    asked = scene.requests(one_rank.config.vocabulary, 0)[:6]
    assert draws(scene, asked, slot=False, max_batch=2) == expected
    together, apart = (draws(scene, asked, slot=True, max_batch=size) for size in (6, 2))
    assert together != apart
    assert together != expected
