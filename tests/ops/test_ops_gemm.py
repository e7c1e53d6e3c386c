"""Linear and LM head: every product is one fp32 chain, whatever the rows, columns, threads, strides and packing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rl_engine.ops import cpu_gemm
from rl_engine.ops.functions import chain_gemm
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import Operators
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ops import (
    THREADS,
    assert_providers_agree,
    assert_same,
    bf16_randn,
    differing,
    f32_randn,
    in_nan,
    kernel_threads,
    make_weight,
    operators,
    order_revealing,
    random_weight,
    run,
)

DEPTHS = (1, 2, 15, 16, 17, 37, 255, 256, 257, 1024, 1061, 2049)
ROWS = (1, 2, 3, 7, 11, 12, 13, 24, 25, 48, 49, 95, 96, 97, 100)
COLUMNS = (1, 2, 15, 31, 32, 33, 63, 65, 75)


def logits(ops: Operators, x: Tensor, value: Tensor) -> Tensor:
    """The product in fp32, before any rounding."""
    return ops.logits(x, make_weight(value, trains=False))


def data(kind: str, rows: int, depth: int, columns: int) -> tuple[Tensor, Tensor]:
    if kind == "random":
        return bf16_randn(rows, depth, seed=depth), bf16_randn(columns, depth, seed=depth + 1)
    return order_revealing(rows, depth, seed=depth), torch.ones(columns, depth, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["random", "order-revealing"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_fp32_product_is_the_chain(depth: int, kind: str) -> None:
    x, w = data(kind, 100, depth, 75)
    expected = chain_gemm(x, w.T)
    cpu = operators("cpu")
    for threads in THREADS:
        with kernel_threads(threads):
            assert_bitwise(logits(cpu, x, w), expected, f"K {depth}, {threads} threads")
    for rows in ROWS:
        assert_bitwise(logits(cpu, x[:rows], w), expected[:rows], f"K {depth}, {rows} rows")
        assert_bitwise(logits(cpu, x[100 - rows :], w), expected[100 - rows :], f"K {depth}, last {rows} rows")
    for columns in COLUMNS:
        assert_bitwise(logits(cpu, x[:13], w[:columns]), expected[:13, :columns], f"K {depth}, {columns} columns")


@pytest.mark.parametrize("kind", ["random", "order-revealing"])
@pytest.mark.parametrize("depth", [1024, 1061, 2049])
def test_the_librarys_product_is_caught(depth: int, kind: str) -> None:
    """The control: BLAS takes another order on the same inputs, and so does a product in two halves of K."""
    x, w = data(kind, 100, depth, 75)
    chain = logits(operators("cpu"), x, w)
    assert differing(chain, x.float() @ w.float().T) > 100
    halves = chain_gemm(x[:, :512], w.T[:512]) + chain_gemm(x[:, 512:], w.T[512:])
    assert differing(chain, halves) > 100
    assert differing(chain, chain_gemm(x.flip(1), w.T.flip(0))) > 100


@pytest.mark.parametrize("depth", [1, 16, 37, 1061])
def test_packed_panels_and_column_slices_have_the_same_bits(depth: int) -> None:
    x, value = bf16_randn(29, depth, seed=1), bf16_randn(333, depth, seed=2)
    plain, packed = make_weight(value), make_weight(value)
    cpu_gemm.pack(packed)
    assert packed.packed is not None
    head = operators("cpu")._providers["lm_head"]
    whole = head.logits(x, plain)
    assert_bitwise(head.logits(x, packed), whole, "packed")
    for columns in [(0, 32), (32, 96), (96, 333), (320, 333)]:
        expected = whole[:, columns[0] : columns[1]].contiguous()
        assert_bitwise(head.logits(x, plain, columns), expected, f"columns {columns}")
        assert_bitwise(head.logits(x, packed, columns), expected, f"packed columns {columns}")
    with torch.no_grad():
        rounded = operators("cpu").linear(x, packed)
        assert_bitwise(rounded, whole.bfloat16(), "rounded once")
        cpu_gemm.pack(packed, drop_value=True)
        assert_bitwise(operators("cpu").linear(x, packed), rounded, "packed again, without the values")


def test_packing_again_follows_the_weights() -> None:
    x, weight = bf16_randn(5, 70, seed=1), random_weight(50, 70, seed=2)
    operators("cpu").pack([weight], drop_value=False)
    weight.value.copy_(bf16_randn(50, 70, seed=3))
    operators("cpu").pack([weight], drop_value=False)
    assert_bitwise(operators("cpu").logits(x, weight), chain_gemm(x, weight.value.T), "repacked")


LAYOUTS = [
    PackedLayout((1,), (1,)),
    PackedLayout((1, 2, 1), (1, 1, 1)),
    PackedLayout((3, 61, 17, 64, 5), (2, 1, 2)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.tokens}tokens")
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (37, 33), (67, 75), (130, 16)])
def test_linear_forward_and_backward(layout: PackedLayout, depth: int, columns: int) -> None:
    weight = random_weight(columns, depth, seed=1)
    inputs = {"x": bf16_randn(layout.tokens, depth, seed=2), "residual": bf16_randn(layout.tokens, columns, seed=3)}
    views = {name: in_nan(x) for name, x in inputs.items()}
    for given in (inputs, views):
        assert_providers_agree(
            lambda ops, x, r: ops.linear(x, weight, r, layout), given, "with residual", weight=weight
        )
        assert_providers_agree(
            lambda ops, x: ops.linear(x, weight, None, layout), {"x": given["x"]}, "linear", weight=weight
        )


def test_residual_is_added_before_the_only_rounding() -> None:
    weight = random_weight(64, 1100, seed=1)
    x, residual = bf16_randn(50, 1100, seed=2), bf16_randn(50, 64, seed=3)
    with torch.no_grad():
        y = operators("cpu").linear(x, weight, residual)
        branch = operators("cpu").linear(x, weight)
    once = (residual.float() + chain_gemm(x, weight.value.T)).bfloat16()
    assert_bitwise(y, once, "residual")
    assert differing(y, residual + branch) > 100, "two roundings must show"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.tokens}tokens")
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (37, 33), (130, 16)])
def test_bias_forward_and_backward(layout: PackedLayout, depth: int, columns: int) -> None:
    """Every provider's; the bias' gradient is that of a column of W whose input is 1."""
    weight, bias = random_weight(columns, depth, seed=1), random_weight(columns, seed=4)
    inputs = {"x": bf16_randn(layout.tokens, depth, seed=2)}

    def biased(ops: Operators, x: Tensor) -> Tensor:
        bias.clear_gradient()
        return ops.linear(x, weight, None, layout, bias=bias)

    found, sums = [], []
    for name, x in (("reference", inputs["x"]), ("cpu", inputs["x"]), ("cpu", in_nan(inputs["x"]))):
        found.append(run(operators(name), biased, {"x": x}, weight=weight))
        assert bias.grad is not None
        sums.append(bias.grad.clone())
    wider = make_weight(torch.cat([weight.value, bias.value[:, None]], 1))
    ones = torch.cat([inputs["x"], torch.ones(layout.tokens, 1, dtype=torch.bfloat16)], 1)
    dw = run(operators("cpu"), lambda ops, x: ops.linear(x, wider, None, layout), {"x": ones}, weight=wider)["dw"]
    for result, total in zip(found, sums, strict=True):
        assert_same(result, found[0], "bias")
        assert_bitwise(total, dw[:, -1].contiguous(), "the column of W whose input is 1")


def test_bias_is_added_before_the_only_rounding() -> None:
    weight, bias = random_weight(64, 1100, seed=1), random_weight(64, seed=3)
    x = bf16_randn(50, 1100, seed=2)
    with torch.no_grad():
        y = operators("cpu").linear(x, weight, bias=bias)
        branch = operators("cpu").linear(x, weight)
        packed = make_weight(weight.value)
        cpu_gemm.pack(packed, drop_value=True)
        assert_bitwise(operators("cpu").linear(x, packed, bias=bias), y, "packed panels")
    once = (chain_gemm(x, weight.value.T) + bias.value.float()).bfloat16()
    assert_bitwise(y, once, "bias")
    for rows in (1, 3, 49):
        assert_bitwise(operators("cpu").linear(x[:rows], weight, bias=bias).detach(), once[:rows], f"{rows} rows")
    assert differing(y, branch + bias.value) > 100, "two roundings must show"


@pytest.mark.parametrize("depth", [1, 37, 1061])
def test_gradients_reveal_their_order(depth: int) -> None:
    """dX is a chain over the output columns, dW over the tokens: both long here, on order-revealing data."""
    layout = PackedLayout((depth,), (1,))
    x, dout = torch.ones(depth, 33, dtype=torch.bfloat16), order_revealing(45, depth, seed=1).T.contiguous()
    weight = make_weight(torch.zeros(45, 33, dtype=torch.bfloat16))
    got = assert_providers_agree(
        lambda ops, x: ops.linear(x, weight, None, layout), {"x": x}, "dW", weight=weight, dout=dout
    )
    assert_bitwise(got["dw"], chain_gemm(dout.T, x), "dW is one chain over the tokens")
    wide = make_weight(torch.ones(depth, 33, dtype=torch.bfloat16))
    narrow = PackedLayout((20,), (1,))
    got = assert_providers_agree(
        lambda ops, x: ops.linear(x, wide, None, narrow),
        {"x": bf16_randn(20, 33, seed=1)},
        "dX",
        weight=wide,
        dout=order_revealing(20, depth, seed=2),
    )
    assert_bitwise(got["dx"], chain_gemm(order_revealing(20, depth, seed=2), wide.value).bfloat16(), "dX")


def test_stock_linear_is_caught() -> None:
    """The control of the whole operator: ``F.linear`` and autograd have other bits, forward and backward."""
    layout = PackedLayout((1050,), (1,))
    weight = random_weight(1030, 1061, seed=1)
    x = bf16_randn(1050, 1061, seed=2)[:8].repeat(132, 1)[:1050].contiguous()
    with torch.no_grad():
        ours = operators("cpu").linear(x[:64], weight)
        assert differing(ours, functional.linear(x[:64], weight.value)) > 0
    got = run(operators("cpu"), lambda ops, x: ops.linear(x, weight, None, layout), {"x": x}, weight=weight)
    dout = bf16_randn(1050, 1030, seed=99)
    assert differing(got["dx"], dout @ weight.value) > 0
    assert differing(got["dw"], dout.float().T @ x.float()) > 1000


def test_fold_units_are_separate_chains_added_in_order() -> None:
    """dW of units {a}, {b} is fl(fl(0 + chain a) + chain b): the same in one micro-batch or two, not one long chain."""
    lengths = (131, 77, 1)
    x, dout = bf16_randn(209, 90, seed=1), bf16_randn(209, 70, seed=2)
    weight = random_weight(70, 90, seed=3)

    def gradient(layout: PackedLayout, rows: slice) -> None:
        leaf = x[rows].detach().requires_grad_()
        operators("cpu").linear(leaf, weight, None, layout).backward(dout[rows])

    weight.enable_training()
    gradient(PackedLayout(lengths, (1, 2)), slice(0, 209))
    together = weight.grad
    weight.enable_training()
    gradient(PackedLayout(lengths[:1], (1,)), slice(0, 131))
    gradient(PackedLayout(lengths[1:], (2,)), slice(131, 209))
    assert together is not None and weight.grad is not None
    assert_bitwise(together, weight.grad, "one micro-batch against two")
    parts = [chain_gemm(dout[part].T, x[part]) for part in (slice(0, 131), slice(131, 209))]
    assert_bitwise(together, parts[0] + parts[1], "sum of the two chains")
    assert differing(together, chain_gemm(dout.T, x)) > 100, "one chain over both units has other bits"
    preloaded = parts[0].clone()
    for t in range(131, 209):
        preloaded += dout[t, :, None].float() * x[t].float()
    assert differing(together, preloaded) > 100, "an accumulator that starts from the first unit has other bits"


def test_gradient_is_added_to_what_is_there() -> None:
    dout, x, start = bf16_randn(37, 45, seed=1), bf16_randn(37, 61, seed=2), f32_randn(45, 61, seed=3)
    grad = start.clone()
    cpu_gemm.add_outer(in_nan(dout), in_nan(x), grad)
    assert_bitwise(grad, start + chain_gemm(dout.T, x), "non-zero gradient")
    sums = f32_randn(37, 61, seed=4)
    rows = bf16_randn(45, 61, seed=5)
    total = sums.clone()
    cpu_gemm.times_rows(in_nan(dout), in_nan(rows), out=total)
    assert_bitwise(total, sums + chain_gemm(dout, rows), "non-zero input gradient")


def test_nothing_outside_the_rows_is_written() -> None:
    """A gradient in the middle of a larger table: the rows above and below stay as they are."""
    table = torch.full((100, 61), torch.nan)
    table[40:60] = 0.0
    dz, hidden = bf16_randn(9, 20, seed=1), bf16_randn(9, 61, seed=2)
    operators("cpu")._providers["lm_head"].add_weight_gradient(dz, hidden, (40, 60), table)
    assert_bitwise(table[40:60], chain_gemm(dz.T, hidden), "inside")
    assert table[:40].isnan().all() and table[60:].isnan().all()
