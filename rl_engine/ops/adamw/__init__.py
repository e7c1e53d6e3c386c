"""AdamW on fp32 master weights and moments.

Contract. ``m = fl(fl(b1 m) + fl((1 - b1) g))``, ``v = fl(fl(b2 v) + fl(fl((1 - b2) g) g))``,
``p = fl(fl(p (1 - lr wd)) - fl(fl(lr / bc1) fl(m / (fl(fl(sqrt v) / sqrt(bc2)) + eps))))`` with ``g = fl(grad clip)``.
Scalars are computed in fp64 from the integer step and cast to fp32 once. Decay on 2-D tensors only; the bf16 weight is
the master rounded to nearest even, before and after. Elementwise, so any sharding gives the same bits.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor


def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


@dataclasses.dataclass(frozen=True)
class AdamScalars:
    """fp32 scalars of one update."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    decay: float
    step_size: float
    root_bc2: float
    eps: float

    @staticmethod
    def at(step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> AdamScalars:
        """``step`` counts applied updates from 1; ``weight_decay`` is 0 for tensors that are not 2-D."""
        bc1, bc2 = 1.0 - beta1**step, 1.0 - beta2**step
        values = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 - lr * weight_decay, lr / bc1, math.sqrt(bc2), eps)
        return AdamScalars(*(_f32(value) for value in values))


class AdamProvider:
    def update(
        self,
        master: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        weight: Tensor | None,
        clip: float,
        scalars: AdamScalars,
    ) -> Tensor:
        """In place: master, m, v fp32 and weight bf16, one shape, contiguous; ``clip`` is fp32.

        Args:
            weight: written, never read; None where its owner rounds the master itself.

        Returns:
            How many elements of bf16(master) changed, int64 [].
        """
        raise AssertionError("a provider defines update")
