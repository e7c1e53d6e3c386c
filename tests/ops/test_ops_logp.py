"""Selected logp, entropy and the scored LM head: temperatures, retained sets, vocabulary tiles, padded vocabularies."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import Operators
from rl_engine.ops.sample.retained import retained_mask
from rl_engine.ops.selected_logp import LogpState, check_targets, inverse_temperature
from rl_engine.ops.selected_logp.reference import ReferenceLogp, unpack_mask
from rl_engine.ops.selected_logp.vocabulary import group_columns, groups
from rl_engine.ops.weight import Weight
from tests.helpers.numeric import assert_bitwise, assert_close
from tests.helpers.ops import (
    THREADS,
    assert_providers_agree,
    bf16_randn,
    differing,
    f32_randn,
    generator,
    in_nan,
    kernel_threads,
    operators,
    random_weight,
    run,
)

ROWS = 9
VOCABULARIES = (1, 2, 7, 127, 128, 129, 1000, 2047, 2048, 2049, 5001)


def targets_of(vocabulary: int, rows: int = ROWS) -> Tensor:
    targets = torch.randint(0, vocabulary, (rows,), generator=generator(vocabulary))
    targets[:2] = torch.tensor([0, vocabulary - 1])
    return targets


def random_mask(vocabulary: int, targets: Tensor, share: float) -> Tensor:
    """Packed bits: a share of the columns and every target; the bits behind the vocabulary are set on purpose."""
    rows = targets.numel()
    keep = torch.rand(rows, -(-vocabulary // 8) * 8, generator=generator(3)) < share
    keep[torch.arange(rows), targets] = True
    keep[:, vocabulary:] = True
    return (keep.unflatten(1, (-1, 8)).long() << torch.arange(8)).sum(2).to(torch.uint8)


@pytest.mark.parametrize("share", [None, 0.5, 0.01, 0.0])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logp_and_entropy(vocabulary: int, share: float | None) -> None:
    z, targets = f32_randn(ROWS, vocabulary, seed=1, scale=4.0), targets_of(vocabulary)
    mask = None if share is None else random_mask(vocabulary, targets, share)
    for temperature in (0.7, 1.0, 1.3):
        expected = operators("reference").logp_from_logits(z, targets, temperature, mask)
        for threads in THREADS:
            with kernel_threads(threads):
                actual = operators("cpu").logp_from_logits(in_nan(z), targets, temperature, mask)
            assert_bitwise(actual[0], expected[0], f"logp, V {vocabulary}, T {temperature}")
            assert_bitwise(actual[1], expected[1], f"entropy, V {vocabulary}, T {temperature}")
        assert bool((expected[0] <= 1e-6).all()) and not expected[1].isnan().any()
        if share == 0.0:
            assert_close(expected[0], torch.zeros(ROWS), rtol=0, atol=0, why="a set of one column has probability 1")


@pytest.mark.parametrize("vocabulary", [7, 1000, 2049])
def test_logits_gradient(vocabulary: int) -> None:
    z, targets, c = f32_randn(ROWS, vocabulary, seed=1, scale=4.0), targets_of(vocabulary), f32_randn(ROWS, seed=2)
    for mask in (None, random_mask(vocabulary, targets, 0.1)):
        outputs = []
        for name in ("reference", "cpu"):
            provider = operators(name)._providers["selected_logp"]
            state = LogpState.empty(ROWS)
            provider.merge_columns(z, 0, vocabulary, inverse_temperature(0.7), mask, targets, state)
            pieces = [
                provider.logits_gradient(in_nan(z[:, a:b]), a, inverse_temperature(0.7), mask, targets, state, c)
                for a, b in groups(vocabulary)
            ]
            outputs.append(torch.cat(pieces, 1))
        assert_bitwise(outputs[1], outputs[0], "dz")
        if mask is not None:
            outside = ~unpack_mask(mask, 0, vocabulary)
            assert_bitwise(outputs[1][outside], torch.zeros_like(outputs[1][outside]), "+0 outside the set")


def test_extreme_logits() -> None:
    z = torch.zeros(6, 300)
    z[0], z[1], z[2, 17], z[3, 255], z[4] = 1e30, -1e30, 1e4, -1e4, -0.0
    z[5, :200] = -1e30
    targets = torch.tensor([3, 3, 17, 5, 299, 250])
    expected = operators("reference").logp_from_logits(z, targets, 1.0, None)
    actual = operators("cpu").logp_from_logits(z, targets, 1.0, None)
    assert_bitwise(actual[0], expected[0], "logp")
    assert_bitwise(actual[1], expected[1], "entropy")
    assert actual[0][2] == 0.0
    assert_bitwise(actual[0][4:5], operators("cpu").logp_from_logits(z[4:5] * -1.0, targets[4:5], 1.0, None)[0], "-0")


@pytest.mark.parametrize("vocabulary", [1000, 5001])
def test_groups_may_arrive_one_by_one(vocabulary: int) -> None:
    """A rank with some of the groups, or a backward that recomputes them, gets the same state as one pass."""
    z, targets = f32_randn(ROWS, vocabulary, seed=1, scale=4.0), targets_of(vocabulary)
    provider = operators("cpu")._providers["selected_logp"]
    whole, pieces = LogpState.empty(ROWS), LogpState.empty(ROWS)
    provider.merge_columns(z, 0, vocabulary, 1.0, None, targets, whole)
    for first, last in groups(vocabulary):
        provider.merge_columns(z[:, first:last], first, vocabulary, 1.0, None, targets, pieces)
    for name in ("m", "l", "w", "zs_target"):
        assert_bitwise(getattr(pieces, name), getattr(whole, name), name)


def test_groups_cover_the_true_vocabulary() -> None:
    assert group_columns(151_936) == 75 * 128
    assert groups(151_936)[-1] == (144_000, 151_936)
    for vocabulary in VOCABULARIES:
        bounds = groups(vocabulary)
        assert bounds[0][0] == 0 and bounds[-1][1] == vocabulary and len(bounds) <= 16
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


def test_another_order_is_caught() -> None:
    """The control: ``log_softmax``, a merge of the groups from the last to the first, and a division by T."""
    z, targets = f32_randn(200, 5001, seed=1, scale=4.0), targets_of(5001, 200)
    ours = operators("cpu").logp_from_logits(z, targets, 1.0, None)[0]
    assert differing(ours, z.log_softmax(1).gather(1, targets[:, None])[:, 0]) > 20
    provider, state = ReferenceLogp(), LogpState.empty(200)
    for first, last in reversed(groups(5001)):
        provider.merge_columns(z[:, first:last], first, 5001, 1.0, None, targets, state)
    right = LogpState.empty(200)
    provider.merge_columns(z, 0, 5001, 1.0, None, targets, right)
    assert differing(state.l, right.l) > 20
    tempered = operators("cpu").logp_from_logits(z, targets, 0.7, None)[0]
    assert differing(tempered, operators("cpu").logp_from_logits(z / 0.7, targets, 1.0, None)[0]) > 20


def test_probabilities_of_the_retained_set_sum_to_one() -> None:
    """exp(logp) over every column of the set, several temperatures and filters; nothing outside is accepted."""
    vocabulary = 300
    z = f32_randn(1, vocabulary, seed=1, scale=3.0)
    for temperature in (0.7, 1.0, 1.3):
        for top_k, top_p in ((-1, 1.0), (20, 1.0), (-1, 0.95), (-1, 0.8), (20, 0.8)):
            mask = retained_mask(z, inverse_temperature(temperature), top_k, top_p)
            ids = torch.arange(vocabulary)
            if mask is not None:
                ids = ids[unpack_mask(mask, 0, vocabulary)[0]]
                mask = mask.expand(ids.numel(), -1).contiguous()
            rows = z.expand(ids.numel(), -1).contiguous()
            logp, entropy = operators("cpu").logp_from_logits(rows, ids, temperature, mask)
            p = logp.double().exp()
            assert_close(p.sum(), 1.0, rtol=3e-6, atol=0, why="fp32 logp of up to 300 columns")
            exact = -(p * p.log()).sum()
            assert_close(entropy, exact.expand(ids.numel()), rtol=1e-5, atol=1e-6, why="fp32 entropy")


def test_targets_outside_are_an_input_error() -> None:
    z, targets = f32_randn(3, 40, seed=1), torch.tensor([1, 2, 3])
    mask = random_mask(40, targets, 0.0)
    for bad in (torch.tensor([1, 2, 40]), torch.tensor([-1, 2, 3])):
        with pytest.raises(ValueError, match="outside the vocabulary of 40"):
            operators("cpu").logp_from_logits(z, bad, 1.0, None)
    with pytest.raises(ValueError, match="target of row 1 lies outside its retained set"):
        operators("cpu").logp_from_logits(z, torch.tensor([1, 3, 3]), 1.0, mask)
    check_targets(torch.empty(0, dtype=torch.int64), 40, None)


LAYOUT = PackedLayout((1, 37, 65, 20), (1, 2, 1))


@pytest.mark.parametrize("share", [None, 0.05])
@pytest.mark.parametrize("vocabulary", [1, 130, 2049])
def test_score_forward_and_backward(vocabulary: int, share: float | None) -> None:
    """Hidden states to logp: the head's products, the groups, dH and the head's dW per fold unit."""
    rows = torch.tensor([0, *range(2, 30), *range(40, 100), 122])
    targets = targets_of(vocabulary, rows.numel())
    mask = None if share is None else random_mask(vocabulary, targets, share)
    weight = random_weight(vocabulary, 37, seed=1, scale=0.3)
    hidden = bf16_randn(LAYOUT.tokens, 37, seed=2, scale=2.0)
    for given in (hidden, in_nan(hidden)):
        got = assert_providers_agree(
            lambda ops, h: ops.score(h, weight, targets, 0.7, mask, LAYOUT, rows), {"h": given}, "score", weight=weight
        )
    unused = torch.ones(LAYOUT.tokens, dtype=torch.bool)
    unused[rows] = False
    assert_bitwise(got["dh"][unused], torch.zeros_like(got["dh"][unused]), "tokens without a target")


def test_scored_logp_equals_the_logp_of_sampled_logits() -> None:
    """What the trainer scores from hidden states is what the rollout computes from its logits, any batch of rows."""
    weight, hidden = random_weight(2049, 67, seed=1), bf16_randn(40, 67, seed=2, scale=3.0)
    targets, layout = targets_of(2049, 40), PackedLayout((40,), (1,))
    cpu = operators("cpu")
    z = cpu.logits(hidden, weight)
    mask = random_mask(2049, targets, 0.02)
    for kept in (None, mask):
        scored = cpu.score(hidden, weight, targets, 1.3, kept, layout, torch.arange(40))
        rolled = cpu.logp_from_logits(z, targets, 1.3, kept)
        assert_bitwise(scored[0].detach(), rolled[0], "logp")
        assert_bitwise(scored[1], rolled[1], "entropy")
        one = cpu.logp_from_logits(
            cpu.logits(hidden[7:8], weight), targets[7:8], 1.3, None if kept is None else kept[7:8].contiguous()
        )
        assert_bitwise(one[0], rolled[0][7:8], "a row alone")
    stock = operators("stock")
    alone = torch.cat(
        [
            stock.logp_from_logits(stock.logits(hidden[i : i + 1], weight), targets[i : i + 1], 1.3, None)[0]
            for i in range(40)
        ]
    )
    packed = stock.score(hidden, weight, targets, 1.3, None, layout, torch.arange(40))[0]
    assert differing(alone, cpu.logp_from_logits(z, targets, 1.3, None)[0]) > 20
    assert differing(packed, cpu.logp_from_logits(z, targets, 1.3, None)[0]) > 20


def test_head_gradient_folds_units_in_order() -> None:
    weight, hidden = random_weight(300, 37, seed=1), bf16_randn(LAYOUT.tokens, 37, seed=2)
    rows = torch.arange(LAYOUT.tokens)
    targets, dout = targets_of(300, rows.numel()), f32_randn(LAYOUT.tokens, seed=4)

    def gradient(layout: PackedLayout) -> Tensor:
        result = run(
            operators("cpu"),
            lambda ops, h: ops.score(h, weight, targets, 1.0, None, layout, rows),
            {"h": hidden},
            weight=weight,
            dout=dout,
        )
        return result["dw"]

    whole = gradient(LAYOUT)
    weight.enable_training()
    for first, last, part in ((0, 1, PackedLayout((1,), (1,))), (1, 123, PackedLayout((37, 65, 20), (2, 1)))):
        piece = slice(first, last)
        leaf = hidden[piece].detach().requires_grad_()
        logp, _ = operators("cpu").score(leaf, weight, targets[piece], 1.0, None, part, torch.arange(last - first))
        logp.backward(dout[piece])
    assert weight.grad is not None
    assert_bitwise(weight.grad, whole, "two micro-batches")
    assert differing(gradient(PackedLayout(LAYOUT.lengths, (4,))), whole) > 100, "one unit over all tokens"


def score_all(
    ops: Operators, h: Tensor, *, weight: Weight, targets: Tensor, layout: PackedLayout
) -> tuple[Tensor, ...]:
    return ops.score(h, weight, targets, 1.0, None, layout, torch.arange(targets.numel()))


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_strided_targets_are_read_where_they_lie(name: str) -> None:
    """Targets as a column of a wider table (every second id), as a caller may slice them."""
    weight, hidden = random_weight(500, 37, seed=1), bf16_randn(64, 37, seed=2)
    layout = PackedLayout((64,), (1,))
    targets = targets_of(500, 64)
    strided = torch.stack([targets, targets.flip(0)], 1)[:, 0]
    results = []
    for given in (targets, strided):
        call = functools.partial(score_all, weight=weight, targets=given, layout=layout)
        results.append(run(operators(name), call, {"h": hidden}, weight=weight))
    for key, value in results[0].items():
        assert_bitwise(results[1][key], value, key)
