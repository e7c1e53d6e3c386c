"""What a Python error refuses where the host may wait, the device refuses where it may not; nothing goes unrefused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.models.decoder import Decoder
from rl_engine.models.weights import random_weights
from rl_engine.ops.exchange import Exchange
from rl_engine.ops.functions import exp, f32
from rl_engine.ops.sample import NonFiniteLogits, refuse_nan
from rl_engine.ops.sample.retained import retained_mask
from rl_engine.ops.selected_logp import check_targets
from rl_engine.ops.selected_logp.reference import unpack_mask
from tests.helpers.models import llama
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ops import draw_keys, f32_randn, operators

CONFIG: ModelConfig = llama(layers=1, intermediate=96, vocabulary=1501)


@pytest.mark.parametrize("bad", [-1, 300, 2**40])
def test_a_target_outside_the_vocabulary(bad: int) -> None:
    targets, message = torch.tensor([3, bad, 7]), "outside the vocabulary of 300"
    with pytest.raises(ValueError, match=message):
        check_targets(targets, 300, None)
    with pytest.raises(RuntimeError, match=message):
        check_targets(targets, 300, None, waits=False)
    with pytest.raises(RuntimeError, match=message):
        operators("cpu").logp_from_logits(f32_randn(3, 300, seed=1), targets, 1.0, None, Exchange(waits=False))


def test_a_target_outside_its_retained_set() -> None:
    mask = retained_mask(f32_randn(4, 300, seed=1), 1.0, 5, 1.0)
    assert mask is not None
    kept = unpack_mask(mask, 0, 300)
    inside, outside = kept.int().argmax(1), (~kept).int().argmax(1)
    for waits in (True, False):
        check_targets(inside, 300, mask, waits)
    for row in range(4):
        targets = torch.where(torch.arange(4) == row, outside, inside)
        with pytest.raises(ValueError, match=f"row {row} lies outside its retained set"):
            check_targets(targets, 300, mask)
        with pytest.raises(RuntimeError, match="lies outside its retained set"):
            check_targets(targets, 300, mask, waits=False)


def test_a_logit_that_is_no_number() -> None:
    for waits, error in ((True, NonFiniteLogits), (False, RuntimeError)):
        assert refuse_nan(torch.tensor([0, 5]), waits).tolist() == [0, 5]
        with pytest.raises(error, match="a logit is NaN"):
            refuse_nan(torch.tensor([0, -1]), waits)
        weights = random_weights(CONFIG, 3)
        weights.head.value[7] = torch.nan
        decoder = Decoder(weights, operators("cpu"), 16, waits=waits)
        with torch.no_grad(), pytest.raises(error, match="a logit is NaN"):
            decoder.draw(torch.ones(2, CONFIG.hidden).bfloat16(), 1.0, -1, 1.0, draw_keys(2))


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (20, 0.9)])
def test_drawing_without_waiting_has_the_same_bits(top_k: int, top_p: float) -> None:
    weights, hidden = random_weights(CONFIG, 3), f32_randn(5, CONFIG.hidden, seed=2).bfloat16()
    found = []
    for waits in (True, False):
        decoder = Decoder(weights, operators("cpu"), 16, waits=waits)
        with torch.no_grad():
            drawn = decoder.draw(hidden, 0.7, top_k, top_p, draw_keys(5))
            found.append((drawn.tokens, drawn.logprobs, decoder.raw_logprobs(hidden, drawn.tokens)))
    for a, b in zip(*found, strict=True):
        assert_bitwise(a, b, "waits or not")


def by_host(z: Tensor, top_p: float) -> Tensor:
    """How many columns top-p keeps of each row, its threshold in Python's own numbers."""
    values = torch.sort(z, dim=1, descending=True, stable=True).values
    mass = (exp(values - values[:, :1]).double() * 2.0**32).floor().long()
    sums = mass.cumsum(1)
    targets = [math.ceil(top_p * float(total)) for total in sums[:, -1].tolist()]
    return torch.tensor([min(int((row < t).sum()) + 1, z.shape[1]) for row, t in zip(sums, targets, strict=True)])


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.3, 0.5, 0.9, 0.95, 1 - 2**-53, 2 / 3])
def test_the_threshold_of_top_p_is_the_same_number_on_the_device(top_p: float) -> None:
    """Sums above 2^53 round when they become fp64; flat rows have many columns at the threshold."""
    flat = torch.full((2, 3_000_000), 0.25)
    rows = f32_randn(40, 1501, seed=3, scale=4.0) + f32(0.0)
    for z in (flat[:, :1024], rows) if top_p != 0.5 else (flat, rows):
        mask = retained_mask(z, 1.0, -1, top_p)
        assert mask is not None
        counts = sum(((mask >> bit) & 1).long().sum(1) for bit in range(8))
        assert_bitwise(counts, by_host(z, top_p), f"top-p {top_p}")
