"""AdamW in plain torch: one rounding an operation, no fused ``alpha=`` forms."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.adamw import AdamProvider, AdamScalars
from rl_engine.ops.functions import f32, sqrt


class ReferenceAdam(AdamProvider):
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
        before = master.bfloat16().view(torch.int16)
        g = grad * f32(clip)
        m.copy_(m * f32(scalars.beta1) + g * f32(scalars.one_minus_beta1))
        v.copy_(v * f32(scalars.beta2) + (g * f32(scalars.one_minus_beta2)) * g)
        ratio = m / (sqrt(v) / f32(scalars.root_bc2) + f32(scalars.eps))
        master.copy_(master * f32(scalars.decay) - ratio * f32(scalars.step_size))
        after = master.bfloat16()
        if weight is not None:
            weight.copy_(after)
        return (after.view(torch.int16) != before).sum()
