"""Rotary position embedding, half-split.

Contract. ``y1 = fl(fl(x1 c) - fl(x2 s))``, ``y2 = fl(fl(x2 c) + fl(x1 s))`` in fp32, one rounding to bf16. Backward:
the same with -s. One table per run: computed in fp64 on a CPU, stored fp32, its bytes are in the digest.

x is bf16 [T, heads, D] with any token stride, positions int64 [T] from the sample's first token; the result is
contiguous.

A provider may take QK norm along (:class:`FusedRope`): the norm's result is rounded to bf16 before it is rotated, and
the rotated gradient before it enters the norm's backward, as where each operator stores. So the bits are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from torch import Tensor

from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rms_norm import NormProvider
from rl_engine.ops.weight import Weight


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


class FusedRope(RopeProvider):
    """A rotation that can do QK norm in the same pass: q bf16 [T, heads, D], k bf16 [T, kv_heads, D], before the norm.

    ``norm_rotate`` gives both rotated; ``norm_rotate_backward`` takes gradients behind the rotation to those before the
    norm, and adds the gains' gradients into the weights that train (both or neither); ``layout`` is needed for those.
    """

    def fuses(self, norm: Any, width: int) -> bool:
        """Whether what follows does the work of the provider ``norm`` too, at head_dim ``width``."""
        raise AssertionError("a provider defines fuses")

    def norm_rotate(
        self, q: Tensor, k: Tensor, q_norm: Weight, k_norm: Weight, eps: float, positions: Tensor, table: RopeTable
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("a provider defines norm_rotate")

    def norm_rotate_backward(
        self,
        dq: Tensor,
        dk: Tensor,
        q: Tensor,
        k: Tensor,
        q_norm: Weight,
        k_norm: Weight,
        eps: float,
        positions: Tensor,
        table: RopeTable,
        layout: PackedLayout | None,
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("a provider defines norm_rotate_backward")

    def with_norm(
        self,
        q: Tensor,
        k: Tensor,
        q_norm: Weight,
        k_norm: Weight,
        eps: float,
        positions: Tensor,
        table: RopeTable,
        layout: PackedLayout | None,
        norm: NormProvider,
        exchange: Exchange = ALONE,
    ) -> tuple[Tensor, Tensor]:
        """As ``norm_rotate``, with its backward pass where gradients are wanted; ``norm`` is the norm's provider."""
        positions = positions.contiguous()
        if not torch.is_grad_enabled():
            return self.norm_rotate(q, k, q_norm, k_norm, eps, positions, table)
        rotated: tuple[Tensor, Tensor] = _NormRope.apply(
            *(q, k, q_norm, k_norm, eps, positions, table, layout, self, norm, exchange)
        )
        return rotated


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_norm: Weight,
        k_norm: Weight,
        eps: float,
        positions: Tensor,
        table: RopeTable,
        layout: PackedLayout | None,
        provider: FusedRope,
        norm: NormProvider,
        exchange: Exchange,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k)
        ctx.arguments, ctx.layout, ctx.provider = (q_norm, k_norm, eps, positions, table), layout, provider
        ctx.norm, ctx.exchange = norm, exchange
        return provider.norm_rotate(q, k, *ctx.arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = (gradient.contiguous() for gradient in gradients)
        q, k = ctx.saved_tensors
        q_norm, k_norm, eps, positions, table = ctx.arguments
        if ctx.exchange.alone:
            found = ctx.provider.norm_rotate_backward(dq, dk, q, k, *ctx.arguments, ctx.layout)
            return *found, *[None] * 9
        # The gains' terms are exchanged: two operators, to the same bits.
        turned = (ctx.provider.rotate(dy, positions, table, -1.0) for dy in (dq, dk))
        places = zip(turned, (q, k), (q_norm, k_norm), strict=True)
        return *(ctx.norm.gradients(*place, eps, ctx.layout, ctx.exchange) for place in places), *[None] * 9
