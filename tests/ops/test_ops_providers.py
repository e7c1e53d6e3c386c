"""Providers by name, what is refused, how calls are counted, and the fallback without a C compiler."""

from __future__ import annotations

import functools
import importlib.util
import inspect

import pytest
import torch
from torch import Tensor

from rl_engine.engines.evidence import route_records
from rl_engine.numerics.providers import REGISTRY, capabilities
from rl_engine.ops import OPERATORS, Operators, UnknownProvider, library, uniform
from rl_engine.ops.functions import chain256_gemm
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.weight import Weight
from tests.helpers.numeric import assert_bitwise, assert_close
from tests.helpers.ops import assert_same, bf16_randn, differing, draw_keys, f32_randn, operators, random_weight, run


def test_memory_is_poisoned() -> None:
    """What the other tests rest on: fresh memory holds NaN, so an element that nobody writes shows."""
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.empty(5, dtype=dtype).isnan().all()
        assert torch.empty_like(torch.zeros(3, dtype=dtype)).isnan().all()


def test_unknown_names_raise_and_name_what_exists() -> None:
    with pytest.raises(UnknownProvider, match=r"unknown operator 'conv'; known: adamw, attention, .*swiglu"):
        provider("conv", "cpu")
    with pytest.raises(
        UnknownProvider, match="'cuda' of linear; known: cpu, cublaslt, reference, stock, torch, triton"
    ):
        provider("linear", "cuda")
    with pytest.raises(UnknownProvider, match="'stock' of sample; known: cpu, reference, torch"):
        provider("sample", "stock")
    with pytest.raises(UnknownProvider, match="no provider named for rope"):
        Operators({name: "cpu" for name in OPERATORS if name != "rope"})


@pytest.mark.parametrize(("operator", "name"), [(o, n) for o in OPERATORS for n in REGISTRY[o]])
def test_every_registered_provider_exists_and_defines_its_kernels(operator: str, name: str) -> None:
    """No method is left at the base class's assertion."""
    if "cuda" in capabilities(name).devices and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    made = provider(operator, name)
    if name == "stock":
        assert callable(made) or any(hasattr(made, method) for method in ("packed", "logits", "score"))
        return
    for kind in type(made).__mro__[1:]:
        for kernel, code in vars(kind).items():
            if inspect.isfunction(code) and "a provider defines" in str(code.__code__.co_consts):
                assert getattr(type(made), kernel) is not code, f"{type(made).__name__} has no {kernel}"


def test_uniform_names_a_sampler_and_an_optimizer_for_stock() -> None:
    names = uniform("stock")
    assert {op for op, name in names.items() if name != "stock"} == {"sample", "adamw", "grad_norm"}
    assert uniform("stock", "torch")["sample"] == "torch"
    assert set(uniform("cpu").values()) == {"cpu"} and set(uniform("cpu")) == set(OPERATORS)


def test_routes_count_real_calls_by_operator_dtype_and_rows() -> None:
    ops, weight = Operators(uniform("cpu")), random_weight(20, 30, seed=1)
    assert ops.routes() == []
    with torch.no_grad():
        for rows in (1, 3, 4, 5, 64):
            ops.linear(bf16_randn(rows, 30, seed=2), weight)
    ops.logits(bf16_randn(2, 30, seed=2), weight)
    ops.draw(torch.zeros(2, 20), 1.0, None, draw_keys(2))
    ops.logp_from_logits(torch.zeros(2, 20), torch.tensor([0, 1]), 1.0, None)
    ops.score(
        bf16_randn(9, 30, seed=3), weight, torch.zeros(4).long(), 1.0, None, PackedLayout((9,), (1,)), torch.arange(4)
    )
    found = [(r.operator, r.provider, r.dtype, r.rows, r.calls) for r in ops.routes()]
    assert found == [
        ("linear", "cpu", "bfloat16", 1, 1),
        ("linear", "cpu", "bfloat16", 4, 2),
        ("linear", "cpu", "bfloat16", 8, 1),
        ("linear", "cpu", "bfloat16", 64, 1),
        ("lm_head", "cpu", "bfloat16", 2, 1),
        ("lm_head", "cpu", "int64", 4, 1),
        ("sample", "cpu", "float32", 2, 1),
        ("selected_logp", "cpu", "float32", 2, 1),
        ("selected_logp", "cpu", "int64", 4, 1),
    ]


def test_backward_is_not_counted_as_a_second_call() -> None:
    ops, weight = Operators(uniform("cpu")), random_weight(20, 30, seed=1)
    x = bf16_randn(5, 30, seed=2).requires_grad_()
    ops.linear(x, weight, None, PackedLayout((5,), (1,))).sum().backward()
    assert [(r.operator, r.calls) for r in ops.routes()] == [("linear", 1)]


def test_recorded_calls_count_when_they_are_replayed() -> None:
    """Not when they are captured; apart from calls that were launched, in a run's records too."""
    ops, weight = Operators(uniform("cpu")), random_weight(20, 30, seed=1)
    with torch.no_grad(), ops.recording() as calls:
        ops.linear(bf16_randn(3, 30, seed=2), weight)
        ops.linear(bf16_randn(4, 30, seed=2), weight)
    assert ops.routes() == []
    with torch.no_grad():
        ops.linear(bf16_randn(3, 30, seed=2), weight)
    for _ in range(5):
        ops.count_replay(calls)
    assert [(r.operator, r.rows, r.calls, r.execution) for r in ops.routes()] == [
        ("linear", 4, 1, "eager"),
        ("linear", 4, 10, "graph"),
    ]
    records = route_records(ops.routes(), "rollout")
    assert [(r.execution, r.calls, r.shapes) for r in records] == [
        ("eager", 1, {"T<=4": 1}),
        ("graph", 10, {"T<=4": 10}),
    ]


def test_a_failed_capture_leaves_the_counters_as_they_were() -> None:
    ops, weight = Operators(uniform("cpu")), random_weight(20, 30, seed=1)
    with pytest.raises(ZeroDivisionError), torch.no_grad(), ops.recording():
        ops.linear(bf16_randn(3, 30, seed=2), weight)
        raise ZeroDivisionError
    assert ops.routes() == []


def test_providers_may_be_mixed() -> None:
    mixed = Operators(uniform("cpu") | {"linear": "reference", "swiglu": "torch"})
    weight, x = random_weight(20, 30, seed=1), bf16_randn(5, 30, seed=2)
    with torch.no_grad():
        y = mixed.swiglu(mixed.linear(x, weight))
        assert_bitwise(y, operators("cpu").swiglu(operators("cpu").linear(x, weight)), "mixed")
    assert {(r.operator, r.provider) for r in mixed.routes()} == {("linear", "reference"), ("swiglu", "torch")}


def test_library_is_built_once_and_named_by_what_it_was_built_from() -> None:
    assert library.load() is library.load()
    assert len(library.build_key()) == 64 and library.available()


def test_a_broken_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(library, "compiler", lambda: None)
    with pytest.raises(library.BuildError, match="no C compiler"):
        library.build_key.__wrapped__()


# The fallback: products by the BLAS library in K blocks of 256, everything else as the reference has it.


def fallback_holds() -> bool:
    """Whether this host's BLAS gives the padded blocks the same bits for every row and column count."""
    x, w = bf16_randn(70, 1061, seed=1), bf16_randn(53, 1061, seed=2)
    whole = chain256_gemm(x, w.T)
    rows = all(differing(chain256_gemm(x[:n], w.T), whole[:n]) == 0 for n in range(1, 70))
    return rows and all(differing(chain256_gemm(x, w[:n].T), whole[:, :n]) == 0 for n in range(1, 53))


def test_fallback_is_consistent_here_or_refused() -> None:
    """Where the BLAS library is not row-invariant the start-up proof must find it on the run's shapes."""
    x, w = bf16_randn(70, 1061, seed=1), bf16_randn(53, 1061, seed=2)
    plain = x.float() @ w.float().T
    caught = any(differing(x[:n].float() @ w.float().T, plain[:n]) for n in range(1, 70))
    assert caught, "the control: an unpadded product depends on its row count"
    if fallback_holds():
        return
    from rl_engine.models.config import ModelConfig
    from rl_engine.numerics.contract import Contract
    from rl_engine.qualify.proof import prove

    sizes = {"layers": 1, "hidden": 1061, "intermediate": 1061, "heads": 4, "kv_heads": 2, "head_dim": 32}
    shape = {"architecture": "LlamaForCausalLM", "vocabulary": 503, "tied": False, "qk_norm": False}
    rest = {"norm_eps": 1e-5, "rope_base": 1e4, "rope_scaling": None, "max_positions": 100}
    config = ModelConfig(**sizes, **shape, **rest)
    assert prove(config, [uniform("torch")], Contract(gemm="chain256"), rows=tuple(range(1, 70))).failed


LAYOUT = PackedLayout((1, 37, 70), (1, 2))


def joined(ops: Operators, x: Tensor, *, layout: PackedLayout, weight: Weight, out: Weight) -> Tensor:
    q, k, v = ops.linear(x, weight, None, layout).unflatten(1, (4, 16)).split([2, 1, 1], 1)
    return ops.linear(ops.attention_packed(q, k, v, layout).flatten(1), out, x, layout)


def test_fallback_is_close_to_the_chain() -> None:
    weight, out = random_weight(64, 600, seed=1, scale=0.05), random_weight(600, 32, seed=2)
    x, dout = bf16_randn(LAYOUT.tokens, 600, seed=3), bf16_randn(LAYOUT.tokens, 600, seed=4)
    call = functools.partial(joined, layout=LAYOUT, weight=weight, out=out)
    fallback, chain = (run(operators(n), call, {"x": x}, weight=weight, dout=dout) for n in ("torch", "cpu"))
    for name, value in chain.items():
        atol = 2e-2 * float(value.double().abs().max())
        assert_close(fallback[name], value, rtol=2e-2, atol=atol, why="bf16 roundings that fall the other way")
    logits = [operators(n).logits(x, weight) for n in ("torch", "cpu")]
    assert differing(*logits) > 100, "another order, so another contract id"
    z, targets = f32_randn(5, 700, seed=5), torch.arange(5)
    both = [operators(n).logp_from_logits(z, targets, 0.7, None) for n in ("torch", "cpu")]
    assert_bitwise(both[0][0], both[1][0], "operators without a product have the same bits")


@pytest.mark.skipif(not fallback_holds(), reason="this host's BLAS is not row-invariant: the fallback is refused here")
def test_fallback_does_not_depend_on_the_batch() -> None:
    """Samples alone equal the packed batch, forward and backward; decode equals the training form."""
    weight, out = random_weight(64, 600, seed=1, scale=0.05), random_weight(600, 32, seed=2)
    x, dout = bf16_randn(LAYOUT.tokens, 600, seed=3), bf16_randn(LAYOUT.tokens, 600, seed=4)
    weight.grad = out.grad = None
    call = functools.partial(joined, layout=LAYOUT, weight=weight, out=out)
    whole = run(operators("torch"), call, {"x": x}, dout=dout)
    first = 0
    for length in LAYOUT.lengths:
        part = slice(first, first + length)
        alone = run(
            operators("torch"),
            functools.partial(joined, layout=PackedLayout((length,), (1,)), weight=weight, out=out),
            {"x": x[part]},
            dout=dout[part],
        )
        assert_same(alone, {name: value[part] for name, value in whole.items()}, f"sample of {length}")
        first += length
    q, k, v = (bf16_randn(70, n, 16, seed=7 + n) for n in (2, 1, 1))
    ops = operators("torch")
    with torch.no_grad():
        expected = ops.attention_packed(q, k, v, PackedLayout((70,), (1,)))
        cache = ops.new_cache(1, 1, 16, 10, 8)
        handle, rows = cache.join(), []
        for start, stop in ((0, 50), *((t, t + 1) for t in range(50, 70))):
            batch = cache.batch([handle], [start], [stop - start])
            rows.append(ops.attention_cached(q[start:stop], k[start:stop], v[start:stop], cache, 0, batch))
    assert_bitwise(torch.cat(rows), expected, "decode")
