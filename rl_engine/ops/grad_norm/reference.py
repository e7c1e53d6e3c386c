"""Exponent bins in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.grad_norm import NormBinsProvider


class ReferenceNormBins(NormBinsProvider):
    def bins(self, *grads: Tensor) -> Tensor:
        return torch.stack([self._one(grad) for grad in grads]).sum(0)

    def _one(self, grad: Tensor) -> Tensor:
        bits = grad.flatten().view(torch.int32).long()
        exponent = (bits >> 23) & 255
        significand = (bits & 0x7FFFFF) | torch.where(exponent > 0, 0x800000, 0)
        square = significand * significand
        out = torch.zeros(256, 2, dtype=torch.int64)
        for value in exponent.unique().tolist():
            chosen = square[exponent == value]
            out[value, 0], out[value, 1] = (chosen & 0xFFFFFF).sum(), (chosen >> 24).sum()
            if value == 255:  # an infinity has a zero fraction but still counts
                out[value, 1] = out[value, 1].clamp(min=1)
        return out
