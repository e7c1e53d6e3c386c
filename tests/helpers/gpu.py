"""What the GPU tests share: the skip, fp64 attention."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from rl_engine.numerics.bits import compare_bits

HAVE_GPU = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
needs_gpu = pytest.mark.skipif(not HAVE_GPU, reason="no GPU that torch and Triton see")


def on_gpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.cuda() for x in tensors)


def differing(a: Tensor, b: Tensor) -> int:
    """Number of elements whose bits differ, on whatever device."""
    return compare_bits(a.detach().cpu().contiguous(), b.detach().cpu().contiguous()).count


def attention_fp64(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of causal attention in fp64, sample by sample."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group, outs, first = q.shape[1] // k.shape[1], [], 0
    for length in lengths:
        qs, ks, vs = (x[first : first + length].transpose(0, 1) for x in leaves)
        scores = qs @ ks.repeat_interleave(group, 0).transpose(1, 2) * q.shape[2] ** -0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append((weights @ vs.repeat_interleave(group, 0)).transpose(0, 1))
        first += length
    out = torch.cat(outs)
    torch.autograd.backward(out, dout.double())
    return (out.detach(), *(x.grad for x in leaves))  # type: ignore[return-value]
