"""Inputs that show another order, and views whose surroundings are NaN."""

from __future__ import annotations

import torch
from torch import Tensor

LARGE = 4194304.0  # 2^22: beside it fp32 has a spacing of 1/2
UNIT = 0.30078125  # a bf16 value that is no multiple of it


class Inputs:
    """Seeded tensors on the GPU."""

    def __init__(self, seed: int = 20251) -> None:
        self.random = torch.Generator("cuda").manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.random, device="cuda") * scale).bfloat16()

    def order_revealing(self, rows: int, depth: int) -> Tensor:
        """bf16 [rows, depth]: units of both signs, and +2^22, -2^22 at two places that move from row to row.

        Each partial sum rounds while a large value is in it, so the result tells the order; since the signs balance,
        the result is small and even bf16 shows it.
        """
        signs = torch.randint(0, 2, (rows, depth), generator=self.random, device="cuda") * 2 - 1
        x = signs.float() * UNIT
        if depth >= 2:
            keys = torch.rand((rows, depth), generator=self.random, device="cuda")
            places = keys.topk(2, dim=1).indices
            x.scatter_(1, places[:, :1], LARGE)
            x.scatter_(1, places[:, 1:], -LARGE)
        return x.bfloat16()

    @staticmethod
    def weights(columns: int, depth: int) -> Tensor:
        """bf16 [columns, depth] of ones, every seventh row twos: products with order-revealing data stay exact."""
        w = torch.ones((columns, depth), dtype=torch.bfloat16, device="cuda")
        w[::7] = 2.0
        return w


def in_nan(x: Tensor, margin: int = 8) -> Tensor:
    """The values of x [m, n] as a view whose rows lie apart, with NaN before, between and behind; 16-byte aligned."""
    rows, columns = x.shape
    store = torch.full((rows + 2, columns + 2 * margin + -columns % 8), torch.nan, dtype=x.dtype, device=x.device)
    view = store[1:-1, margin : margin + columns]
    view.copy_(x)
    return view


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.full((rows, columns), torch.nan, dtype=dtype, device="cuda")


def differing(a: Tensor, b: Tensor) -> int:
    """Elements that differ as integer views."""
    views = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), 1)
    return int((a.contiguous().view(views[a.dtype]) != b.contiguous().view(views[b.dtype])).sum())
