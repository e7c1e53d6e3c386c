"""Inputs on which exp, log and log1p are compared: 2^16 each, over everything that a run can ask them for.

An error of one unit in the last place shows in few results of an operator, whose rounding to bf16 hides the rest. Here
every value is looked at in its own bits, near 0 and near 1, where a result leaves the normal numbers, at the seams of
the argument's reduction, and far outside. An error that changes fewer than about one value in 20,000 can still hide.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_engine.ops import functions

COUNT = 1 << 16
LARGEST_BITS = 0x7F7FFFFF
SEAMS = (-87.25, 88.72, 0.0, 1.0, -1.0, 0.70710678, 1.41421356, 0.5, 2.0, 1.17549435e-38)
NAMES = ("exp", "log", "log1p")


def _bits(first: int, last: int, count: int) -> Tensor:
    """fp32 values whose bit patterns are evenly spaced from ``first`` to ``last``: equally many of every magnitude."""
    steps = torch.arange(count, dtype=torch.int64) * (last - first) // (count - 1)
    return (first + steps).to(torch.int32).view(torch.float32)


def _even(first: float, last: float, count: int) -> Tensor:
    return torch.linspace(first, last, count, dtype=torch.float64).float()


def _around(places: Tensor, reach: int) -> Tensor:
    """``places`` and the ``reach`` fp32 values on either side of each, of the same sign."""
    bits = places.view(torch.int32).to(torch.int64)[:, None] + torch.arange(-reach, reach + 1)
    magnitude = (bits & 0x7FFFFFFF).clamp(max=0x7F800000)
    sign = places.signbit()[:, None].expand(magnitude.shape)
    found = magnitude.to(torch.int32).view(torch.float32)
    return torch.where(sign, -found, found).flatten()


def inputs(name: str) -> Tensor:
    """fp32 [2^16] for one function; ``log1p`` is asked for values in (-1, 0] alone."""
    special = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    seams = _around(torch.tensor(SEAMS), 40)
    if name == "exp":
        rounds = _around((torch.arange(-126, 128).float() + 0.5) * 0.69314718, 8)  # where n of the reduction changes
        parts = [special, -special[2:3], seams, rounds, _bits(1, 0x42B20000, 1 << 13), -_bits(1, LARGEST_BITS, 1 << 14)]
        rest = COUNT - sum(map(len, parts))
        parts += [_even(-88.0, 0.0, rest - rest // 4), _even(0.0, 89.0, rest // 4)]
    elif name == "log":
        parts = [special, seams.abs(), _around(torch.exp2(torch.arange(-126, 128).float()), 8), torch.tensor([-1.0])]
        parts += [_bits(1, LARGEST_BITS, 1 << 14), _bits(1, 0x00800000, 1 << 11)]  # all magnitudes, subnormal ones
        rest = COUNT - sum(map(len, parts))
        parts += [_even(0.5, 2.0, rest // 2), _even(1.0, 262144.0, rest - rest // 2)]
    else:
        powers = -torch.exp2(torch.arange(-126, 0).float())
        parts = [special[:2], _around(powers, 8), -_bits(1, 0x3F7FFFFF, 1 << 15)]
        last = -(1.0 - torch.arange(1, 4097).float() * 2.0**-24)  # the last values before -1
        rest = COUNT - sum(map(len, parts)) - len(last)
        parts += [last, _even(-1.0 + 2.0**-24, 0.0, rest)]
    found = torch.cat(parts)
    assert len(found) == COUNT
    return found


def of_c(name: str, x: Tensor) -> Tensor:
    """The C provider's function of fp32 ``x``, elementwise."""
    from rl_engine.ops import library

    out = torch.empty_like(x)
    getattr(library.load(), f"rlk_{name}_array")(x.numel(), x.data_ptr(), out.data_ptr())
    return out


def pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
    """(what, C's results, the reference's) of each function."""
    for name in NAMES:
        x = inputs(name)
        yield name, of_c(name, x), getattr(functions, name)(x)
