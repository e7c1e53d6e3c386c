"""Advantages and the loss of a token against formulas written down again in fp64."""

from __future__ import annotations

import math
import statistics

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine.engines.train.grpo import group_advantages, token_loss
from tests.helpers.numeric import assert_bitwise, assert_close

F64 = npt.NDArray[np.float64]
ROUNDING = "both sides are fp64; they round a few times in another order"
EPS = 1e-6


@pytest.mark.parametrize("normalise", [True, False])
def test_advantages_of_interleaved_groups(normalise: bool) -> None:
    rewards = [1.0, 0.0, 0.25, -3.0, 1.0, 0.5, 7.0]
    groups = [4, 9, 4, 9, 4, 9, 4]
    actual = group_advantages(rewards, groups, normalise, EPS)
    for group in (4, 9):
        members = [i for i, g in enumerate(groups) if g == group]
        values = [rewards[i] for i in members]
        scale = statistics.stdev(values) + EPS if normalise else 1.0
        expected = [(v - statistics.fmean(values)) / scale for v in values]
        assert_close(np.array([actual[i] for i in members]), np.array(expected), rtol=1e-14, atol=1e-15, why=ROUNDING)


def test_groups_that_teach_nothing_have_advantage_zero() -> None:
    rewards = [5.0, 0.1, 0.1, 0.1, 0.0, 0.0]
    assert group_advantages(rewards, [0, 1, 1, 1, 2, 2], True, EPS) == [0.0] * 6
    assert group_advantages(rewards, [0, 1, 1, 1, 2, 2], False, EPS) == [0.0] * 6
    assert group_advantages([], [], True, EPS) == []


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9), st.randoms())
@settings(deadline=None)
def test_advantages_follow_the_samples_when_these_are_shuffled(rewards: list[float], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = group_advantages(rewards, [0] * len(rewards), True, EPS)
    shuffled = group_advantages([rewards[i] for i in order], [0] * len(rewards), True, EPS)
    assert_bitwise(np.array(shuffled), np.array([straight[i] for i in order]), "advantages in another order")
    assert abs(math.fsum(straight)) < 1e-6 * max(1.0, max(map(abs, straight)))


def expected_loss(
    logp: F64,
    old: F64,
    reference: F64 | None,
    advantage: F64,
    denominator: int,
    clip: tuple[float, float],
    kl_coef: float,
) -> tuple[F64, F64]:
    """Loss per token and its derivative, by autograd through the formula as the papers print it."""
    x = torch.tensor(logp, requires_grad=True)
    ratio = (x - torch.tensor(old)).exp()
    adv = torch.tensor(advantage)
    objective = torch.minimum(ratio * adv, ratio.clamp(1 - clip[0], 1 + clip[1]) * adv)
    loss = -objective
    if reference is not None:
        other = torch.tensor(reference).exp() / x.exp()
        loss = loss + kl_coef * (other - other.log() - 1)
    loss = loss / denominator
    loss.sum().backward()
    assert x.grad is not None
    return loss.detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.1, 0.4)])
def test_token_loss_against_autograd(kl_coef: float, clip: tuple[float, float]) -> None:
    """Ratios on both sides of both bounds, advantages of both signs and zero."""
    rng = np.random.default_rng(0)
    old = -rng.random(400) * 6
    logp = old + rng.uniform(-0.8, 0.8, 400)
    reference = logp + rng.uniform(-1, 1, 400) if kl_coef else None
    advantage = rng.choice([-1.5, -0.2, 0.0, 0.7, 2.0], 400)
    actual = token_loss(logp, old, reference, advantage, 400, clip, kl_coef)
    loss, derivative = expected_loss(logp, old, reference, advantage, 400, clip, kl_coef)
    assert_close(actual.loss, loss, rtol=1e-12, atol=1e-16, why=ROUNDING)
    assert_close(actual.coefficient, derivative, rtol=1e-12, atol=1e-16, why=ROUNDING)
    ratio = np.exp(logp - old)
    clipped = ((advantage > 0) & (ratio > 1 + clip[1])) | ((advantage < 0) & (ratio < 1 - clip[0]))
    assert 40 < clipped.sum() < 360
    assert_bitwise(actual.clipped, clipped, "clipped tokens")


def test_token_loss_on_policy_is_minus_the_advantage() -> None:
    """The ratio is exactly 1: no token is clipped, and the derivative is -A / N without an error."""
    logp, advantage = np.array([-0.5, -3.0, -1e-9, 0.0]), np.array([0.3, -2.0, 1.0, 4.0])
    result = token_loss(logp, logp, logp, advantage, 7, (0.2, 0.2), 0.5)
    assert_bitwise(result.coefficient, -advantage / 7, "derivative")
    assert_bitwise(result.loss, -advantage / 7, "loss")
    assert not result.clipped.any()
    assert not result.kl.any()


def test_zero_advantages_leave_only_the_kl_term() -> None:
    logp, reference = np.array([-1.0, -2.0]), np.array([-1.5, -0.5])
    without = token_loss(logp, logp - 1.0, None, np.zeros(2), 2, (0.2, 0.2), 0.0)
    assert not without.loss.any()
    assert not without.coefficient.any()
    assert not without.clipped.any()
    with_kl = token_loss(logp, logp - 1.0, reference, np.zeros(2), 2, (0.2, 0.2), 0.1)
    loss, derivative = expected_loss(logp, logp - 1.0, reference, np.zeros(2), 2, (0.2, 0.2), 0.1)
    assert_close(with_kl.loss, loss, rtol=1e-12, atol=0.0, why=ROUNDING)
    assert_close(with_kl.coefficient, derivative, rtol=1e-12, atol=0.0, why=ROUNDING)
    assert (with_kl.kl > 0).all()


def test_a_response_of_one_token() -> None:
    arguments = (np.array([-1.0]), np.array([-1.1]), np.array([-0.9]), np.array([0.5]))
    result = token_loss(*arguments, 1, (0.2, 0.2), 0.2)
    loss, derivative = expected_loss(*arguments, 1, (0.2, 0.2), 0.2)
    assert_close(result.loss, loss, rtol=1e-12, atol=0.0, why=ROUNDING)
    assert_close(result.coefficient, derivative, rtol=1e-12, atol=0.0, why=ROUNDING)
