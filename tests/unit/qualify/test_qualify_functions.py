"""The proof looks at every bit of exp, log and log1p: an error of one unit in the last place fails it."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_engine.models.config import ModelConfig
from rl_engine.numerics.contract import Contract
from rl_engine.ops import functions as reference
from rl_engine.ops import library, uniform
from rl_engine.qualify import functions
from rl_engine.qualify.proof import differing, prove

pytestmark = pytest.mark.skipif(not library.available(), reason="no C compiler")

Build = Callable[[str, str], ctypes.CDLL]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """The kernels' own text with one change, compiled with their flags (and without the slow optimisations)."""

    def make(old: str, new: str) -> ctypes.CDLL:
        header = (library.SOURCES / "rlk.h").read_text()
        assert header.count(old) == 1
        (tmp_path / "rlk.h").write_text(header.replace(old, new))
        for name in ("rows.c", "threads.c"):
            (tmp_path / name).write_text((library.SOURCES / name).read_text())
        command = library.compiler()
        assert command is not None
        flags = [flag for flag in library.COMMON_FLAGS if flag != "-O3"]
        call = [
            *command,
            "-O1",
            *flags,
            "-ffp-contract=off",
            "-shared",
            "-o",
            "kernels.so",
            "rows.c",
            "threads.c",
            "-lm",
        ]
        subprocess.run(call, cwd=tmp_path, check=True, capture_output=True)
        found = ctypes.CDLL(str(tmp_path / "kernels.so"))
        for name in functions.NAMES:
            getattr(found, f"rlk_{name}_array").argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        return found

    return make


def test_the_kernels_hold() -> None:
    for what, found, expected in functions.pairs():
        assert differing(found, expected) == 0, what
        assert len(expected) == functions.COUNT


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("#ifndef RLK_H", "#ifndef RLK_H", {}),
        ("x < -87.25f ?", "x < -87.2500001f ?", {}),
        ("uint32_t scaled = rlk_float_bits(p) +", "uint32_t scaled = 1u + rlk_float_bits(p) +", {"exp": 50_000}),
        ("p = p * r + 1.66666672e-1f;", "p = p * r + 1.66666687e-1f;", {"exp": 50}),
        ("x < -87.25f ?", "x < -87.25001f ?", {"exp": 1}),
        ("x > 88.72f ?", "x > 88.71999f ?", {"exp": 1}),
        ("p = p * z + 0.333333343f;", "p = p * z + 0.333333373f;", {"log": 50, "log1p": 30}),
        ("x < 1.17549435e-38f ? 24.0f", "x < 1.17549435e-39f ? 24.0f", {"log": 1000}),
        ("return rlk_log(w) + lost / w;", "return rlk_log(w) + lost;", {"log1p": 1000}),
    ],
)
def test_a_wrong_last_place_is_seen(
    build: Build, monkeypatch: pytest.MonkeyPatch, old: str, new: str, seen: dict[str, int]
) -> None:
    """The first two are controls: the same text, and a constant that is the same fp32 number."""
    kernels = build(old, new)
    monkeypatch.setattr(library, "load", lambda: kernels)
    found = {what: differing(*results) for what, *results in functions.pairs()}
    for name in functions.NAMES:
        assert found[name] >= seen[name] if name in seen else found[name] == 0, found


def test_the_proof_fails_with_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit in the last place of one coefficient, which most results of an operator hide."""
    sides = [uniform("stock") | {"sample": "cpu"}]
    config = ModelConfig("LlamaForCausalLM", 1, 96, 80, 4, 2, 32, 300, False, False, 1e-6, 1e4, None, 256)
    assert prove(config, sides, Contract()).failed == ()
    kernels = build("p = p * r + 1.66666672e-1f;", "p = p * r + 1.66666687e-1f;")

    def of_c(name: str, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        getattr(kernels, f"rlk_{name}_array")(x.numel(), x.data_ptr(), out.data_ptr())
        return out

    monkeypatch.setattr(functions, "of_c", of_c)
    failed = prove(config, sides, Contract()).failed
    assert [(case.operator, case.what) for case in failed] == [("functions", "exp")]


def test_the_inputs_cover_what_a_run_asks_for() -> None:
    for name in functions.NAMES:
        x = functions.inputs(name)
        assert x.unique().numel() > 60_000
    exp, log, log1p = (functions.inputs(name) for name in functions.NAMES)
    results = reference.exp(exp)
    assert (exp < -1e30).any() and ((exp != 0) & (exp.abs() < 1e-40)).any() and (results == torch.inf).any()
    assert ((results > 0) & (results < 2e-38)).any() and (results == 0).sum() > 500
    assert ((log > 0) & (log < 1e-38)).sum() > 1500 and (log > 1e38).any()
    assert log1p.min() == -1.0 + 2.0**-24 and log1p.max() <= 0 and ((log1p != 0) & (log1p > -1e-30)).any()
