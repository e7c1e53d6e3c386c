"""Providers by what they can do: the table is whole, nobody compares their names, and a new one needs no other file."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

from rl_engine.engines import threads
from rl_engine.models.decoder import Decoder
from rl_engine.models.weights import random_weights
from rl_engine.numerics import providers
from rl_engine.numerics.contract import Contract
from rl_engine.numerics.providers import CAPABILITIES, CONTROL, DEFAULTS, REGISTRY, any_stock, control, defaults, judged
from rl_engine.ops import OPERATORS, Operators, library, uniform
from rl_engine.ops.operators import WrongDevice, WrongShape
from rl_engine.qualify.proof import prove
from tests.helpers.models import joined, llama, prompts, qwen3, requests, rollout_engine, rollout_logprobs, sampling
from tests.helpers.models import train_engine as make_trainer
from tests.helpers.numeric import assert_bitwise

ROOT = Path(__file__).resolve().parents[2] / "rl_engine"
ROOMS = ("ops", "models", "engines", "config", "qualify", "checks")


def test_every_provider_of_the_table_says_what_it_can_do() -> None:
    assert {name for table in REGISTRY.values() for name in table} == set(CAPABILITIES)
    assert set(REGISTRY) == set(providers.OPERATORS) == set(OPERATORS)
    assert all(not able.devices or set(able.devices) <= {"cpu", "cuda"} for able in CAPABILITIES.values())


@pytest.mark.parametrize(
    ("backend", "compiler", "product", "other"),
    [
        ("cpu", True, "cpu", "cpu"),
        ("cpu", False, "torch", "torch"),
        ("cuda", True, "cublaslt", "triton"),
        ("cuda", False, "cublaslt", "triton"),
        ("rocm", True, "triton", "triton"),
    ],
)
def test_defaults_of_a_backend(backend: str, compiler: bool, product: str, other: str) -> None:
    ours = defaults(backend, compiler)
    assert set(ours) == set(OPERATORS)
    assert {name for op, name in ours.items() if op in ("linear", "lm_head")} == {product}
    assert {name for op, name in ours.items() if op not in ("linear", "lm_head")} == {other}
    native = control(ours)
    assert {op for op, name in native.items() if name != CONTROL} == {"sample", "adamw", "grad_norm"}
    assert any_stock(native.values()) and not any_stock(ours.values()) and not any_stock(["of another version"])


def names_compared(path: Path) -> set[str]:
    """Names of providers that a comparison in the file has as a constant, beside a backend or a kind of device."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Compare):
            continue
        text = ast.unparse(node)
        if "backend" in text or ".type" in text or "split()" in text:
            continue
        for constant in ast.walk(node):
            if isinstance(constant, ast.Constant) and constant.value in CAPABILITIES:
                found.add(str(constant.value))
    return found


def test_nobody_compares_the_name_of_a_provider() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    compared = {str(path.relative_to(ROOT)): found for path in files if (found := names_compared(path))}
    left = {"config/resolve.py": {"stock"}}  # whether a plan's rollout side captures graphs
    assert all(found <= left.get(name, set()) for name, found in compared.items()), compared


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> str:
    """A provider that nobody has heard of, as its author would add it: rows of the table and nothing else. Its kernels
    are the C library's, so that they can be run here."""
    for operator, table in REGISTRY.items():
        monkeypatch.setitem(table, "hip", REGISTRY[operator]["cpu"])
    monkeypatch.setitem(CAPABILITIES, "hip", dataclasses.replace(CAPABILITIES["cpu"], head_dims=(64,)))
    monkeypatch.setitem(DEFAULTS, "rocm", ("hip",))
    return "hip"


def test_a_new_provider_is_chosen_proven_packed_and_counted(amd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = qwen3(layers=1, intermediate=96, vocabulary=1100)
    names = defaults("rocm")
    assert set(names.values()) == {amd} and amd in judged()
    found = prove(config, [names], Contract(), rows=(1, 13))
    assert not found.failed and {case.provider for case in found.cases} == {amd}
    assert {case.operator for case in found.cases} == {*OPERATORS, "functions"}
    plain = prove(config, [uniform("cpu")], Contract(), rows=(1, 13))
    assert [case.what for case in found.cases] == [case.what for case in plain.cases], "no case is left out"
    asked: list[int] = []
    monkeypatch.setattr(library, "set_threads", asked.append)
    threads.use_threads(torch.get_num_threads(), [amd])
    assert asked == [torch.get_num_threads()]


def test_a_new_provider_trains_and_rolls_out_with_the_same_bits(amd: str) -> None:
    weights = random_weights(llama(layers=2, vocabulary=700), 3)
    engine, trainer = rollout_engine(weights, amd), make_trainer(weights, amd)
    assert all(w.packed is not None for w in engine.weights if w.name.endswith("_proj.weight"))
    samples = engine.generate(requests(prompts(700, (3, 30)), 2), 0, sampling())
    assert_bitwise(joined(trainer.score(samples)), rollout_logprobs(samples), "train = rollout")
    assert {route.provider for route in engine.ops.routes()} == {amd}
    assert not engine.ops.captures and Operators(uniform("cpu")).captures is False


def test_what_a_provider_cannot_do_is_refused_by_its_own_words(amd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = llama(layers=1, heads=2, kv_heads=2, head_dim=32, hidden=64, intermediate=96, vocabulary=300)
    with pytest.raises(WrongShape, match="the hip attention provider knows head_dim 64, not 32"):
        Decoder(random_weights(small, 0), Operators(uniform(amd)), 16)
    with pytest.raises(WrongDevice, match="provider hip of adamw computes on a CPU"):
        Operators(uniform(amd)).check_device(torch.device("cuda"))
    monkeypatch.setitem(CAPABILITIES, amd, dataclasses.replace(CAPABILITIES[amd], devices=("cuda", "xpu")))
    with pytest.raises(WrongDevice, match="provider hip of adamw computes on a GPU or xpu, the weights lie on cpu"):
        Operators(uniform(amd)).check_device(torch.device("cpu"))
