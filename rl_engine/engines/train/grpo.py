"""GRPO outside the tensor operators: fp64, in the samples' canonical order, rounded once.

Group-relative advantages: Shao et al., DeepSeekMath (2024), equation of section 4.1; clipped objective: Schulman et
al., PPO (2017); k3 estimate of the KL: Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def group_advantages(rewards: list[float], groups: list[int], std_normalization: bool, eps: float) -> list[float]:
    """fp64 advantage of every sample: reward minus its group's mean, over (unbiased deviation + eps) if asked.

    ``groups`` names each sample's prompt. Sums are correctly rounded (``math.fsum``), so their order does not matter.
    A group of one sample, or of equal rewards, has advantage 0.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        values = [rewards[i] for i in indices]
        mean = math.fsum(values) / len(values)
        if len(values) == 1 or all(value == values[0] for value in values):
            continue
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
        for i in indices:
            advantages[i] = (rewards[i] - mean) / (deviation + eps) if std_normalization else rewards[i] - mean
    return advantages


@dataclasses.dataclass(frozen=True, eq=False)
class TokenLoss:
    """Per token, fp64 [R]: loss / N, its derivative by logp, the k3 estimate, and whether the clip is active."""

    loss: F64
    coefficient: F64
    kl: F64
    clipped: npt.NDArray[np.bool_]


def token_loss(
    logp: F64,
    old: F64,
    reference: F64 | None,
    advantage: F64,
    denominator: int,
    clip: tuple[float, float],
    kl_coef: float,
) -> TokenLoss:
    """``(-min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef k3) / N`` with ``r = exp(logp - old)``, all fp64 [R].

    ``k3 = exp(ref - logp) - (ref - logp) - 1``. The derivative is exact: A r where the unclipped term is the minimum,
    else 0.
    """
    low, high = clip
    ratio = np.exp(logp - old)
    unclipped, bounded = ratio * advantage, np.clip(ratio, 1.0 - low, 1.0 + high) * advantage
    clipped = bounded < unclipped
    loss = -np.minimum(unclipped, bounded)
    coefficient = np.where(clipped, 0.0, -unclipped)
    kl = np.zeros_like(logp)
    if reference is not None:
        gap = reference - logp
        kl = np.expm1(gap) - gap
        loss = loss + kl_coef * kl
        coefficient = coefficient + kl_coef * -np.expm1(gap)
    return TokenLoss(loss / denominator, coefficient / denominator, kl, clipped)
