"""The bytes a layout sends: the page's formulas, the benchmark's and the exact count agree, and the benchmark runs.

What ranks really counted is compared with the exact form by ``test_layouts``.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import parallel
from benchmarks.parallel import Traffic, per_token
from rl_engine.models.config import ModelConfig
from tests.helpers.models import llama, qwen3

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "bytes-not-sums.md"
ROW = re.compile(r"^\| ([\w ]+) \| (forward|backward) \| `([-+*/()\w]+)` \|$", re.MULTILINE)
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (8, 1), (1, 8)]


def by_page(config: ModelConfig, tp: int, cp: int) -> dict[str, dict[str, float]]:
    """The page's table, its formulas computed."""
    letters = {
        "P": tp,
        "C": cp,
        "H": config.hidden,
        "I": config.intermediate,
        "N": config.heads,
        "A": config.heads * config.head_dim,
        "K": config.kv_heads * config.head_dim,
        "Q": int(config.qk_norm),
    }
    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for purpose, direction, formula in ROW.findall(PAGE.read_text()):
        found[direction][purpose] = eval(formula, {"__builtins__": {}}, letters)
    return found


@pytest.mark.parametrize("config", [qwen3(), llama(), qwen3(head_dim=128, intermediate=3072)], ids=["q", "l", "wide"])
@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_the_page_says_what_the_benchmark_computes(config: ModelConfig, tp: int, cp: int) -> None:
    assert by_page(config, tp, cp) == per_token(config, tp, cp)


@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_closed_form_is_the_sum_over_ranks(tp: int, cp: int) -> None:
    """Where all slices are even: 160 tokens per rank."""
    config = qwen3(intermediate=512)
    forward: collections.Counter[str] = collections.Counter()
    backward: collections.Counter[str] = collections.Counter()
    for tp_index in range(tp):
        for cp_index in range(cp):
            traffic = Traffic(config, tp, cp, tp_index, cp_index)
            forward.update(traffic.forward(160))
            backward.update(traffic.backward(160, 1))
    sums = backward.pop("gain sums")
    assert sums == (tp - 1) * 4 * (config.heads + config.kv_heads) * config.head_dim
    each = {name: {k: n / (160 * cp) for k, n in c.items()} for name, c in (("f", forward), ("b", backward))}
    assert {"forward": each["f"], "backward": each["b"]} == per_token(config, tp, cp)


def test_one_rank_sends_nothing() -> None:
    assert not any(n for part in per_token(qwen3(), 1, 1).values() for n in part.values())


def test_benchmark_writes_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one layout beside one rank; the bytes it counts inside layers are the formula's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(parallel, "LAYOUTS", ((1, 1), (2, 1)))
    small = {"hidden": 128, "intermediate": 192, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocabulary": 1500}
    monkeypatch.setattr(parallel, "SHAPE", dataclasses.replace(parallel.SHAPE, **small))
    out = tmp_path / "out.json"
    assert bench.main(["parallel", "--rounds", "1", "--layers", "1", "--threads", "1", "--out", str(out)]) == 0
    body = json.loads(out.read_text())
    assert body["benchmark"] == "parallel"
    assert [case["case"] for case in body["cases"]] == list(parallel.PHASES)
    for case in body["cases"]:
        assert set(case["times"]) == {"one rank", "TP2 CP1"}
        assert all(times["median"] > 0 for times in case["times"].values())
        assert case["speed"]["TP2 CP1"] > 0
    score, train = (
        next(c["sent"]["TP2 CP1"] for c in body["cases"] if c["case"] == name) for name in ("score", "train")
    )
    formula = body["formula"]["TP2 CP1"]
    for purpose, number in formula["forward"].items():
        assert score["per token and layer"].get(purpose, 0.0) == number
        assert train["per token and layer"].get(purpose, 0.0) == 2 * number, "recomputation does it twice"
    for purpose in ("dY", "dX"):
        assert train["per token and layer"][purpose] == formula["backward"][purpose]
