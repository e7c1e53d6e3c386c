"""Weights in memory that others own, panels packed from rows, and updates without a bf16 copy."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rl_engine.ops import cpu_gemm
from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.functions import chain_gemm
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import BorrowedMemory, Part, Weight
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ops import bf16_randn, differing, f32_randn, make_weight, operators

ROWS, DEPTH, TOKENS = 1061, 1024, 37
LAYOUT = PackedLayout((20, 17), (1, 1))


class Engine:
    """Somebody else's parameter, padded by rows of theirs, and its fp32 gradient, which they may move."""

    def __init__(self, value: Tensor, padding: int = 11) -> None:
        self.param = torch.cat([value, torch.full((padding, *value.shape[1:]), torch.nan, dtype=value.dtype)])
        self.main_grad: Tensor | None = None
        self.rows = value.shape[0]

    def gradient(self) -> Tensor | None:
        return None if self.main_grad is None else self.main_grad[: self.rows]

    def weight(self) -> Weight:
        memory = BorrowedMemory(lambda: self.param[: self.rows], self.gradient)
        return Weight("w", memory, (Part("w", 0, self.rows),), (self.rows, *self.param.shape[1:]))


def linear(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
    """(y, dx) of a forward and backward pass; dW is added where the weight keeps it."""
    leaf = x.detach().requires_grad_()
    y = operators("cpu").linear(leaf, weight, None, LAYOUT)
    y.backward(bf16_randn(*y.shape, seed=9))
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def test_a_borrowed_weight_has_an_own_weights_bits_wherever_its_owner_moves_it() -> None:
    value, x = bf16_randn(ROWS, DEPTH, seed=1, scale=0.1), bf16_randn(TOKENS, DEPTH, seed=2)
    own, engine = make_weight(value.clone()), Engine(value)
    weight = engine.weight()
    assert not weight.trains and weight.grad is None and weight.lend_gradient() is None
    engine.main_grad = torch.zeros(engine.param.shape)
    assert weight.trains
    for turn, moved in enumerate((False, True)):
        if moved:  # the owner's buffers are elsewhere now, with other values
            engine.param = torch.cat([bf16_randn(ROWS, DEPTH, seed=3, scale=0.1), engine.param[ROWS:]])
            engine.main_grad = torch.zeros(engine.param.shape)
            own.value = engine.param[:ROWS].clone()
            own.clear_gradient()
        for found, expected in zip(linear(x, weight), linear(x, own), strict=True):
            assert_bitwise(found, expected, f"turn {turn}")
        assert own.grad is not None and engine.main_grad is not None
        assert_bitwise(engine.main_grad[:ROWS], own.grad, "dW in the owner's buffer")
        assert not engine.main_grad[ROWS:].any()
    assert differing(linear(x, weight)[0], linear(x, make_weight(value))[0]) > 1000, "the control: the first values"


def test_what_an_owner_alone_does_is_refused_on_borrowed_memory() -> None:
    engine = Engine(bf16_randn(64, 32, seed=1))
    weight, before = engine.weight(), engine.param[:64].clone()
    for misuse in (
        lambda: setattr(weight, "value", before),
        lambda: setattr(weight, "grad", None),
        weight.clear_gradient,
        weight.enable_training,
        lambda: cpu_gemm.pack(weight, drop_value=True),
    ):
        with pytest.raises(AssertionError, match="somebody else"):
            misuse()
    assert_bitwise(weight.value, before, "nothing was written")
    weight.write_rows(8, torch.ones(4, 32))
    assert_bitwise(engine.param[8:12], torch.ones(4, 32).bfloat16(), "written into the owner's memory")


def test_panels_of_a_weight_that_changed_are_packed_again_before_they_are_read() -> None:
    value, x = bf16_randn(ROWS, DEPTH, seed=1, scale=0.1), bf16_randn(TOKENS, DEPTH, seed=2)
    engine, ops = Engine(value), operators("cpu")
    weight = engine.weight()
    ops.pack([weight], drop_value=False)
    engine.param[:ROWS] = bf16_randn(ROWS, DEPTH, seed=3, scale=0.1)
    assert differing(ops.logits(x, weight), chain_gemm(x, engine.param[:ROWS].T)) > 1000, "the control: not marked"
    weight.mark_changed()
    assert_bitwise(ops.logits(x, weight), chain_gemm(x, engine.param[:ROWS].T), "marked")
    assert not weight.stale


@pytest.mark.parametrize("depth", [1, 37, 1024])
def test_panels_written_by_rows_equal_those_packed_at_once(depth: int) -> None:
    """In pieces of odd sizes, at panel edges and inside a panel, over old rows; read back they are the rows."""
    value = bf16_randn(333, depth, seed=1)
    whole, pieces = make_weight(value.clone(), trains=False), make_weight(bf16_randn(333, depth, seed=2), trains=False)
    cpu_gemm.pack(whole, drop_value=True)
    cpu_gemm.pack(pieces, drop_value=True)
    assert pieces.packed is not None and whole.packed is not None and not pieces.holds_value
    assert differing(pieces.packed, whole.packed) > 100, "the control: other rows"
    place = pieces.packed.data_ptr()
    for first, last in itertools.pairwise([0, 1, 31, 32, 64, 70, 75, 200, 230, 332, 333]):
        pieces.write_rows(first, value[first:last].float())
        assert_bitwise(pieces.rows(first, last), value[first:last], f"rows {first} to {last}")
    assert_bitwise(pieces.packed, whole.packed, "panels")
    assert pieces.packed.data_ptr() == place
    for first, last in ((0, 333), (5, 6), (30, 34), (64, 96)):
        assert_bitwise(whole.rows(first, last), value[first:last], f"rows {first} to {last} of the whole")


def test_a_layout_that_takes_no_rows_says_so() -> None:
    from rl_engine.ops.linear.stock import prepack

    weight = make_weight(bf16_randn(64, 32, seed=1), trains=False)
    prepack(weight, drop_value=True)
    if weight.holds_value:
        pytest.skip("torch has no oneDNN for bf16 here")
    with pytest.raises(AssertionError, match="takes no rows"):
        weight.write_rows(0, torch.ones(1, 32))
    with pytest.raises(AssertionError, match="gives no rows"):
        weight.rows(0, 1)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_an_update_without_a_bf16_weight_has_the_same_bits(name: str) -> None:
    ops, n = operators(name), 70_001
    scalars = AdamScalars.at(3, 1e-3, 0.9, 0.98, 1e-8, 0.1)
    with_weight = [f32_randn(n, seed=i).abs() for i in range(4)]
    without = [x.clone() for x in with_weight]
    weight = torch.empty(n, dtype=torch.bfloat16)
    changed = ops.adamw(*with_weight, weight, 0.7, scalars)
    again = ops.adamw(*without, None, 0.7, scalars)
    assert int(changed) == int(again) > 1000
    for what, a, b in zip(("master", "m", "v", "grad"), without, with_weight, strict=True):
        assert_bitwise(a, b, what)
    assert_bitwise(weight, without[0].bfloat16(), "what the owner would round")
