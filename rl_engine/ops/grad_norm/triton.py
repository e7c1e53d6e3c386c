"""Exact sums of squares on a GPU, in Triton: no atomics.

A square of fp32 is exact in fp64. Each thread adds squares into three fp64 sums whose units are 2^GAP apart, the lowest
that of the smallest square that the sums take: what one sum rounds away is exact and goes to the next, and the lowest
rounds nothing. A sum stays in one binade, so that its bits count units.

The three take squares of SPAN exponents, a window. A step with others moves the window to where its own fit; where no
window holds all of them, it moves down over the step, as often as needed. What is too large for every window is added
into its bins one exponent after another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.grad_norm import NormBinsProvider
from rl_engine.ops.triton_functions import launch, sum_integers

# A sum starts at 1.5 2^52 units and must not move by more than 2^51. The highest gets at most ADDENDS squares below
# 2^(2 SPAN + 46 - 2 GAP) units, the others ADDENDS remainders of at most 2^(GAP - 1) units: 2^50 and 2^51.
ADDENDS, SPAN, GAP = tl.constexpr(1 << 10), tl.constexpr(39), tl.constexpr(42)
LARGEST = tl.constexpr(254 - 42)  # first exponent of the highest window: the highest sum's bin is GAP above
ELEMENTS, LOADS, WARPS, PROGRAMS = 512, 8, 4, 528


@triton.jit
def _empty_bits(first, place: tl.constexpr):
    """Bits of a sum that holds nothing: 1.5 2^52 units of 2^(2 first - 300 + GAP place), place 0 the lowest."""
    return ((2 * first - 300 + GAP * place + 52 + 1023).to(tl.int64) << 52) | (1 << 51)


@triton.jit
def _empty(first, place: tl.constexpr, C: tl.constexpr):
    return (tl.zeros((C,), tl.int64) + _empty_bits(first, place)).to(tl.float64, bitcast=True)


@triton.jit
def _add(x, low, middle, high):
    """The square of fp32 ``x`` into the three sums."""
    square = x.to(tl.float64)
    square = square * square
    total = high + square
    rest = square + (high - total)
    second = middle + rest
    return low + (rest + (middle - second)), second, total


@triton.jit
def _close_one(lows, highs, bins, first, sums, place: tl.constexpr):
    units = sum_integers(sums.to(tl.int64, bitcast=True) - _empty_bits(first, place), 0)
    here = bins == first + GAP // 2 * place
    return lows + tl.where(here, units & 0xFFFFFF, 0), highs + tl.where(here, units >> 24, 0)


@triton.jit
def _close(lows, highs, bins, first, low, middle, high):
    """The three sums into bins."""
    lows, highs = _close_one(lows, highs, bins, first, low, 0)
    lows, highs = _close_one(lows, highs, bins, first, middle, 1)
    return _close_one(lows, highs, bins, first, high, 2)


@triton.jit
def _add_to_bins(lows, highs, bins, magnitude, exponent):
    """Squares into their own bins, from the largest ``exponent`` down; those below zero are left out."""
    significand = (magnitude & 0x7FFFFF) | 0x800000
    square = significand.to(tl.int64) * significand.to(tl.int64)
    current = tl.max(exponent, 0)
    while current >= 0:
        chosen, here = exponent == current, bins == current
        lows += tl.where(here, sum_integers(tl.where(chosen, square & 0xFFFFFF, 0), 0), 0)
        highs += tl.where(here, sum_integers(tl.where(chosen, square >> 24, 0), 0), 0)
        current = tl.max(tl.where(exponent < current, exponent, -1), 0)
    return lows, highs


@triton.jit
def _load(grad, at, n, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(grad + at)
    return tl.load(grad + at, mask=at < n, other=0.0)


@triton.jit
def _magnitude(x):
    """Bits of |x|: an integer that orders as |x| does, and above the largest exponent's for a NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _less_one(magnitude):
    """Unsigned, so that a zero, which fits every window, becomes the largest."""
    return (magnitude - 1).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["n", "steps", "programs"])
def square_bins_kernel(grad, out, n, steps, programs, C: tl.constexpr, U: tl.constexpr, EVEN: tl.constexpr):
    """Adds every ``programs``-th step of U * C elements to this program's row of ``out``, int64 [., 256, 2].

    EVEN: ``n`` is a multiple of U * C.
    """
    bins, inner = tl.arange(0, 256), tl.arange(0, C)
    row = out + tl.program_id(0).to(tl.int64) * 512 + bins * 2
    lows, highs = tl.load(row), tl.load(row + 1)
    # The window: magnitudes in (least, most], none before the first step. held: squares in each sum.
    first, held = tl.full((), 1, tl.int32), tl.full((), 0, tl.int32)
    least, most = tl.full((), 0, tl.int32), tl.full((), -1, tl.int32)
    low, middle, high = _empty(first, 0, C), _empty(first, 1, C), _empty(first, 2, C)
    for step in range(tl.program_id(0), steps, programs):
        start = tl.full((), U * C, tl.int64) * step
        xs = ()
        for i in tl.static_range(U):
            more = (_load(grad, start + i * C + inner, n, EVEN),)
            xs = xs + more
        largest, smallest = _magnitude(xs[0]), _less_one(_magnitude(xs[0]))
        for i in tl.static_range(1, U):
            largest = tl.maximum(largest, _magnitude(xs[i]))
            smallest = tl.minimum(smallest, _less_one(_magnitude(xs[i])))
        outside = tl.max(((largest > most) | (smallest < least.to(tl.uint32))).to(tl.int32), 0)
        held += U
        if (outside > 0) | (held > ADDENDS):
            lows, highs = _close(lows, highs, bins, first, low, middle, high)
            top = tl.max(largest, 0)
            upper, lower = top >> 23, (tl.min(smallest, 0) + 1).to(tl.int32) >> 23
            first = tl.where(upper - lower < SPAN, (upper + lower - (SPAN - 1)) >> 1, upper - (SPAN - 1))
            first = tl.minimum(tl.maximum(first, 1), LARGEST)
            while top >= 0:  # the largest that is not added yet
                least, most = tl.where(first == 1, 0, (first << 23) - 1), ((first + SPAN) << 23) - 1
                low, middle, high = _empty(first, 0, C), _empty(first, 1, C), _empty(first, 2, C)
                below = tl.full((C,), -1, tl.int32)
                for again in range(U):
                    x = _load(grad, start + again * C + inner, n, EVEN)
                    magnitude = _magnitude(x)
                    if top > most:
                        above = tl.where(magnitude > most, magnitude >> 23, -1)
                        lows, highs = _add_to_bins(lows, highs, bins, magnitude, above)
                    inside = (magnitude > least) & (magnitude <= tl.minimum(most, top))
                    low, middle, high = _add(tl.where(inside, x, 0.0), low, middle, high)
                    below = tl.maximum(below, tl.where((magnitude > 0) & (magnitude <= least), magnitude, -1))
                top = tl.max(below, 0)
                if top >= 0:
                    lows, highs = _close(lows, highs, bins, first, low, middle, high)
                    first = tl.maximum((top >> 23) - (SPAN - 1), 1)
            held = tl.full((), U, tl.int32)
        else:
            for i in tl.static_range(U):
                low, middle, high = _add(xs[i], low, middle, high)
    lows, highs = _close(lows, highs, bins, first, low, middle, high)
    tl.store(row, lows)
    tl.store(row + 1, highs)


class TritonNormBins(NormBinsProvider):
    def bins(self, *grads: Tensor) -> Tensor:
        step = ELEMENTS * LOADS
        programs = min(max(-(-grad.numel() // step) for grad in grads), PROGRAMS)
        out = torch.zeros(max(programs, 1), 256, 2, dtype=torch.int64, device=grads[0].device)
        for grad in grads:
            assert grad.is_contiguous() and grad.dtype == torch.float32
            n = grad.numel()
            steps = -(-n // step)
            launch(
                *(square_bins_kernel, (min(programs, steps),), grad, out, n, steps, programs),
                warps=WARPS,
                C=ELEMENTS,
                U=LOADS,
                EVEN=n % step == 0,
            )
        return out.sum(0)
