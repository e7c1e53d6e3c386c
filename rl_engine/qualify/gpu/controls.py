"""Deliberately wrong matrix products: what a proof must catch, at the smallest shape that has the mistake.

None is ever a provider. Each differs from the contract in one point: the axis split in two, an accumulator that starts
from the old gradient, tf32 operands.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _product_control(
    a, b, c, M, N, K, sa, sb, sc,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, TF32: tl.constexpr, PRELOAD: tl.constexpr,
):  # fmt: skip
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    pc = c + rm[:, None] * sc + rn[None, :]
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for part in tl.static_range(SPLIT):
        first = part * (K // SPLIT)
        last = K if part == SPLIT - 1 else first + K // SPLIT
        acc = tl.zeros((BM, BN), tl.float32)
        if PRELOAD:
            acc = tl.load(pc, mask=inside, other=0.0)
        for k in range(first, last, BK):
            in_k = k + rk < last
            x = tl.load(a + rm[:, None] * sa + (k + rk)[None, :], mask=(rm < M)[:, None] & in_k[None, :], other=0.0)
            y = tl.load(b + rn[None, :] * sb + (k + rk)[:, None], mask=(rn < N)[None, :] & in_k[:, None], other=0.0)
            if TF32:
                acc = tl.dot(x.to(tl.float32), y.to(tl.float32), acc, input_precision="tf32")
            else:
                acc = tl.dot(x, y, acc)
        if SPLIT == 1:
            total = acc
        else:
            total = total + acc
    tl.store(pc, total, mask=inside)


def wrong_product(
    a: Tensor, b: Tensor, out: Tensor, *, split: int = 1, tf32: bool = False, preload: bool = False
) -> None:
    """out fp32 [M, N] of a bf16 [M, K] and b bf16 [N, K], with one mistake; with none it is the chain."""
    (m, k), n = a.shape, b.shape[0]
    _product_control[(triton.cdiv(m, 16), triton.cdiv(n, 16))](
        *(a, b, out, m, n, k, a.stride(0), b.stride(0), out.stride(0)),
        BM=16, BN=16, BK=32, SPLIT=split, TF32=tf32, PRELOAD=preload, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
