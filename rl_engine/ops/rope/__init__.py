"""Rotary position embedding, half-split.

Contract. ``y1 = fl(fl(x1 c) - fl(x2 s))``, ``y2 = fl(fl(x2 c) + fl(x1 s))`` in fp32, one rounding to bf16. Backward:
the same with -s. One table per run: computed in fp64 on a CPU, stored fp32, its bytes are in the digest.

x is bf16 [T, heads, D] with any token stride, positions int64 [T] from the sample's first token; the result is
contiguous.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RopeTable:
    """cosine and sine, fp32 [positions, D / 2]."""

    cosine: Tensor
    sine: Tensor

    @staticmethod
    def build(inverse_frequencies: Tensor, positions: int) -> RopeTable:
        """From fp64 inverse frequencies [D / 2]; angles and functions in fp64, one rounding to fp32."""
        assert inverse_frequencies.dtype == torch.float64
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse_frequencies[None]
        return RopeTable(angles.cos().float().contiguous(), angles.sin().float().contiguous())

    def to(self, device: torch.device) -> RopeTable:
        """The same bytes on ``device``."""
        return RopeTable(self.cosine.to(device), self.sine.to(device))

    def digest(self) -> str:
        """SHA-256 (hex) over both tables' bytes."""
        data = self.cosine.cpu().numpy().tobytes() + self.sine.cpu().numpy().tobytes()
        return hashlib.sha256(data).hexdigest()


class RopeProvider:
    def rotate(self, x: Tensor, positions: Tensor, table: RopeTable, sign: float) -> Tensor:
        raise AssertionError("a provider defines rotate")

    def __call__(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        if not torch.is_grad_enabled():
            return self.rotate(x, positions, table, 1.0)
        return _Rope.apply(x, positions, table, self)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, table: RopeTable, provider: RopeProvider) -> Tensor:
        ctx.positions, ctx.table, ctx.provider = positions, table, provider
        return provider.rotate(x, positions, table, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.provider.rotate(dy.contiguous(), ctx.positions, ctx.table, -1.0), None, None, None
