"""The start-up proof passes providers that keep the contract and catches deliberately wrong ones at a small shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.numerics.contract import Contract
from rl_engine.ops import operators, uniform
from rl_engine.ops.attention.reference import ReferenceAttention
from rl_engine.ops.functions import chain_gemm
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.linear.reference import ReferenceLinear
from rl_engine.ops.lm_head.reference import ReferenceHead
from rl_engine.ops.rms_norm.reference import ReferenceNorm
from rl_engine.ops.selected_logp.reference import ReferenceLogp
from rl_engine.qualify.proof import Case, order_revealing, prove

SMALL = ModelConfig("Qwen3ForCausalLM", 1, 96, 80, 4, 2, 32, 300, False, True, 1e-6, 1e4, None, 256)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """The BLAS library's order."""
    return a.float() @ b.float()


def split(a: Tensor, b: Tensor) -> Tensor:
    """Two chains over halves of the axis, then their sum."""
    half = a.shape[1] // 2
    return chain_gemm(a[:, :half], b[:half]) + chain_gemm(a[:, half:], b[half:])


def swapped(a: Tensor, b: Tensor) -> Tensor:
    """The chain with neighbouring steps exchanged, as an unswapped dot-product pair would do."""
    order = torch.arange(a.shape[1])
    even = order[: a.shape[1] // 2 * 2].view(-1, 2).flip(1).flatten()
    order = torch.cat([even, order[len(even) :]])
    return chain_gemm(a[:, order], b[order])


class MmLinear(ReferenceLinear):
    gemm = staticmethod(mm)


class SplitHead(ReferenceHead):
    gemm = staticmethod(split)


class SwappedHead(ReferenceHead):
    gemm = staticmethod(swapped)


class PreloadedLinear(ReferenceLinear):
    """The gradient so far as the accumulator's start."""

    def add_weight_gradient(self, dy: Tensor, x: Tensor, layout: PackedLayout, grad: Tensor) -> None:
        for first, last in layout.unit_bounds:
            for token in range(first, last):
                grad.add_(dy[token, :, None].float() * x[token].float())


class TorchSumNorm(ReferenceNorm):
    def unit_sums(self, terms: Tensor, layout: PackedLayout) -> Tensor:
        return torch.stack([terms[first:last].sum(0) for first, last in layout.unit_bounds])


class ReversedHeads(ReferenceAttention):
    """dK and dV over the group's query heads in descending order."""

    def backward_runs(self, dout, q, k, v, lse, delta, layout, runs):  # type: ignore[no-untyped-def]
        group = q.shape[1] // k.shape[1]
        order = torch.arange(q.shape[1]).view(-1, group).flip(1).flatten()
        dq, dk, dv = super().backward_runs(
            dout[:, order], q[:, order], k, v, lse[:, order], delta[:, order], layout, runs
        )
        return dq[:, order], dk, dv


class SoftmaxSumLogp(ReferenceLogp):
    @staticmethod
    def _tile(zs: Tensor, exists: Tensor):  # type: ignore[no-untyped-def]
        m, _, w = ReferenceLogp._tile(zs, exists)
        e = torch.where(exists, (zs - m[:, None]).exp(), 0.0)
        return m, e.sum(1), w


def failures(monkeypatch: pytest.MonkeyPatch, operator: str, wrong: type) -> tuple[Case, ...]:
    """Cases that fail when ``wrong`` stands in for one operator's provider."""
    real = operators.provider

    def provider(name: str, chosen: str) -> object:
        return wrong() if (name, chosen) == (operator, "cpu") else real(name, chosen)

    monkeypatch.setattr("rl_engine.qualify.proof.provider", provider)
    return prove(SMALL, [uniform("cpu")], Contract(), rows=(1, 13)).failed


def test_the_contract_providers_pass() -> None:
    proof = prove(SMALL, [uniform("cpu"), uniform("cpu")], Contract(), rows=(1, 12, 13))
    assert not proof.failed
    assert {case.operator for case in proof.cases} == {*operators.OPERATORS, "functions"}


def test_stock_operators_are_not_judged() -> None:
    assert {case.provider for case in prove(SMALL, [uniform("stock")], Contract(), rows=(1,)).cases} == {"cpu"}


@pytest.mark.parametrize(
    ("operator", "wrong", "seen"),
    [
        ("linear", MmLinear, "dX"),
        ("linear", PreloadedLinear, "dW"),
        ("lm_head", SplitHead, "order"),
        ("lm_head", SwappedHead, "order"),
        ("rms_norm", TorchSumNorm, "gain"),
        ("attention", ReversedHeads, "order"),
        ("selected_logp", SoftmaxSumLogp, "logp"),
    ],
)
def test_a_wrong_provider_is_caught(monkeypatch: pytest.MonkeyPatch, operator: str, wrong: type, seen: str) -> None:
    failed = failures(monkeypatch, operator, wrong)
    assert failed, f"{wrong.__name__} passed the proof"
    assert any(seen in case.what for case in failed), [case.what for case in failed]
    assert {case.operator for case in failed} <= {operator, "linear", "lm_head"}


def test_the_digest_tells_what_was_proven() -> None:
    one = prove(SMALL, [uniform("cpu")], Contract(), rows=(1,))
    again = prove(SMALL, [uniform("cpu")], Contract(), rows=(1,))
    other = prove(SMALL, [uniform("cpu")], Contract(fold_tokens=7), rows=(1,))
    assert one.digest == again.digest != other.digest


def test_revealing_data_reveals() -> None:
    """Units of 1 would be exact beside 2^22 and hide every order."""
    x = order_revealing(8, 96, torch.Generator().manual_seed(3))
    ones = torch.ones(96, 5)
    assert not torch.equal(chain_gemm(x, ones), split(x, ones))
    assert not torch.equal(chain_gemm(x, ones), swapped(x, ones))


def test_gpu_providers_need_a_fresh_proof_of_this_model(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Without one, with a stale one, or with one of other shapes, a consistency run is refused; with it the digest goes
    into the qualification's."""
    gemm_table = pytest.importorskip("rl_engine.ops.gemm_table")
    from rl_engine.qualify.gpu.run import model, shapes

    monkeypatch.setattr(gemm_table, "path", lambda: tmp_path / "table.json")
    monkeypatch.setattr(gemm_table, "identity", lambda: {"device": "one", "driver": "1"})
    gemm_table.current.cache_clear()
    sides = [uniform("cpu") | {"linear": "cublaslt", "lm_head": "cublaslt"}]
    missing = prove(SMALL, sides, Contract())
    assert [case.what for case in missing.failed] == [
        "the GPU's matrix products are not proven here: run rlk-repro qualify"
    ]
    choice = gemm_table.Choice(None, "00" * 64)
    entries = {str(shape): [(1, choice)] for shape in shapes(SMALL)}
    digests = []
    for digest in ("a" * 64, "b" * 64):
        models = {model(SMALL): digest}
        gemm_table.keep(gemm_table.Table({"device": "one", "driver": "1"}, entries, digest, models=models))
        proof = prove(SMALL, sides, Contract())
        assert proof.failed == ()
        digests.append(proof.digest)
    assert digests[0] != digests[1]
    gemm_table.keep(gemm_table.Table({"device": "one", "driver": "2"}, entries, "a" * 64))
    assert "stale (other driver)" in prove(SMALL, sides, Contract()).failed[0].what
    gemm_table.keep(gemm_table.Table({"device": "one", "driver": "1"}, dict(list(entries.items())[1:]), "a" * 64))
    assert "1 shapes of this model were not proven" in prove(SMALL, sides, Contract()).failed[0].what
    gemm_table.keep(gemm_table.Table({"device": "one", "driver": "1"}, entries, "a" * 64))
    assert "attention and row operators were not proven for hidden 96" in prove(SMALL, sides, Contract()).failed[0].what
    failed = gemm_table.Table({"device": "one", "driver": "1"}, {}, "a" * 64, failed="attention, triton: dQ; 1 in all")
    gemm_table.keep(failed)
    assert "the last proof failed (attention, triton: dQ; 1 in all)" in prove(SMALL, sides, Contract()).failed[0].what
    gemm_table.current.cache_clear()


def test_qualify_names_its_providers() -> None:
    from rl_engine.qualify import cli
    from rl_engine.records.errors import UserError

    with pytest.raises(UserError, match="cpu, torch or gpu"):
        cli.main(["--provider", "abacus"])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no GPU that torch sees"):
            cli.main(["--provider", "gpu"])
