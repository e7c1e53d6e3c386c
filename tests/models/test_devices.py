"""Where weights lie is where a decoder computes: what cannot compute there is refused before anything runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rl_engine.engines.setup import device_of
from rl_engine.models.decoder import Decoder
from rl_engine.models.exchange import MeshExchange
from rl_engine.models.sharding import Sharding
from rl_engine.models.weights import random_weights
from rl_engine.ops import Operators, uniform
from rl_engine.ops.operators import WrongDevice
from rl_engine.ops.rope import RopeTable
from rl_engine.parallel import Group, Mesh
from rl_engine.records.errors import UserError
from tests.helpers.models import llama
from tests.helpers.synthetic_run import make_plan

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL = {"layers": 1, "hidden": 64, "intermediate": 96, "heads": 2, "kv_heads": 2, "head_dim": 32, "vocabulary": 300}


@pytest.mark.parametrize(("name", "device"), [("cpu", GPU), ("reference", GPU), ("torch", GPU), ("triton", CPU)])
def test_a_provider_of_another_device_is_refused(name: str, device: torch.device) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    ops = Operators(uniform(name))
    with pytest.raises(WrongDevice, match=rf"provider {name} of adamw computes on a .PU, the weights lie on {device}"):
        ops.check_device(device)
    ops.check_device(GPU if device == CPU else CPU)


def test_torchs_own_operators_compute_anywhere() -> None:
    """Their optimizer and sampler are another provider's, and are judged."""
    ops = Operators(uniform("stock"))
    ops.check_device(CPU)
    with pytest.raises(WrongDevice, match="provider cpu of adamw"):
        ops.check_device(GPU)


def test_the_decoder_asks() -> None:
    weights = random_weights(llama(**SMALL), 0)
    weights.device = GPU
    with pytest.raises(WrongDevice, match="the weights lie on cuda:0"):
        Decoder(weights, Operators(uniform("cpu")), 16)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_several_ranks_compute_where_their_weights_lie(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder of one rank of two is made of weights anywhere; its operators must fit the device as one rank's."""
    monkeypatch.setattr(RopeTable, "to", lambda table, device: table)
    weights = random_weights(llama(**SMALL), 0, Sharding(llama(**SMALL), 2, 0))
    weights.device = device
    ops = Operators(uniform("stock"))
    ops.names.update(dict.fromkeys(("adamw", "grad_norm", "sample"), "stock"))
    pair, alone = Group((0, 1), 0), Group((0,), 0)
    decoder = Decoder(weights, ops, 16, Mesh(pair, alone, pair))
    assert isinstance(decoder.exchange, MeshExchange)
    assert decoder.device == device
    ops.names["adamw"] = "cpu" if device == GPU else "triton"
    with pytest.raises(WrongDevice, match=f"of adamw computes on a .PU, the weights lie on {device}"):
        Decoder(weights, ops, 16, Mesh(pair, alone, pair))


def test_a_plans_device_is_there_and_of_the_proven_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path)
    assert device_of(plan) == CPU
    plan = dataclasses.replace(plan, backend="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU that torch"):
        device_of(plan)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    in_force: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", in_force.append)
    for cuda, capability, good in (("13.0", (9, 0), True), ("13.0", (8, 0), False), (None, (9, 0), False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, found=capability: found)
        if good:
            assert [device_of(plan, place).index for place in range(4)] == in_force == [0, 1, 0, 1]
        else:
            with pytest.raises(UserError, match=r"Some GPU \(compute capability"):
                device_of(plan)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Kind {index}")
    with pytest.raises(UserError, match="Kind 0 and Kind 1"):
        device_of(plan, 1)


def test_weights_say_where_they_lie() -> None:
    weights = random_weights(llama(**SMALL), 0)
    assert weights.device == weights.clone().device == CPU
    assert {weight.value.device for weight in weights} == {CPU}
