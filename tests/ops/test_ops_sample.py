"""Sampling: the draw is exact for the softmax over the retained set, and depends on the sample's identity alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.ops.functions import exp
from rl_engine.ops.sample import DrawKey, counters
from rl_engine.ops.sample.retained import retained_mask
from rl_engine.ops.selected_logp import inverse_temperature
from rl_engine.ops.selected_logp.reference import unpack_mask
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ops import THREADS, differing, draw_keys, f32_randn, generator, in_nan, kernel_threads, operators

DRAWS = 20_000
# Under the null hypothesis a p-value this small comes once in 10,000 tests; the seeds are fixed, so it does not here.
P_VALUE = 1e-4


def chi_squared_p(tokens: Tensor, probability: Tensor) -> float:
    """P(chi² at least as large) of tokens against fp64 probabilities; columns expecting under 5 draws are pooled."""
    expected = probability * tokens.numel()
    counts = torch.bincount(tokens, minlength=probability.numel()).double()
    assert int(counts[probability == 0].sum()) == 0, "a column outside the set was drawn"
    rare = expected < 5.0
    expected, counts = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (expected, counts))
    expected, counts = expected[expected >= 5.0], counts[expected >= 5.0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((expected.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def softmax64(z: Tensor, temperature: float, kept: Tensor | None = None) -> Tensor:
    """fp64 probabilities of one row of logits over its set."""
    scaled = z.double() / temperature
    return (scaled if kept is None else scaled.masked_fill(~kept, -torch.inf)).softmax(0)


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (12, 1.0), (-1, 0.8), (30, 0.95)])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_draws_follow_the_fp64_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    z, inv_t = f32_randn(1, 43, seed=11, scale=1.5), inverse_temperature(temperature)
    mask = retained_mask(z, inv_t, top_k, top_p)
    kept = None if mask is None else unpack_mask(mask, 0, 43)[0]
    rows = z.expand(DRAWS, -1).contiguous()
    many = None if mask is None else mask.expand(DRAWS, -1).contiguous()
    tokens = operators("cpu").draw(rows, inv_t, many, draw_keys(DRAWS, seed=1, step=2))
    assert chi_squared_p(tokens, softmax64(z[0], temperature, kept)) > P_VALUE
    wrong = softmax64(z[0], temperature * 1.1, kept)
    assert chi_squared_p(tokens, wrong) < 1e-6, "the control: a tenth off in temperature must be caught"


@pytest.mark.parametrize("field", ["seed", "step", "prompt", "sample", "position"])
def test_every_part_of_the_identity_gives_independent_draws(field: str) -> None:
    """Identities that differ in one number only; seed and step are shared by a call, so they take one call each."""
    z = f32_randn(1, 17, seed=12)
    count = 4000 if field in ("seed", "step") else DRAWS
    base = {"seed": 3, "step": 1, "prompt": 5, "sample": 2, "position": 9}
    keys = [DrawKey(**{**base, field: i}) for i in range(count)]
    if field in ("seed", "step"):
        tokens = torch.cat([operators("cpu").draw(z, 1.0, None, [key]) for key in keys])
    else:
        tokens = operators("cpu").draw(z.expand(count, -1).contiguous(), 1.0, None, keys)
    p = softmax64(z[0], 1.0)
    assert chi_squared_p(tokens, p) > P_VALUE
    pairs = tokens[0::2] * 17 + tokens[1::2]
    assert chi_squared_p(pairs, torch.outer(p, p).flatten()) > P_VALUE, "neighbours are independent"


@pytest.mark.parametrize(("vocabulary", "steps"), [(1100, 3), pytest.param(2500, 30, marks=pytest.mark.slow)])
def test_uniform_logits_over_a_large_vocabulary(vocabulary: int, steps: int) -> None:
    """Every chunk of columns and both ends are drawn alike; at least 10 draws a column expected."""
    rows = torch.zeros(5000, vocabulary)
    tokens = [operators("cpu").draw(rows, 1.0, None, draw_keys(5000, seed=5, step=step)) for step in range(steps)]
    p = torch.full((vocabulary,), 1.0 / vocabulary, dtype=torch.float64)
    assert chi_squared_p(torch.cat(tokens), p) > P_VALUE


HIGH = 2**32 - 1
KEYS = [
    [DrawKey(0, 0, 0, 0, row) for row in range(40)],
    [DrawKey(HIGH, HIGH, HIGH, HIGH, HIGH - row) for row in range(40)],
    [DrawKey(2**31, 2**31 - 1, 2**31 + row, 5, 2**31 - row) for row in range(40)],
]


@pytest.mark.parametrize("keys", KEYS, ids=["zero", "largest", "sign bit"])
@pytest.mark.parametrize("vocabulary", [1, 2, 31, 1023, 1024, 1025, 3000])
def test_draws_are_the_references(vocabulary: int, keys: list[DrawKey]) -> None:
    z = f32_randn(40, vocabulary, seed=vocabulary, scale=0.5)
    filters = [None, retained_mask(z, 1.25, min(7, vocabulary), 0.9)]
    for mask in filters:
        expected = operators("reference").draw(z, 1.25, mask, keys)
        for threads in THREADS:
            with kernel_threads(threads):
                assert_bitwise(operators("cpu").draw(in_nan(z), 1.25, mask, keys), expected, f"V {vocabulary}")
    if vocabulary > 1000:
        moved = [DrawKey(k.seed, k.step, k.prompt, k.sample, k.position ^ 1024) for k in keys]
        assert differing(operators("cpu").draw(z, 1.25, None, moved), operators("cpu").draw(z, 1.25, None, keys)) > 20


def test_a_draw_does_not_depend_on_its_batch() -> None:
    z, keys = f32_randn(60, 300, seed=1), draw_keys(60)
    whole = operators("cpu").draw(z, 1.0, None, keys)
    order = torch.randperm(60, generator=generator(2))
    shuffled = operators("cpu").draw(z[order], 1.0, None, [keys[i] for i in order.tolist()])
    assert_bitwise(shuffled, whole[order], "another order")
    assert_bitwise(operators("cpu").draw(z[9:10], 1.0, None, keys[9:10]), whole[9:10], "alone")


def test_ties_go_to_the_lowest_existing_column() -> None:
    """Scores of +inf tie however the noise falls; the set decides which columns take part."""
    z = torch.zeros(1, 40)
    z[0, [7, 9, 30]] = torch.inf
    for name in ("cpu", "reference"):
        assert operators(name).draw(z, 1.0, None, draw_keys(1)).tolist() == [7]
        mask = torch.zeros(1, 5, dtype=torch.uint8)
        mask[0, 1], mask[0, 3] = 0b10, 0b01000000  # columns 9 and 30
        assert operators(name).draw(z, 1.0, mask, draw_keys(1)).tolist() == [9]


def test_bits_behind_the_vocabulary_are_no_columns() -> None:
    z = f32_randn(200, 13, seed=1)
    full = torch.full((200, 2), 255, dtype=torch.uint8)
    keys = draw_keys(200)
    assert_bitwise(
        operators("cpu").draw(z, 1.0, full, keys), operators("cpu").draw(z, 1.0, None, keys), "13 of 16 bits"
    )


@pytest.mark.parametrize("field", ["seed", "step", "prompt", "sample", "position"])
@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_wider_identity_is_refused(field: str, value: int) -> None:
    given = dict.fromkeys(("seed", "step", "prompt", "sample", "position"), 0) | {field: value}
    with pytest.raises(ValueError, match=f"{field} {value} does not fit in 32 bits"):
        DrawKey(**given)


def test_counter_words_keep_their_unsigned_bits() -> None:
    seed, step, words = counters([DrawKey(1, 2, HIGH, 2**31, 2**31 - 1)])
    assert (seed, step) == (1, 2)
    assert words.numpy().view(np.uint32).tolist() == [[2**31 - 1, 2**31, HIGH]]


# Retained sets


def sorted_set(z: Tensor, inv_t: float, top_k: int, top_p: float) -> set[int]:
    """The contract said again with Python's own sort and integers, one row."""
    zs = [float(value) + 0.0 for value in z * torch.tensor(inv_t)]
    order = sorted(range(len(zs)), key=lambda i: (-zs[i], i))
    if top_k >= 0:
        order = order[:top_k]
    if top_p >= 1.0:
        return set(order)
    weights = exp((z * torch.tensor(inv_t))[order] - zs[order[0]]).double().tolist()
    mass = [math.floor(weight * 2.0**32) for weight in weights]
    target, total = math.ceil(top_p * float(sum(mass))), 0
    for count, value in enumerate(mass, 1):
        total += value
        if total >= target:
            return set(order[:count])
    return set(order)


def columns(mask: Tensor | None, row: int, vocabulary: int) -> set[int]:
    if mask is None:
        return set(range(vocabulary))
    return set(unpack_mask(mask, 0, vocabulary)[row].nonzero()[:, 0].tolist())


FILTERS = [(-1, 1.0), (1, 1.0), (20, 1.0), (-1, 0.95), (-1, 0.8), (20, 0.8), (5, 0.999999), (-1, 1e-9), (500, 0.5)]


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("kind", ["random", "ties", "zeros"])
def test_retained_sets_against_a_sorted_list(kind: str, top_k: int, top_p: float) -> None:
    vocabulary = 203
    z = f32_randn(12, vocabulary, seed=1, scale=2.0)
    if kind == "ties":
        z = (z * 2).round() / 2
    if kind == "zeros":
        z = torch.where(torch.rand(z.shape, generator=generator(2)) < 0.5, 0.0, -0.0)
    for temperature in (0.7, 1.0, 1.3):
        inv_t = inverse_temperature(temperature)
        mask = retained_mask(z, inv_t, top_k, top_p)
        for row in range(12):
            kept = columns(mask, row, vocabulary)
            assert kept == sorted_set(z[row], inv_t, top_k, top_p)
            if top_k > 0 and top_p == 1.0:
                assert len(kept) == min(top_k, vocabulary)
        if mask is not None and vocabulary % 8:
            assert not bool((mask[:, -1] >> (vocabulary % 8)).any()), "bits behind the vocabulary"


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("top_k", [-1, 20])
def test_retained_sets_against_fp64(top_k: int, top_p: float) -> None:
    """The shortest prefix in fp64, up to a mass within 1e-6 of top_p, where fp32's exp may decide."""
    z = f32_randn(200, 151, seed=3, scale=2.0)
    mask = retained_mask(z, inverse_temperature(0.7), top_k, top_p)
    assert mask is not None
    scaled, order = (z.double() / 0.7).sort(dim=1, descending=True, stable=True)
    count = 151 if top_k < 0 else top_k
    mass = scaled[:, :count].softmax(1).cumsum(1)
    length = unpack_mask(mask, 0, 151).sum(1)
    for row in range(200):
        kept = int(length[row])
        assert columns(mask, row, 151) == set(order[row, :kept].tolist())
        assert float(mass[row, kept - 1]) >= top_p - 1e-6
        assert kept == 1 or float(mass[row, kept - 2]) < top_p + 1e-6


def test_filters_that_keep_everything_skip_the_mask() -> None:
    z = f32_randn(3, 50, seed=1)
    for top_k in (-1, 50, 51, 10**6):
        assert retained_mask(z, 1.0, top_k, 1.0) is None
    assert columns(retained_mask(z, 1.0, 50, 0.5), 0, 50) == columns(retained_mask(z, 1.0, -1, 0.5), 0, 50)


def test_a_threshold_would_keep_every_tie() -> None:
    """The control: ``z >= k-th value`` keeps more than k where columns tie; the contract keeps the lowest ids."""
    z = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert columns(retained_mask(z, 1.0, 2, 1.0), 0, 6) == {1, 2}
    assert int((z >= z.topk(2).values[:, -1:]).sum()) == 4


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    z = f32_randn(30, 400, seed=1, scale=3.0)
    whole = retained_mask(z, 1.0, 50, 0.9)
    assert whole is not None
    for row in (0, 13, 29):
        alone = retained_mask(z[row : row + 1], 1.0, 50, 0.9)
        assert alone is not None
        assert_bitwise(alone, whole[row : row + 1], f"row {row}")
