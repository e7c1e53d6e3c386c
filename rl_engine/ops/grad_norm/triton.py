"""Exponent bins on a GPU, in Triton: integer sums in registers, one row of bins a program, no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.grad_norm import NormBinsProvider
from rl_engine.ops.triton_functions import launch, sum_integers

THREADS, EACH = 256, 32  # a step takes THREADS * EACH elements; EACH sums of 24 bits fit in 32
PROGRAMS = 1056


@triton.jit
def square_bins_kernel(grad, out, n, programs, T: tl.constexpr, E: tl.constexpr):
    """Bins int64 [256, 2] of every ``programs``-th step of T * E elements.

    The exponents that occur in a step are visited from the largest down; each visit adds the lower and the upper 24
    bits of the squared significands that have it. An infinity has no fraction but still counts, so that bin 255 shows.
    """
    bins, inner = tl.arange(0, 256), tl.arange(0, E)[None, :] + tl.arange(0, T)[:, None] * E
    low_sums, high_sums = tl.zeros((256,), tl.int64), tl.zeros((256,), tl.int64)
    steps = tl.cdiv(n, T * E)
    for step in range(tl.program_id(0), steps, programs):
        at = (tl.zeros_like(inner).to(tl.int64) + step) * (T * E) + inner
        bits = tl.load(grad + at, mask=at < n, other=0.0).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 255
        significand = (bits & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0)
        square = significand.to(tl.int64) * significand.to(tl.int64)
        low, high = (square & 0xFFFFFF).to(tl.int32), (square >> 24).to(tl.int32)
        present = tl.where(significand == 0, -1, exponent)
        current = tl.max(tl.max(present, 1), 0)
        while current >= 0:
            chosen = present == current
            low_sum = sum_integers(sum_integers(tl.where(chosen, low, 0), 1).to(tl.int64), 0)
            high_sum = sum_integers(sum_integers(tl.where(chosen, high, 0), 1).to(tl.int64), 0)
            low_sums += tl.where(bins == current, low_sum, 0)
            high_sums += tl.where(bins == current, high_sum, 0)
            current = tl.max(tl.max(tl.where(present < current, present, -1), 1), 0)
    at = out + tl.program_id(0).to(tl.int64) * 512 + bins * 2
    tl.store(at, low_sums)
    tl.store(at + 1, high_sums)


class TritonNormBins(NormBinsProvider):
    def bins(self, grad: Tensor) -> Tensor:
        assert grad.is_contiguous() and grad.dtype == torch.float32
        n = grad.numel()
        programs = max(min(-(-n // (THREADS * EACH)), PROGRAMS), 1)
        out = torch.empty(programs, 256, 2, dtype=torch.int64, device=grad.device)
        launch(square_bins_kernel, (programs,), grad, out, n, programs, warps=THREADS // 32, T=THREADS, E=EACH)
        return out.sum(0)
