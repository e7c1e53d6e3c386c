"""Torch's own operators on many ranks: every layout's control. The bits of their gradients depend on the layout,
their values do not."""

from __future__ import annotations

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rl_engine.engines.snapshot import own_digests
from rl_engine.models.exchange import MeshExchange
from rl_engine.ops import Operators, uniform
from rl_engine.ops.weight import CPU
from rl_engine.parallel import Mesh
from tests.helpers.ranks import Ended, Rank, run_ranks
from tests.parallel.conftest import Baseline
from tests.parallel.scene import Judge, Layout, RolloutSide, Scene, advantages, bits, make_trainer, tensors_of
from tests.parallel.test_layouts import samples_of

LAYOUTS = {"tp2": (2, 1), "cp2": (1, 2), "tp2 cp2": (2, 2)}
# Stock operators in a plan of the contract's, as `--native OP` has them; those that a trainer may not mix are left out.
MIXED = {**uniform("cpu"), "linear": "stock", "attention": "stock", "qk_norm": "stock", "embedding": "stock"}


class NoSum(MeshExchange):
    """A control: each rank keeps its own part of the gradient of what all ranks hold."""

    def spread(self, x: Tensor) -> Tensor:
        return x


def once(rank: Rank, scene: Scene, samples: Any, mesh: Mesh, names: dict[str, str], fault: bool) -> dict[str, Any]:
    trainer = make_trainer(scene, Layout(), mesh, Operators(names))
    if fault:
        trainer.decoder.exchange = NoSum(mesh, trainer.weights.sharding)
    scores = trainer.score(samples)
    result = trainer.step(samples, advantages(samples), scores)
    gradient = tensors_of(trainer)["gradient"]
    found: dict[str, Any] = {"logprobs": bits(scores), "norm": result.grad_norm, "errors": {}}
    if mesh.size == 1:
        Judge(rank.folder, None).see(0, {"gradient": gradient})
    else:
        truth = load_file(rank.folder / "gradient0.safetensors")
        for name, (first, rows) in gradient.items():
            right = truth[name][first : first + len(rows)].double()
            found["errors"][name] = (float((rows.double() - right).square().sum()), float(right.square().sum()))
    found["gains"] = {n: digest for n, digest in own_digests(trainer.weights).items() if "norm" in n}
    return found


def work(rank: Rank, scene: Scene, samples: Any, names: dict[str, str]) -> dict[str, Any]:
    rank.join()
    meshes = {name: rank.mesh(*shape) for name, shape in LAYOUTS.items()}
    alone, found = rank.mesh(1, 1), {}
    if meshes["tp2"] is not None and names["lm_head"] == "stock":
        side = RolloutSide(dataclasses.replace(scene, providers="stock"), Layout(), meshes["tp2"], CPU)
        drawn = side.generate(0)
        trainer = make_trainer(scene, Layout(), meshes["tp2"], Operators(names))
        scored, rolled = (np.concatenate(x) for x in (trainer.score(drawn), [s.logprobs for s in drawn]))
        found["rollout"] = {"tokens": [s.response_tokens.tolist() for s in drawn]}
        found["rollout"] |= {"largest": float(np.abs(scored - rolled).max()), "differ": int((scored != rolled).sum())}
    if alone is not None:
        found["one rank"] = once(rank, scene, samples, alone, names, False)
    dist.barrier()
    for name, mesh in meshes.items():
        if mesh is not None:
            found[name] = once(rank, scene, samples, mesh, names, False)
    if meshes["tp2"] is not None:
        found["control"] = once(rank, scene, samples, meshes["tp2"], names, True)
    return found


def errors(ended: list[Ended], layout: str) -> dict[str, float]:
    """Relative difference of every tensor's gradient from one rank's, over all ranks' rows."""
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for rank in ended:
        for name, (difference, size) in rank.result.get(layout, {"errors": {}})["errors"].items():
            sums[name][0] += difference
            sums[name][1] += size
    return {name: math.sqrt(difference / size) for name, (difference, size) in sums.items()}


@pytest.mark.parametrize("names", [uniform("stock"), MIXED], ids=["all stock", "some stock"])
def test_native_layouts(names: dict[str, str], one_rank: Baseline, tmp_path: Path) -> None:
    """bf16 gradients of other orders of summation differ by some percent; one rank's part alone by most of it."""
    scene, samples = one_rank.scene, samples_of(one_rank)
    ended = run_ranks(work, 4, tmp_path, scene, samples, names)
    facts = ended[0].result
    alone = np.array(facts["one rank"]["logprobs"], dtype=np.int32).view(np.float32)
    for layout, (tp, cp) in LAYOUTS.items():
        mine = facts[layout]
        found = np.array(mine["logprobs"], dtype=np.int32).view(np.float32)
        assert np.abs(found - alone).max() < 0.2
        assert mine["norm"] == pytest.approx(facts["one rank"]["norm"], rel=0.02)
        assert set(errors(ended, layout)) == set(one_rank.config.tensor_shapes())
        assert 0 < max(errors(ended, layout).values()) < 0.12
        for rank in ended[1 : tp * cp]:
            assert rank.result[layout]["logprobs"] == mine["logprobs"]
            assert rank.result[layout]["gains"] == mine["gains"], "copies of a norm went apart"
    assert max(errors(ended, "control").values()) > 0.3
    if "rollout" in facts:
        assert facts["rollout"] == ended[1].result["rollout"]
        assert facts["rollout"]["differ"] > 10 and facts["rollout"]["largest"] < 0.2
