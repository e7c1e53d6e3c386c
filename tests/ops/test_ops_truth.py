"""Truth, not only bits: forward and gradient errors against fp64 autograd, at most twice those of the stock operator.

Errors are Frobenius norms relative to the fp64 result's. A result that is zero in exact arithmetic (the score gradient
of a sample of one token) has no relative error; there a floor of ``SCALE`` times the upstream gradient's norm decides.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import Operators
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.weight import Weight
from tests.helpers.ops import bf16_randn, f32_randn, generator, make_weight, operators, rope_table, run

SCALE = 1e-6  # of the upstream gradient: a few fp32 roundings of quantities that cancel
Named = dict[str, Tensor]


def truth(call: Callable[..., Tensor], inputs: Named, value: Tensor | None, dout: Tensor) -> Named:
    """The same names as :func:`run`, from fp64 autograd; ``call(*inputs, weight)``."""
    leaves = {name: x.double().detach().requires_grad_() for name, x in inputs.items()}
    weight = None if value is None else value.double().detach().requires_grad_()
    out = call(*leaves.values()) if weight is None else call(*leaves.values(), weight)
    out.backward(dout.double())
    result = {"out0": out.detach()} | {f"d{name}": x.grad for name, x in leaves.items()}
    return result if weight is None else result | {"dw": weight.grad}


def stock(call: Callable[..., Tensor], inputs: Named, weight: Weight | None, dout: Tensor) -> Named:
    """The stock operator: its weight is a plain bf16 tensor with autograd's own gradient."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    if weight is not None:
        weight.value = weight.value.detach().requires_grad_()
    out = call(operators("stock"), *leaves.values())
    out = out[0] if isinstance(out, tuple) else out
    out.backward(dout.to(out.dtype))
    result = {"out0": out.detach()} | {f"d{name}": x.grad for name, x in leaves.items()}
    if weight is not None:
        result["dw"] = weight.value.grad
        weight.value = weight.value.detach()
    return result


def judge(
    call: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Named, weight: Weight | None, dout: Tensor
) -> None:
    expected = truth(exact, inputs, None if weight is None else weight.value, dout)
    theirs = stock(call, inputs, weight, dout)
    ours = run(operators("cpu"), call, inputs, weight=weight, dout=dout)
    for name, value in expected.items():
        assert not ours[name].isnan().any(), name
        error, allowed = ((x[name].double() - value).norm() for x in (ours, theirs))
        floor = SCALE * (dout.double().norm() + value.norm())
        assert float(error) <= 2.0 * float(allowed) + float(floor), (
            f"{name}: error {float(error):.3g}, stock {float(allowed):.3g}, norm {float(value.norm()):.3g}"
        )
        far = 0.1 * value.norm() + 0.01 * dout.double().norm()
        assert float(error) <= float(far), f"{name}: both are far from fp64"


def one_unit(tokens: int) -> PackedLayout:
    return PackedLayout((tokens,), (1,))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("tokens", "depth", "columns"), [(1, 576, 192), (37, 67, 75), (130, 1061, 129), (5, 1, 1)])
def test_linear(tokens: int, depth: int, columns: int, with_residual: bool) -> None:
    weight, layout = make_weight(bf16_randn(columns, depth, seed=1, scale=0.05)), one_unit(tokens)
    inputs = {"x": bf16_randn(tokens, depth, seed=2)}
    if with_residual:
        inputs["residual"] = bf16_randn(tokens, columns, seed=3)

    def call(ops: Operators, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return ops.linear(x, weight, residual, layout)

    def exact(x: Tensor, *rest: Tensor) -> Tensor:
        y = x @ rest[-1].T
        return y + rest[0] if with_residual else y

    judge(call, exact, inputs, weight, bf16_randn(tokens, columns, seed=4))


def norm64(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w


@pytest.mark.parametrize("shape", [(1, 576), (37, 67), (130, 1500), (300, 64), (1, 3, 64), (65, 5, 40)])
def test_norms(shape: tuple[int, ...]) -> None:
    weight, layout = make_weight(bf16_randn(shape[-1], seed=1)), one_unit(shape[0])
    name = "rms_norm" if len(shape) == 2 else "qk_norm"
    inputs, dout = {"x": bf16_randn(*shape, seed=2, scale=3.0)}, bf16_randn(*shape, seed=3)
    judge(lambda ops, x: getattr(ops, name)(x, weight, 1e-5, layout), norm64, inputs, weight, dout)


def rope64(x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
    c, s = (t[positions].double().unsqueeze(1) for t in (table.cosine, table.sine))
    first, second = x.chunk(2, -1)
    return torch.cat([first * c - second * s, second * c + first * s], -1)


@pytest.mark.parametrize("shape", [(1, 3, 64), (37, 9, 34), (300, 2, 128)])
def test_rope(shape: tuple[int, ...]) -> None:
    table, positions = rope_table(shape[2], 1000), torch.arange(shape[0]) + 500
    inputs, dout = {"x": bf16_randn(*shape, seed=2)}, bf16_randn(*shape, seed=3)
    judge(lambda ops, x: ops.rope(x, positions, table), lambda x: rope64(x, positions, table), inputs, None, dout)


def swiglu64(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize(("tokens", "width"), [(1, 1536), (37, 15), (64, 1001)])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_swiglu(tokens: int, width: int, scale: float) -> None:
    inputs = {"x": bf16_randn(tokens, 2 * width, seed=2, scale=scale)}
    judge(lambda ops, x: ops.swiglu(x), swiglu64, inputs, None, bf16_randn(tokens, width, seed=3))


def attention64(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    group, outs = q.shape[1] // k.shape[1], []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        ks, vs = (x.repeat_interleave(group, 1) for x in (ks, vs))
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * q.shape[2] ** -0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), vs))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        ((4, 2, 32), (1,)),
        ((2, 1, 17), (2, 1)),
        ((6, 2, 64), (63, 65)),
        ((9, 3, 64), (37, 130)),
        ((4, 4, 40), (200,)),
        ((2, 1, 64), (1100,)),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_attention(heads: tuple[int, int, int], lengths: tuple[int, ...], scale: float) -> None:
    layout, tokens = PackedLayout(lengths, (len(lengths),)), sum(lengths)
    inputs = {
        "q": bf16_randn(tokens, heads[0], heads[2], seed=1, scale=scale),
        "k": bf16_randn(tokens, heads[1], heads[2], seed=2),
        "v": bf16_randn(tokens, heads[1], heads[2], seed=3),
    }
    judge(
        lambda ops, q, k, v: ops.attention_packed(q, k, v, layout),
        lambda q, k, v: attention64(q, k, v, lengths),
        inputs,
        None,
        bf16_randn(tokens, heads[0], heads[2], seed=4),
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(("tokens", "vocabulary", "masked"), [(1, 5001, False), (37, 129, True), (130, 2049, True)])
def test_score(tokens: int, vocabulary: int, masked: bool, temperature: float) -> None:
    weight, layout, rows = (
        make_weight(bf16_randn(vocabulary, 67, seed=1, scale=0.3)),
        one_unit(tokens),
        torch.arange(tokens),
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator(2))
    keep = torch.ones(tokens, -(-vocabulary // 8) * 8, dtype=torch.bool)
    if masked:
        keep = torch.rand(keep.shape, generator=generator(3)) < 0.2
        keep[rows, targets] = True
    mask = (keep.unflatten(1, (-1, 8)).long() << torch.arange(8)).sum(2).to(torch.uint8) if masked else None

    def exact(hidden: Tensor, w: Tensor) -> Tensor:
        z = (hidden @ w.T / temperature).masked_fill(~keep[:, :vocabulary], -torch.inf)
        return z.log_softmax(1).gather(1, targets[:, None])[:, 0]

    judge(
        lambda ops, h: ops.score(h, weight, targets, temperature, mask, layout, rows),
        exact,
        {"h": bf16_randn(tokens, 67, seed=4)},
        weight,
        f32_randn(tokens, seed=5),
    )


@pytest.mark.parametrize("vocabulary", [2, 129, 5001])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logp_and_entropy_of_fp32_logits(vocabulary: int, temperature: float) -> None:
    z, targets = (
        f32_randn(50, vocabulary, seed=1, scale=3.0),
        torch.randint(0, vocabulary, (50,), generator=generator(2)),
    )
    logps = (z.double() / temperature).log_softmax(1)
    exact = logps.gather(1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(1)
    ours, theirs = (operators(name).logp_from_logits(z, targets, temperature, None) for name in ("cpu", "stock"))
    for found, native, expected, what in zip(ours, theirs, exact, ("logp", "entropy"), strict=True):
        error, allowed = ((x.double() - expected).norm() / expected.norm() for x in (found, native))
        assert float(error) <= max(2.0 * float(allowed), 1e-6), (
            f"{what}: {float(error):.3g}, stock {float(allowed):.3g}"
        )


@pytest.mark.parametrize(("tokens", "width"), [(1, 65), (37, 1), (500, 64)])
def test_embedding(tokens: int, width: int) -> None:
    weight = make_weight(bf16_randn(11, width, seed=1))
    ids, dout = torch.randint(0, 11, (tokens,), generator=generator(2)), bf16_randn(tokens, width, seed=3)
    exact = torch.zeros(11, width, dtype=torch.float64).index_add(0, ids, dout.double())
    native = stock(lambda ops: ops.embedding(ids, weight), {}, weight, dout)["dw"]
    operators("cpu").embedding(ids, weight).backward(dout)
    operators("cpu").finish_embedding(weight)
    assert weight.grad is not None
    error, allowed = ((x.double() - exact).norm() for x in (weight.grad, native))
    assert float(error) <= 2.0 * float(allowed) + SCALE * float(exact.norm())


def layer(ops: Operators, x: Tensor, weights: dict[str, Weight], layout: PackedLayout, table: RopeTable) -> Tensor:
    """A small decoder layer through the operators' autograd glue: 4 query heads, 2 KV heads of 16, hidden 48."""
    h = ops.rms_norm(x, weights["norm"], 1e-5, layout)
    q, k, v = ops.linear(h, weights["qkv"], None, layout).split([64, 32, 32], 1)
    q, k, v = (t.unflatten(1, (-1, 16)) for t in (q, k, v))
    q = ops.rope(ops.qk_norm(q, weights["q_norm"], 1e-5, layout), layout.positions, table)
    k = ops.rope(ops.qk_norm(k, weights["k_norm"], 1e-5, layout), layout.positions, table)
    x = ops.linear(ops.attention_packed(q, k, v, layout).flatten(1), weights["o"], x, layout)
    h = ops.swiglu(ops.linear(ops.rms_norm(x, weights["norm2"], 1e-5, layout), weights["gate_up"], None, layout))
    return ops.linear(h, weights["down"], x, layout)


def layer64(x: Tensor, w: Named, lengths: tuple[int, ...], positions: Tensor, table: RopeTable) -> Tensor:
    q, k, v = (norm64(x, w["norm"]) @ w["qkv"].T).split([64, 32, 32], 1)
    q, k, v = (t.unflatten(1, (-1, 16)) for t in (q, k, v))
    q, k = (rope64(norm64(t, w[n]), positions, table) for t, n in ((q, "q_norm"), (k, "k_norm")))
    x = x + attention64(q, k, v, lengths).flatten(1) @ w["o"].T
    return x + swiglu64(norm64(x, w["norm2"]) @ w["gate_up"].T) @ w["down"].T


SHAPES = {"norm": (48,), "qkv": (128, 48), "q_norm": (16,), "k_norm": (16,), "o": (48, 64), "norm2": (48,)}
SHAPES |= {"gate_up": (130, 48), "down": (48, 65), "head": (301, 48), "embedding": (29, 48)}


def test_a_whole_layer_end_to_end() -> None:
    """Embedding, a layer, head and logp: every gradient against fp64 autograd and the stock operators' own."""
    lengths = (1, 37, 70)
    layout, table, tokens = PackedLayout(lengths, (1, 2)), rope_table(16, 100), sum(lengths)
    values = {n: bf16_randn(*s, seed=i, scale=0.15) for i, (n, s) in enumerate(SHAPES.items())}
    values |= {n: (1.0 + values[n].float()).bfloat16() for n in SHAPES if "norm" in n}
    ids, targets = (torch.randint(0, n, (tokens,), generator=generator(n)) for n in (29, 301))
    rows, c = torch.arange(tokens), f32_randn(tokens, seed=50)

    def ours(name: str) -> Named:
        ops, weights = operators(name), {n: make_weight(v.clone()) for n, v in values.items()}
        if name == "stock":
            for weight in weights.values():
                weight.value.requires_grad_()
        x = layer(ops, ops.embedding(ids, weights["embedding"]), weights, layout, table)
        logp, _ = ops.score(x, weights["head"], targets, 0.7, None, layout, rows)
        logp.backward(c)
        ops.finish_embedding(weights["embedding"])
        gradients = {n: w.value.grad if name == "stock" else w.grad for n, w in weights.items()}
        return {"logp": logp.detach()} | {n: g for n, g in gradients.items() if g is not None}

    wide = {n: v.double().requires_grad_() for n, v in values.items()}
    z = layer64(wide["embedding"][ids], wide, lengths, layout.positions, table) @ wide["head"].T / 0.7
    logp = z.log_softmax(1).gather(1, targets[:, None])[:, 0]
    logp.backward(c.double())
    expected = {"logp": logp.detach()} | {n: w.grad for n, w in wide.items() if w.grad is not None}
    cpu, native = ours("cpu"), ours("stock")
    assert cpu.keys() == native.keys() == expected.keys() == {"logp", *SHAPES}
    for name, value in expected.items():
        error, allowed = (float((x[name].double() - value).norm() / value.norm()) for x in (cpu, native))
        assert error <= 2.0 * allowed and error < 0.03, f"{name}: error {error:.3g}, stock {allowed:.3g}"
