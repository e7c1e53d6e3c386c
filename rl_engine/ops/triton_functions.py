"""Elementary functions and sums of the GPU contract, as Triton code, in the one form that every kernel uses.

Contract. Contraction is off (:func:`launch` sets it for every kernel): a product that meets an addition is rounded
first, and a fused multiply-add exists only where ``tl.fma`` is written. ``exp2`` is ``ex2.approx.ftz`` (``v_exp_f32``
on gfx942), ``exp(x) = exp2(fl(x log2 e))``; ``log``, ``log2`` and ``log1p`` are the device library's; division,
reciprocal and root are IEEE; ``1 / sqrt`` is their composition; ``bf16`` rounds to nearest even.

Sums follow the written tree: neighbours are added in pairs until one is left. ``tl.sum`` appears here alone, over two
elements (one addition, no order) or over integers (exact, any order).

Errors: an axis that is no power of two does not compile.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import core
from triton.language.extra import libdevice

LOG2_E = tl.constexpr(1.44269504088896341)
INTERPRETED = bool(triton.knobs.runtime.interpret)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, stages: int = 1, **meta: Any) -> None:
    """Runs ``kernel`` on ``grid`` with contraction off; an empty grid runs nothing."""
    if all(grid):
        kernel[grid](*args, num_warps=warps, num_stages=stages, enable_fp_fusion=False, **meta)


@triton.constexpr_function
def halvings(n: int) -> int:
    """log2 of a power of two."""
    assert n > 0 and n & (n - 1) == 0, f"{n} is no power of two"
    return n.bit_length() - 1


if INTERPRETED:  # the interpreter runs neither assembly nor the device library; it judges values, not bits

    @triton.jit
    def reciprocal(x):
        return tl.div_rn(1.0, x)

    @triton.jit
    def log1p(x):
        return tl.log(1.0 + x)

    @triton.jit
    def widen(x):
        return x.to(tl.float32)

    @triton.jit
    def round_bf16(x):
        return x.to(tl.bfloat16).to(tl.float32)

else:

    @core.builtin
    def reciprocal(x, _semantic=None):
        """IEEE 1 / x: the same bits as ``div_rn(1, x)``, in fewer instructions."""
        if _semantic.builder.options.backend_name != "cuda":
            return tl.div_rn(1.0, x, _semantic=_semantic)
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1, _semantic=_semantic
        )

    @core.builtin
    def widen(x, _semantic=None):
        """bf16 to fp32, two elements in two instructions."""
        if _semantic.builder.options.backend_name != "cuda":
            return x.to(tl.float32, _semantic=_semantic)
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
            _semantic=_semantic,
        )

    @core.builtin
    def round_bf16(x, _semantic=None):
        """The fp32 value of bf16(x), nearest even; two elements in three instructions, none of them a slow one."""
        if _semantic.builder.options.backend_name != "cuda":
            return x.to(tl.bfloat16, _semantic=_semantic).to(tl.float32, _semantic=_semantic)
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
            _semantic=_semantic,
        )

    @triton.jit
    def log1p(x):
        return libdevice.log1p(x)


@triton.jit
def exp2(x):
    return tl.exp2(x)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def log2(x):
    return tl.log2(x)


@triton.jit
def inverse_root(x):
    """1 / sqrt(x), both IEEE."""
    return reciprocal(tl.sqrt_rn(x))


@triton.jit
def add_pair(x, axis: tl.constexpr):
    """Sum over an axis of exactly two elements: one addition."""
    tl.static_assert(x.shape[axis] == 2, "a pair has two elements")
    return tl.sum(x, axis)


@triton.jit
def sum_integers(x, axis: tl.constexpr):
    """Sum of integers: exact, so it has no order."""
    tl.static_assert(x.dtype.is_int(), "only integers have no order")
    return tl.sum(x, axis)


@triton.jit
def tree_rows(x):
    """[R, N] -> [R]: the pair tree over the last axis, N a power of two."""
    for _ in tl.static_range(halvings(x.shape[1])):
        x = add_pair(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def tree_columns(x):
    """[N, C] -> [C]: the pair tree over the first axis, N a power of two."""
    for _ in tl.static_range(halvings(x.shape[0])):
        x = add_pair(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), 1)
    return tl.reshape(x, (x.shape[1],))


@triton.jit
def sum_block(p):
    """Row sums of attention's p [M, 64]: column bits in the order 0, 3, 4, 5, 1, 2 (a matrix unit's result holds bits
    0, 3, 4 and 5 in one thread, bits 1 and 2 across four)."""
    x = tl.reshape(p, (p.shape[0], 2, 2, 2, 2, 2, 2))  # M, bits 5 4 3 2 1 0
    x = add_pair(x, 6)
    x = add_pair(x, 3)
    x = add_pair(x, 2)
    x = add_pair(x, 1)
    x = add_pair(x, 2)
    return add_pair(x, 1)
