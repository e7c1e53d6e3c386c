"""What must not give one rank's bits: the usual ways to be parallel, each put into one place of the exact code.

A control computes the same values with the same kernels and exchanges them the usual way. On one rank it must still be
exact, so that a difference on two comes from the exchange alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.engines.types import Request, Sample
from rl_engine.models.checkpoint import load_weights
from rl_engine.models.exchange import MeshExchange
from rl_engine.ops import Operators, uniform
from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.linear import LinearProvider
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.weight import Weight
from rl_engine.parallel import Group, Mesh, bounds, single_mesh
from tests.helpers.models import rollout_engine
from tests.helpers.ranks import Rank
from tests.parallel.scene import Judge, Layout, Scene, advantages, bits, make_trainer, tensors_of


def add_across(group: Group, x: Tensor) -> Tensor:
    """The sum over ranks as a library adds it."""
    if group.size == 1:
        return x
    total = x.to("cpu", copy=True)
    dist.all_reduce(total, group=group.transport.handle)
    return total.to(x.device)


def row_parallel(trainer: TrainEngine, mesh: Mesh) -> None:
    """o_proj and down_proj cut along K: every rank multiplies its own inputs, fp32 partial sums are all-reduced."""
    provider, head = trainer.ops.provider("linear"), trainer.ops.provider("lm_head")
    exact: Any = type(provider).exchanged

    def exchanged(
        x: Tensor, weight: Weight, residual: Tensor | None, exchange: Exchange, bias: Weight | None
    ) -> tuple[Tensor, Tensor]:
        out, whole = exact(provider, x, weight, residual, exchange, bias)
        if residual is None:
            return out, whole
        columns = weight.input_shard or weight  # all rows of own input columns
        partial = head.logits(x, columns)  # the same chain, not rounded
        return (residual.float() + add_across(mesh.tp, partial)).bfloat16(), whole

    assert isinstance(provider, LinearProvider)
    provider.exchanged = exchanged  # type: ignore[method-assign]


class OwnTokens(MeshExchange):
    """dW over each CP rank's own tokens."""

    def weight_rows(self, dy: Tensor, x: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor, PackedLayout]:
        own = torch.bucketize(self.own_tokens(layout), layout.unit_offsets, right=True).bincount()
        counts = [n for n in own.tolist() if n]  # own tokens of each unit, as if each were one sample
        return dy, x, PackedLayout(tuple(counts), (1,) * len(counts))


def summed_weight_gradient(trainer: TrainEngine, mesh: Mesh) -> None:
    """dW over each CP rank's own tokens, all-reduced."""
    provider = trainer.ops.provider("linear")

    def add_weight_rows(dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        local = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.device)
        provider.add_weight_gradient(dy, x, layout, local)
        first, last = bounds(dy.shape[1], mesh.cp.size)[mesh.cp.index]
        grad.add_(add_across(mesh.cp, local)[first:last])

    assert "weight_rows" in vars(MeshExchange) and isinstance(provider, LinearProvider)
    trainer.decoder.exchange = OwnTokens(mesh, trainer.weights.sharding)
    provider.add_weight_rows = add_weight_rows  # type: ignore[method-assign]


def exact(trainer: TrainEngine, mesh: Mesh) -> None:
    """The exact code as it is."""


class SlotNoise(Operators):
    """Noise keyed by the row of the batch instead of the sample's identity."""

    def draw(
        self, z: Tensor, inv_t: float, mask: Tensor | None, keys: list[DrawKey], exchange: Exchange = ALONE
    ) -> Tensor:
        keys = [dataclasses.replace(key, prompt=0, sample=row) for row, key in enumerate(keys)]
        return super().draw(z, inv_t, mask, keys, exchange)


def update_once(trainer: TrainEngine, samples: list[Sample], judge: Judge) -> dict[str, Any]:
    scores = trainer.score(samples)
    result = trainer.step(samples, advantages(samples), scores)
    judge.see(0, {"gradient": tensors_of(trainer)["gradient"]})
    return {"logprobs": bits(scores), "norm": result.grad_norm.hex(), "faults": judge.faults}


def train_controls(rank: Rank, scene: Scene, samples: list[Sample]) -> dict[str, Any]:
    """Scores and gradients of every control on both ranks, against one exact rank; run on two ranks."""
    device = scene.device_of(rank)
    where: dict[str, Any] = {"device": device, "shared": not scene.own_gpus}
    rank.join(**where)
    meshes = {"tp2": rank.mesh(2, 1, **where), "cp2": rank.mesh(1, 2, **where)}
    alone = single_mesh()
    found: dict[str, Any] = {}
    if rank.index == 0:
        # One rank: the truth, and proof that a control changes nothing but the exchange.
        found["exact"] = update_once(
            make_trainer(scene, Layout(), alone, device=device), samples, Judge(rank.folder, None)
        )
        for name, control in (("row-parallel", row_parallel), ("summed dW", summed_weight_gradient)):
            trainer = make_trainer(scene, Layout(), alone, device=device)
            control(trainer, alone)
            found[f"{name} on one rank"] = update_once(trainer, samples, Judge(None, rank.folder))
        stock = Operators({**uniform(scene.providers), "linear": "stock", "attention": "stock"})
        trainer = make_trainer(scene, Layout(), alone, stock, device)
        found["stock linear and attention"] = update_once(trainer, samples, Judge(None, rank.folder))
    dist.barrier()
    for name, control, mesh in (
        ("exact tp2", exact, meshes["tp2"]),
        ("exact cp2", exact, meshes["cp2"]),
        ("row-parallel", row_parallel, meshes["tp2"]),
        ("summed dW", summed_weight_gradient, meshes["cp2"]),
    ):
        trainer = make_trainer(scene, Layout(), mesh, device=device)
        control(trainer, mesh)
        found[name] = update_once(trainer, samples, Judge(None, rank.folder))
    return found


def draws(scene: Scene, requests: list[Request], *, slot: bool, max_batch: int) -> list[list[int]]:
    """Response tokens of every request, on one rank."""
    engine = rollout_engine(load_weights(scene.checkpoint), positions=scene.positions, max_batch=max_batch)
    if slot:
        engine.decoder.ops = SlotNoise(engine.ops.names)
    return [sample.response_tokens.tolist() for sample in engine.generate(requests, 0, scene.sampling)]
