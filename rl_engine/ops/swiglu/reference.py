"""SwiGLU in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.functions import exp, f32
from rl_engine.ops.swiglu import SwigluProvider


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in fp32, the contract's roundings."""
    return f32(1.0) / (f32(1.0) + exp(-x))


class ReferenceSwiglu(SwigluProvider):
    def forward(self, x: Tensor) -> Tensor:
        g, u = x.float().chunk(2, -1)
        return (g * sigmoid(g) * u).bfloat16()

    def backward(self, da: Tensor, x: Tensor) -> Tensor:
        g, u = x.float().chunk(2, -1)
        da = da.float()
        sigma = sigmoid(g)
        d_up = da * (g * sigma)
        d_gate = (da * u) * (sigma * (f32(1.0) + g * (f32(1.0) - sigma)))
        return torch.cat([d_gate, d_up], -1).bfloat16()
