"""Exponent bins in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.grad_norm import NormBinsProvider
from rl_engine.ops.library import load

CHUNK = 1 << 20


class CpuNormBins(NormBinsProvider):
    def bins(self, *grads: Tensor) -> Tensor:
        return torch.stack([self._one(grad) for grad in grads]).sum(0)

    def _one(self, grad: Tensor) -> Tensor:
        assert grad.is_contiguous() and grad.dtype == torch.float32
        chunks = -(-grad.numel() // CHUNK)
        out = torch.zeros(max(chunks, 1), 256, 2, dtype=torch.int64)
        load().rlk_square_bins(grad.numel(), CHUNK, grad.data_ptr(), out.data_ptr())
        return out.sum(0)
