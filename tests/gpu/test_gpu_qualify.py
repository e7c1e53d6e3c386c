"""``qualify`` on a GPU: every part holds for the demo's and Qwen3-8B's sizes, wrong operators are caught and named, a
proof is kept, and one that failed refuses it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.model import QWEN3_8B
from rl_engine.models.config import parse_config
from rl_engine.ops import gemm_table
from rl_engine.ops.layout import PackedLayout
from rl_engine.qualify import cli
from tests.helpers.gpu import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

DEMO, LARGE = parse_config(cli.DEMO_SHAPE), parse_config(QWEN3_8B)
CONTROLS = {
    "attention": {"values backwards", "library's sum, 4 warps", "contraction on"},
    "rms_norm": {"torch's sum of gain terms"},
    "selected_logp": {"tl.sum, 1 warps", "tl.sum, 4 warps", "contraction on"},
}


@pytest.mark.parametrize("config", [DEMO, LARGE], ids=["demo", "8b"])
def test_every_operator_of_a_model_holds(config: Any) -> None:
    from rl_engine.qualify.gpu.parts import operators as proven
    from rl_engine.qualify.gpu.run import PROVERS

    cases = proven(config, PROVERS)
    assert [case for case in cases if not case.holds] == []
    operators = {"attention", "rms_norm", "rope", "swiglu", "embedding", "adamw", "grad_norm", "sample", "linear"}
    assert {case.operator for case in cases} == operators | {"selected_logp"} | (
        {"qk_norm"} if config.qk_norm else set()
    )
    for operator, names in CONTROLS.items():
        assert names <= {case.what for case in cases if case.control and case.operator == operator}


def test_wrong_attention_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_engine.ops.attention import triton as attention
    from rl_engine.qualify import gpu_attention as proof
    from rl_engine.qualify.gpu.data import Inputs

    class Wrong(attention.TritonAttention):
        """Contraction in the forward; dK and dV over the group's query heads descending."""

        def forward_runs(
            self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, runs: Any
        ) -> tuple[Tensor, Tensor]:
            if self.tiles is attention.ANCHOR:
                return super().forward_runs(q, k, v, layout, runs)
            tile, out = self.tiles[q.shape[2]].forward, torch.empty_like(q)
            items = attention.query_tiles(layout, runs, tile.queries, False, q.device)
            lse = attention.by_head(*q.shape[:2], q.device)
            attention.forward_tiles(q, k, v, items, items, 0, out, lse, tile, proof.fused)
            return out, lse

        def backward_runs(
            self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *rest: Any
        ) -> Any:
            if self.tiles is attention.ANCHOR:
                return super().backward_runs(dout, q, k, v, lse, delta, *rest)
            group = q.shape[1] // k.shape[1]
            order = torch.arange(q.shape[1]).view(-1, group).flip(1).flatten().cuda()
            found = super().backward_runs(
                *(x[:, order] for x in (dout, q)), k, v, *(x[:, order] for x in (lse, delta)), *rest
            )
            return found[0][:, order], *found[1:]

    monkeypatch.setattr(proof, "TritonAttention", Wrong)
    cases = [case for part in ("forward", "backward") for case in getattr(proof, part)(DEMO, Inputs())]
    named = {case.what for case in cases if not case.holds}
    assert {"LSE, fp32, default", "dK, default", "dV, default"} <= named
    assert not any("fp64" in what or what in ("dQ, default", "values backwards") for what in named), named


def test_wrong_row_operators_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_engine.ops.operators import provider
    from rl_engine.ops.rms_norm.triton import TritonNorm
    from rl_engine.ops.rope.triton import TritonRope
    from rl_engine.ops.swiglu.triton import TritonSwiglu
    from rl_engine.qualify import gpu_rows as proof
    from rl_engine.qualify.gpu.data import Inputs

    class Norm(TritonNorm):
        def unit_sums(self, terms: Tensor, layout: PackedLayout) -> Tensor:
            return torch.stack([terms[first:last].sum(0) for first, last in layout.unit_bounds])

    class Rope(TritonRope):
        def rotate(self, x: Tensor, positions: Tensor, table: Any, sign: float) -> Tensor:
            return super().rotate(x, positions + 1, table, sign)

    class Swiglu(TritonSwiglu):
        def forward(self, x: Tensor) -> Tensor:
            up, gate = x.chunk(2, 1)
            return super().forward(torch.cat([gate, up], 1))

    wrong = {"rms_norm": Norm, "rope": Rope, "swiglu": Swiglu}

    def wrongly(operator: str, name: str) -> Any:
        return wrong[operator]() if name == "triton" and operator in wrong else provider(operator, name)

    monkeypatch.setattr(proof, "provider", wrongly)
    cases = [case for part in ("norms", "rotation", "swiglu", "draws") for case in getattr(proof, part)(DEMO, Inputs())]
    failed = {(case.operator, case.what) for case in cases if not case.holds}
    assert {("rms_norm", "order-revealing gain terms"), ("rope", "sign +1"), ("rope", "sign -1")} <= failed
    assert ("swiglu", "forward, fp64") in failed
    assert {operator for operator, _ in failed} == set(wrong)


def test_the_command_proves_keeps_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a small model and few row counts: exit 0 and a table; the kept proof; a control that is not caught, exit 1."""
    from rl_engine.qualify.gpu import run

    shape = {**cli.DEMO_SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    shape |= {"head_dim": 128, "num_key_value_heads": 1, "vocab_size": 2000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr(gemm_table, "path", lambda: tmp_path / "kept" / gemm_table.NAME)
    gemm_table.current.cache_clear()
    monkeypatch.setattr(run, "prove", functools.partial(run.prove, points=(1, 64)))
    words = ["--provider", "gpu", "--model-root", str(tmp_path), "--tp", "2"]
    assert cli.main(words) == 0
    first = capsys.readouterr()
    assert " 0 failed, 0 candidates refuted" in first.out and "qualified in" in first.err
    assert "attention, library's sum, 4 warps: caught" in first.out and "controls, split-K: caught" in first.out
    config = parse_config(json.loads((tmp_path / "config.json").read_text()))
    assert gemm_table.current().models[run.model(config)] == gemm_table.current().digest
    assert {"fold 768x256", "fold 384x256", "dx 128x768"} <= set(gemm_table.current().entries)
    assert cli.main([*words, "--json"]) == 0
    again = capsys.readouterr()
    assert "proven earlier" in again.err and json.loads(again.out)["digest"] == gemm_table.current().digest
    real = run.wrong_product
    monkeypatch.setattr(run, "wrong_product", lambda a, b, out, **mistake: real(a, b, out))
    assert cli.main([*words, "--again"]) == 1
    failed = capsys.readouterr()
    assert "split-K: NOT CAUGHT" in failed.out and "consistency refused" in failed.err
    with pytest.raises(
        gemm_table.NotQualified, match=r"the last proof failed \(controls, control: split-K; 2 in all\)"
    ):
        gemm_table.current()
    gemm_table.current.cache_clear()
