"""Row-wise operators: RMSNorm, QK norm, rotary embedding, SwiGLU, embedding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rl_engine.ops.functions import tree_sum
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rms_norm.reference import inverse_rms
from rl_engine.ops.swiglu.reference import sigmoid
from rl_engine.ops.weight import Weight
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ops import (
    assert_providers_agree,
    assert_same,
    bf16_randn,
    differing,
    f32_randn,
    in_nan,
    make_weight,
    operators,
    random_weight,
    rope_table,
    run,
)

EPS = 1e-5
ONE = PackedLayout((1,), (1,))
SHORT = PackedLayout((1, 37, 64), (1, 2))
LONG = PackedLayout((63, 65, 1, 130), (1, 2, 1))


@pytest.mark.parametrize("layout", [ONE, SHORT, LONG], ids=lambda layout: f"{layout.tokens}tokens")
@pytest.mark.parametrize("width", [1, 2, 67, 576, 1023, 1024, 1025, 1500, 2304])
def test_rms_norm(width: int, layout: PackedLayout) -> None:
    weight = random_weight(width, seed=1, scale=1.0)
    x = bf16_randn(layout.tokens, width, seed=2, scale=3.0)
    for given in (x, in_nan(x)):
        assert_providers_agree(
            lambda ops, x: ops.rms_norm(x, weight, EPS, layout), {"x": given}, f"norm {width}", weight=weight
        )


@pytest.mark.parametrize("layout", [ONE, SHORT, LONG], ids=lambda layout: f"{layout.tokens}tokens")
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (5, 40), (16, 128)])
def test_qk_norm(heads: int, width: int, layout: PackedLayout) -> None:
    weight = random_weight(width, seed=1, scale=1.0)
    x = bf16_randn(layout.tokens, heads, width, seed=2)
    for given in (x, in_nan(x)):
        assert_providers_agree(
            lambda ops, x: ops.qk_norm(x, weight, EPS, layout), {"x": given}, f"qk norm {heads}", weight=weight
        )


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-18, 1e15])
def test_rms_norm_of_extreme_rows(scale: float) -> None:
    weight = random_weight(100, seed=1)
    x = bf16_randn(5, 100, seed=2) * scale
    layout = PackedLayout((5,), (1,))
    assert_providers_agree(lambda ops, x: ops.rms_norm(x, weight, EPS, layout), {"x": x}, "norm", weight=weight)


def test_norm_row_does_not_depend_on_the_rows_beside_it() -> None:
    weight = random_weight(576, seed=1)
    x = bf16_randn(50, 576, seed=2)
    cpu = operators("cpu")
    with torch.no_grad():
        whole = cpu.rms_norm(x, weight, EPS)
        for row in (0, 15, 16, 17, 49):
            assert_bitwise(cpu.rms_norm(x[row : row + 1], weight, EPS), whole[row : row + 1], f"row {row} alone")


def test_another_order_of_the_norms_sums_is_caught() -> None:
    """The control: torch's own sum and ``rsqrt`` give other inverse roots, and another row rounding other outputs."""
    x = bf16_randn(500, 1500, seed=1).float()
    ours = inverse_rms(x, EPS)
    assert differing(ours, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)) > 50
    assert differing(ours, 1.0 / ((x * x).sum(-1, keepdim=True) / 1500 + EPS).sqrt()) > 20
    weight = random_weight(1500, seed=2, scale=1.0)
    with torch.no_grad():
        y = operators("cpu").rms_norm(x.bfloat16(), weight, EPS)
        assert differing(y, operators("stock").rms_norm(x.bfloat16(), weight, EPS)) > 1000
        wide = functional.rms_norm(x, (1500,), weight.value.float(), EPS).bfloat16()
        assert differing(y, wide) > 0


@pytest.mark.parametrize("heads", [1, 3])
def test_gain_is_folded_unit_by_unit(heads: int) -> None:
    """Units added one after the other equal two micro-batches; one unit over all tokens has other bits."""
    layout = PackedLayout((65, 40, 131), (2, 1))
    weight = random_weight(64, seed=1, scale=1.0)
    x, dout = bf16_randn(236, heads, 64, seed=2), bf16_randn(236, heads, 64, seed=3)

    def gain(pieces: list[tuple[slice, PackedLayout]]) -> torch.Tensor:
        weight.enable_training()
        for rows, part in pieces:
            leaf = x[rows].detach().requires_grad_()
            operators("cpu").qk_norm(leaf, weight, EPS, part).backward(dout[rows])
        assert weight.grad is not None
        return weight.grad

    together = gain([(slice(0, 236), layout)])
    first, second = PackedLayout((65, 40), (2,)), PackedLayout((131,), (1,))
    assert_bitwise(together, gain([(slice(0, 105), first), (slice(105, 236), second)]), "two micro-batches")
    assert differing(together, gain([(slice(0, 236), PackedLayout((236,), (1,)))])) > 10
    terms = dout.float() * (x.float() * inverse_rms(x.float(), EPS))
    assert differing(together, terms.sum((0, 1))) > 10, "torch's own sum has other bits"


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_gain_blocks_count_from_the_units_first_token(name: str) -> None:
    """A unit's sum is the same wherever the unit lies in the micro-batch."""
    norm = operators(name)._providers["rms_norm"]
    terms = f32_randn(200, 1, 33, seed=1)
    both = norm.unit_sums(terms, PackedLayout((50, 150), (1, 1)))
    assert_bitwise(both[1:], norm.unit_sums(terms[50:], PackedLayout((150,), (1,))), "unit behind another")
    by_hand = torch.zeros(33)
    for start in (50, 114, 178):
        block = torch.zeros(64, 33)
        block[: min(64, 200 - start)] = terms[start : start + 64, 0]
        by_hand = by_hand + tree_sum(block.T)
    assert_bitwise(both[1, 0], by_hand, "blocks of 64 by the tree, ascending")


@pytest.mark.parametrize("layout", [ONE, LONG], ids=lambda layout: f"{layout.tokens}tokens")
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 34), (9, 64), (2, 128)])
def test_rope(heads: int, width: int, layout: PackedLayout) -> None:
    table = rope_table(width, 300)
    x = bf16_randn(layout.tokens, heads, width, seed=1)
    for given in (x, in_nan(x)):
        assert_providers_agree(lambda ops, x: ops.rope(x, layout.positions, table), {"x": given}, f"rope {width}")


def test_rope_at_a_position_is_the_same_in_every_batch() -> None:
    table, x = rope_table(64, 3000), bf16_randn(40, 3, 64, seed=1)
    positions = torch.arange(2900, 2940)
    cpu = operators("cpu")
    with torch.no_grad():
        whole = cpu.rope(x, positions, table)
        shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(1))
        assert_bitwise(cpu.rope(x[shuffled], positions[shuffled], table), whole[shuffled], "another order")
        assert_bitwise(cpu.rope(x[7:8], positions[7:8], table), whole[7:8], "one token")


def test_another_rounding_of_rope_is_caught() -> None:
    """The control: the stock operator's bf16 tables, and the same formula with one rounding instead of three."""
    table, x = rope_table(64, 500), bf16_randn(500, 9, 64, seed=1)
    positions = torch.arange(500)
    with torch.no_grad():
        y = operators("cpu").rope(x, positions, table)
        assert differing(y, operators("stock").rope(x, positions, table)) > 1000
    c, s = (t[positions].double().unsqueeze(1) for t in (table.cosine, table.sine))
    first, second = x.double().chunk(2, -1)
    fused = torch.cat([first * c - second * s, second * c + first * s], -1).bfloat16()
    assert differing(y, fused) > 0


def test_rope_table_is_rounded_once_from_fp64() -> None:
    table = rope_table(64, 5000)
    angle = torch.arange(5000, dtype=torch.float64)[:, None] / 10000.0 ** (torch.arange(0, 64, 2).double() / 64)
    assert differing(table.sine, angle.float().sin()) > 1000, "an fp32 angle has other bits"
    assert float((table.sine.double() - angle.sin()).abs().max()) < 2.0**-24
    assert table.digest() == rope_table(64, 5000).digest() != rope_table(64, 4999).digest()


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100, 1536])
def test_swiglu(rows: int, width: int) -> None:
    x = bf16_randn(rows, 2 * width, seed=1, scale=4.0)
    assert_providers_agree(lambda ops, x: ops.swiglu(x), {"x": x}, f"swiglu {width}")


def test_swiglu_of_large_gates() -> None:
    gates = torch.tensor([-1e4, -200.0, -89.0, -88.0, -87.0, -0.0, 0.0, 87.0, 89.0, 1e4])
    x = torch.cat([gates, torch.full((10,), 1.5)]).bfloat16()[None]
    got = assert_providers_agree(lambda ops, x: ops.swiglu(x), {"x": x}, "swiglu")
    assert got["out0"][0, -1] == torch.tensor(1.5e4).bfloat16()


def test_stock_swiglu_is_caught() -> None:
    """The control: the stock operator rounds twice, and ``F.silu`` has other bits in fp32."""
    x = bf16_randn(300, 1000, seed=1, scale=3.0)
    with torch.no_grad():
        y = operators("cpu").swiglu(x)
        assert differing(y, operators("stock").swiglu(x)) > 1000
    gate = x[:, :1000].float()
    assert differing(gate * sigmoid(gate), functional.silu(gate)) > 1000, "fp32, before the rounding"


def looked_up(name: str, weight: Weight, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The table's gradient after micro-batches of (ids, upstream gradient)."""
    weight.enable_training()
    for ids, dout in steps:
        operators(name).embedding(ids, weight).backward(dout)
    operators(name).finish_embedding(weight)
    assert weight.grad is not None and not weight.lookups
    return weight.grad


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 63), (200, 65), (500, 130)])
def test_embedding(tokens: int, width: int) -> None:
    weight = random_weight(23, width, seed=1)
    ids = torch.randint(0, 23, (tokens,), generator=torch.Generator().manual_seed(2))
    dout = bf16_randn(tokens, width, seed=3)
    with torch.no_grad():
        assert_bitwise(operators("cpu").embedding(ids, weight), weight.value[ids], "lookup")
    expected = looked_up("reference", weight, [(ids, dout)])
    assert_bitwise(looked_up("cpu", weight, [(ids, dout)]), expected, "gradient")
    strided = torch.stack([ids, ids.flip(0)], 1)[:, 0]
    assert_bitwise(looked_up("cpu", weight, [(strided, in_nan(dout))]), expected, "strided ids and rows")


def test_embedding_adds_in_token_order_over_all_micro_batches() -> None:
    weight = random_weight(5, 40, seed=1)
    ids = torch.randint(0, 5, (300,), generator=torch.Generator().manual_seed(2))
    dout = (f32_randn(300, 40, seed=3) * torch.exp(3.0 * f32_randn(300, 40, seed=4))).bfloat16()
    whole = looked_up("cpu", weight, [(ids, dout)])
    assert_bitwise(looked_up("cpu", weight, list(zip(ids.split(70), dout.split(70), strict=True))), whole, "five")
    assert differing(looked_up("cpu", weight, [(ids.flip(0), dout.flip(0))]), whole) > 20, "another order"
    separate = sum(looked_up("cpu", weight, [piece]) for piece in zip(ids.split(70), dout.split(70), strict=True))
    assert differing(separate, whole) > 20, "micro-batches folded one by one"


def test_tied_head_adds_its_gradient_once() -> None:
    weight = random_weight(5, 40, seed=1)
    ids, dout = torch.arange(5).repeat(20), bf16_randn(100, 40, seed=3)
    alone = looked_up("cpu", weight, [(ids, dout)])
    weight.enable_training()
    head = f32_randn(5, 40, seed=4)
    weight.grad = head.clone()
    operators("cpu").embedding(ids, weight).backward(dout)
    operators("cpu").finish_embedding(weight)
    assert_bitwise(weight.grad, head + alone, "G_head + G_lookup")


def test_backward_runs_through_slices_of_a_joined_projection() -> None:
    """q, k, v as slices of one tensor through norm and rope: the gradients land in the joined tensor's columns."""
    table, weight = rope_table(16, 50), random_weight(16, seed=1, scale=1.0)
    layout = PackedLayout((31, 12), (1, 1))

    def call(ops, qkv):  # type: ignore[no-untyped-def]
        q, rest = qkv[:, :64].unflatten(1, (4, 16)), qkv[:, 64:]
        q = ops.rope(ops.qk_norm(q, weight, EPS, layout), layout.positions, table)
        return torch.cat([q.flatten(1), rest], 1)

    qkv = bf16_randn(43, 96, seed=2)
    assert_providers_agree(call, {"qkv": qkv}, "slices", weight=weight)
    got = run(operators("cpu"), call, {"qkv": in_nan(qkv)}, weight=weight)
    assert_same(got, run(operators("reference"), call, {"qkv": qkv}, weight=weight), "joined tensor in NaN")


def test_weight_without_gradient_still_gives_the_inputs_one() -> None:
    weight = make_weight(bf16_randn(64, seed=1), trains=False)
    x = bf16_randn(9, 64, seed=2).requires_grad_()
    operators("cpu").rms_norm(x, weight, EPS).backward(bf16_randn(9, 64, seed=3))
    assert weight.grad is None and x.grad is not None and not x.grad.isnan().any()
