"""Logits kept in the head's cleared gradient: the bits of logits computed again, one product less, no unit lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.lm_head.cpu import CpuHead
from rl_engine.ops.operators import Operators
from rl_engine.ops.selected_logp import LogpProvider, kept_logits
from rl_engine.ops.selected_logp.vocabulary import groups
from rl_engine.ops.weight import Weight
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ops import bf16_randn, differing, f32_randn, generator, operators, random_weight

HIDDEN = 64


@pytest.fixture(autouse=True)
def _on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's providers do not keep logits by themselves, since it does not make them faster."""
    monkeypatch.setattr(LogpProvider, "keeps_logits", True)


LAYOUT = PackedLayout((1, 20, 9, 30), (2, 1, 1))


def score(
    ops: Operators, weight: Weight, hidden: Tensor, layout: PackedLayout, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(leaf, logp, entropy) of every second token, from the second on."""
    rows = torch.arange(1, layout.tokens, 2)
    targets = torch.randint(0, weight.shape[0], (rows.numel(),), generator=generator(5))
    if mask is not None:
        mask = mask[: rows.numel()].clone()
        mask[torch.arange(rows.numel()), targets // 8] |= (1 << (targets % 8)).to(torch.uint8)
    leaf = hidden.detach().requires_grad_()
    logp, entropy = ops.score(leaf, weight, targets, 0.8, mask, layout, rows)
    return leaf, logp, entropy


def results(ops: Operators, weight: Weight, hidden: Tensor, layout: PackedLayout, mask: Tensor | None) -> list[Tensor]:
    leaf, logp, entropy = score(ops, weight, hidden, layout, mask)
    logp.backward(f32_randn(logp.numel(), seed=6))
    assert leaf.grad is not None and weight.grad is not None
    return [logp.detach(), entropy, leaf.grad, weight.grad.clone()]


@pytest.mark.parametrize("repeats", [1, 2, 3, 5])  # 30 scored tokens, 60, 90 and 150: fewer and more than HIDDEN
@pytest.mark.parametrize("vocabulary", [5, 300, 5001])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_kept_logits_have_the_bits_of_logits_computed_again(name: str, vocabulary: int, repeats: int) -> None:
    if name == "reference" and repeats != 3:
        pytest.skip("one size of the slow provider is enough")
    ops, weight = operators(name), random_weight(vocabulary, HIDDEN, seed=1)
    layout = PackedLayout(LAYOUT.lengths * repeats, LAYOUT.unit_samples * repeats)
    hidden = bf16_randn(layout.tokens, HIDDEN, seed=2)
    mask = torch.randint(0, 256, (layout.tokens, -(-vocabulary // 8)), generator=generator(3)).to(torch.uint8)
    for bits in (None, mask):
        weight.enable_training()
        assert weight.grad is not None  # read: no loan
        again = results(ops, weight, hidden, layout, bits)
        weight.enable_training()
        weight.grad.fill_(torch.nan)  # what a cleared gradient's memory holds does not matter
        weight.clear_gradient()
        kept = results(ops, weight, hidden, layout, bits)
        for what, a, b in zip(("logp", "entropy", "dH", "dW"), kept, again, strict=True):
            assert_bitwise(a, b, what)


def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The groups whose logits were computed, from now on."""
    seen: list[tuple[int, int]] = []
    plain = CpuHead.logits

    def counted(self: CpuHead, hidden: Tensor, weight: Weight, columns: object = None, out: object = None) -> Tensor:
        seen.append(columns)  # type: ignore[arg-type]
        return plain(self, hidden, weight, columns, out)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuHead, "logits", counted)
    return seen


def test_a_cleared_gradient_saves_the_second_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = random_weight(5001, HIDDEN, seed=1), bf16_randn(LAYOUT.tokens, HIDDEN, seed=2)
    weight.enable_training()
    seen = products(monkeypatch)
    for expected in (1, 2):  # the second micro-batch finds units in the gradient
        seen.clear()
        score(operators("cpu"), weight, hidden, LAYOUT)[1].sum().backward()
        assert len(seen) == expected * len(groups(5001))
    with torch.no_grad():
        weight.clear_gradient()
        score(operators("cpu"), weight, hidden, LAYOUT)
    loan = weight.lend_gradient()
    assert loan is not None, "a forward pass without a backward one takes no loan"


@pytest.mark.parametrize("how", ["read", "cleared", "two graphs", "twice"])
def test_a_loan_that_ended_is_noticed(how: str) -> None:
    """Whatever happens to the gradient between forward and backward, no unit is lost and none counts twice."""
    ops, weight = operators("cpu"), random_weight(1000, HIDDEN, seed=1)
    hidden, other = (bf16_randn(LAYOUT.tokens, HIDDEN, seed=seed) for seed in (2, 3))
    unit = []
    for x in (hidden, other):
        weight.enable_training()
        score(ops, weight, x, LAYOUT)[1].sum().backward()
        assert weight.grad is not None
        unit.append(weight.grad.clone())
    weight.enable_training()
    _, logp, _ = score(ops, weight, hidden, LAYOUT)
    if how == "read":
        assert weight.grad is not None and not weight.grad.any()
        weight.grad[3, 5] = 1.0
        logp.sum().backward()
        assert int((weight.grad.view(torch.int32) != unit[0].view(torch.int32)).sum()) == 1
    elif how == "cleared":
        weight.clear_gradient()
        logp.sum().backward()
        assert weight.grad is not None
        assert_bitwise(weight.grad, unit[0], "one unit")
    elif how == "two graphs":
        _, second, _ = score(ops, weight, other, LAYOUT)
        second.sum().backward()  # ends the first one's loan
        logp.sum().backward()
        weight_grad, weight.grad = weight.grad, None
        weight.enable_training()
        for x in (other, hidden):
            score(ops, weight, x, LAYOUT)[1].sum().backward()
        assert weight_grad is not None and weight.grad is not None
        assert_bitwise(weight_grad, weight.grad, "two micro-batches")
    else:
        logp.sum().backward(retain_graph=True)
        logp.sum().backward()
        assert weight.grad is not None and differing(weight.grad, unit[0]) > 1000
        assert_bitwise(weight.grad, unit_twice(ops, weight, hidden), "the same units twice")


def unit_twice(ops: Operators, weight: Weight, hidden: Tensor) -> Tensor:
    weight.enable_training()
    for _ in range(2):
        score(ops, weight, hidden, LAYOUT)[1].sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_the_kept_logits_are_what_backward_reads() -> None:
    """Control: one changed bit in the lent memory changes the gradients."""
    ops, weight = operators("cpu"), random_weight(1000, HIDDEN, seed=1)
    hidden, found = bf16_randn(LAYOUT.tokens, HIDDEN, seed=2), []
    for change in (False, True):
        weight.enable_training()
        leaf, logp, _ = score(ops, weight, hidden, LAYOUT)
        loan = weight.memory._loan
        assert loan is not None
        if change:
            kept_logits(loan.space, logp.numel())[2][4, 7] += 1.0
        logp.sum().backward()
        assert leaf.grad is not None and weight.grad is not None
        found.append((leaf.grad, weight.grad))
    assert differing(found[0][0], found[1][0]) > 0
    assert differing(found[0][1], found[1][1]) == int((found[0][1][group_column(2) + 7] != 0).sum())


def group_column(index: int) -> int:
    return groups(1000)[index][0]


def test_without_scored_tokens_the_gradient_is_zero() -> None:
    weight = random_weight(300, HIDDEN, seed=1)
    weight.enable_training()
    leaf = bf16_randn(LAYOUT.tokens, HIDDEN, seed=2).requires_grad_()
    none = torch.empty(0, dtype=torch.int64)
    logp, _ = operators("cpu").score(leaf, weight, none, 1.0, None, LAYOUT, none)
    logp.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("rows", [1, 30, HIDDEN - 1, HIDDEN, HIDDEN + 1, 200, 2000])
def test_no_view_reaches_into_rows_that_are_written_before_it_is_read(rows: int) -> None:
    for vocabulary in (5, 128, 300, 5001, 49152):
        space = torch.empty(vocabulary, HIDDEN)
        views = kept_logits(space, rows)
        end = 0
        for (first, last), view in zip(groups(vocabulary), views, strict=False):
            start = view.storage_offset()
            assert view.shape == (rows, last - first)
            assert start >= end and start >= first * HIDDEN, "dW of earlier groups would overwrite it"
            end = start + (rows - 1) * view.stride(0) + view.shape[1]
            assert end <= space.numel()
        if rows <= HIDDEN and vocabulary % 8 == 0:
            assert len(views) == len(groups(vocabulary))
