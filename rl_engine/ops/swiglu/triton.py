"""SwiGLU on a GPU, in Triton. Elementwise, so any cut gives the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.swiglu import SwigluProvider
from rl_engine.ops.triton_functions import exp, launch, reciprocal

COLUMNS, WARPS = 1024, 4


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); the quotient is IEEE."""
    return reciprocal(1.0 + exp(-x))


@triton.jit
def swiglu_fwd_kernel(x, y, x_row, width, C: tl.constexpr):
    """C columns of one row: y bf16 [T, width] of x = [gate | up], bf16 [T, 2 width]."""
    chunks = tl.cdiv(width, C)  # one axis of the grid: another one ends at 65,535
    row, cols = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks * C + tl.arange(0, C)
    inside = cols < width
    g = tl.load(x + row * x_row + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(x + row * x_row + width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + cols, (g * sigmoid(g) * u).to(tl.bfloat16), mask=inside)


@triton.jit
def swiglu_bwd_kernel(da, x, dx, da_row, x_row, width, C: tl.constexpr):
    """C columns of one row: dx bf16 [T, 2 width]."""
    chunks = tl.cdiv(width, C)  # one axis of the grid: another one ends at 65,535
    row, cols = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks * C + tl.arange(0, C)
    inside = cols < width
    d = tl.load(da + row * da_row + cols, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(x + row * x_row + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(x + row * x_row + width + cols, mask=inside, other=0.0).to(tl.float32)
    sigma = sigmoid(g)
    d_gate = (d * u) * (sigma * (1.0 + g * (1.0 - sigma)))
    to = dx + row * (2 * width) + cols
    tl.store(to, d_gate.to(tl.bfloat16), mask=inside)
    tl.store(to + width, (d * (g * sigma)).to(tl.bfloat16), mask=inside)


class TritonSwiglu(SwigluProvider):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16 and x.stride(1) == 1
        rows, width = x.shape[0], x.shape[1] // 2
        y = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
        grid = (-(-width // COLUMNS) * rows,)
        launch(swiglu_fwd_kernel, grid, x, y, x.stride(0), width, warps=WARPS, C=COLUMNS)
        return y

    def backward(self, da: Tensor, x: Tensor) -> Tensor:
        assert x.dtype == da.dtype == torch.bfloat16 and x.stride(1) == da.stride(1) == 1
        rows, width = da.shape
        dx = torch.empty(rows, 2 * width, dtype=torch.bfloat16, device=x.device)
        grid = (-(-width // COLUMNS) * rows,)
        launch(swiglu_bwd_kernel, grid, da, x, dx, da.stride(0), x.stride(0), width, warps=WARPS, C=COLUMNS)
        return dx
