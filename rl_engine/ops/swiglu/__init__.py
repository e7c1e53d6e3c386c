"""SwiGLU on the joined projection x = [gate | up], bf16 [T, 2F] -> bf16 [T, F].

Contract. ``sigma = 1 / (1 + exp(-g))``, ``a = bf16(fl(fl(g sigma) u))``. Backward: sigma by the forward's code,
``du = bf16(fl(da fl(g sigma)))``, ``dg = bf16(fl(fl(da u) fl(sigma fl(1 + fl(g fl(1 - sigma))))))``. Elementwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SwigluProvider:
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("a provider defines forward")

    def backward(self, da: Tensor, x: Tensor) -> Tensor:
        raise AssertionError("a provider defines backward")

    def __call__(self, x: Tensor) -> Tensor:
        return _Swiglu.apply(x, self) if torch.is_grad_enabled() else self.forward(x)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, provider: SwigluProvider) -> Tensor:
        ctx.save_for_backward(x)
        ctx.provider = provider
        return provider.forward(x)

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.provider.backward(da.contiguous(), x), None
