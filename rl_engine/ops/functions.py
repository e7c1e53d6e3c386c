"""Elementary functions and sums of the CPU contract, in plain torch: the same roundings as ``csrc/rlk.h``.

Each step below is one IEEE operation in fp32, so any library, instruction set and thread count gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.numerics.contract import Contract

LOG2_E = 1.44269504088896341
LN2_HIGH = 0.693145751953125  # 15 significant bits: n * LN2_HIGH is exact for every exponent n
LN2_LOW = 1.42860676533018e-06
MAGIC = 12582912.0  # 1.5 * 2^23
FOLD_AXIS = Contract().fold_axis


def f32(value: float) -> Tensor:
    """A scalar rounded once to fp32."""
    return torch.tensor(value, dtype=torch.float32)


def exp(x: Tensor) -> Tensor:
    """exp of fp32 ``x``, elementwise; +0 below -87.25, +inf above 88.72. Error below 2 ulp."""
    shifted = x * f32(LOG2_E) + f32(MAGIC)
    n = shifted - f32(MAGIC)
    r = (x - n * f32(LN2_HIGH)) - n * f32(LN2_LOW)
    p = torch.full_like(r, 1.98412698e-4)
    for coefficient in (1.38888889e-3, 8.33333377e-3, 4.16666679e-2, 1.66666672e-1, 0.5):
        p = p * r + f32(coefficient)
    p = (p * (r * r) + r) + f32(1.0)
    magic_bits = f32(MAGIC).view(torch.int32)
    scaled = p.view(torch.int32) + ((shifted.view(torch.int32) - magic_bits) << 23)
    y = scaled.view(torch.float32)
    y = torch.where(x < -87.25, f32(0.0), y)
    y = torch.where(x > f32(88.72), f32(torch.inf), y)
    return torch.where(x.isnan(), x, y)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of fp32 ``x``, elementwise."""
    tiny = x < f32(1.17549435e-38)
    scaled = torch.where(tiny, x * f32(16777216.0), x)
    shifted = scaled.view(torch.int32) - 0x3F3504F3
    e = (shifted >> 23).to(torch.float32) - torch.where(tiny, f32(24.0), f32(0.0))
    f = ((shifted & 0x7FFFFF) + 0x3F3504F3).view(torch.float32)
    s = (f - f32(1.0)) / (f + f32(1.0))
    z = s * s
    p = torch.full_like(z, 0.111111112)
    for coefficient in (0.142857149, 0.2, 0.333333343):
        p = p * z + f32(coefficient)
    p = (p * z) * (s + s) + (s + s)
    y = e * f32(LN2_HIGH) + (e * f32(LN2_LOW) + p)
    y = torch.where(x == 0, f32(-torch.inf), y)
    y = torch.where(x < 0, f32(torch.nan), y)
    return torch.where(x.isnan() | (x == torch.inf), x, y)


def sqrt(x: Tensor) -> Tensor:
    """IEEE square root of fp32 ``x``. torch's own is the vector library's and not correctly rounded (15 % of random
    values are one ulp off); a root in fp64 rounded to fp32 is."""
    return x.double().sqrt().float()


def log1p(x: Tensor) -> Tensor:
    """log(1 + x) of fp32 ``x`` in (-1, 0], elementwise; the rounding error of 1 + x is given back."""
    w = f32(1.0) + x
    lost = x - (w - f32(1.0))
    return log(w) + lost / w


def tree_sum(x: Tensor) -> Tensor:
    """Sum of the last axis by the written tree (fp32): axes over 1,024 are folded, then neighbours are added in
    pairs."""
    n = x.shape[-1]
    if n > FOLD_AXIS:
        x = torch.nn.functional.pad(x, (0, -n % FOLD_AXIS))
        chunks = x.unflatten(-1, (-1, FOLD_AXIS))
        x = chunks[..., 0, :]
        for k in range(1, chunks.shape[-2]):
            x = x + chunks[..., k, :]
    width = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def chain_gemm(a: Tensor, b: Tensor) -> Tensor:
    """fp32 [M, N] of bf16 (or bf16-valued fp32) a [M, K] and b [K, N]: one accumulator, k ascending from +0."""
    a, b = a.float(), b.float()
    out = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        out = out + a[:, k : k + 1] * b[k]
    return out


def chain256_gemm(a: Tensor, b: Tensor) -> Tensor:
    """The fallback's order: BLAS products over K blocks of 256, rows and columns padded to at least 16, blocks added.

    Whether the BLAS library gives the same bits for every row and column count is proven on the host, not assumed.
    """
    m, n = a.shape[0], b.shape[1]
    a = torch.nn.functional.pad(a.float(), (0, 0, 0, max(-m % 16, 0)))
    b = torch.nn.functional.pad(b.float(), (0, max(-n % 16, 0)))
    out = torch.zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], 256):
        out.addmm_(a[:, start : start + 256], b[start : start + 256])
    return out[:m, :n]
