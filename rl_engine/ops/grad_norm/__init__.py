"""Exact global gradient norm.

Contract. Each fp32 g is squared exactly and added into integer bins by its exponent (two int64 words a bin: lower and
upper 24 bits of the squared significand); bins are added as integers, joined in unbounded integers, converted to fp64
once, then one fp64 square root. So the norm does not depend on the order, the sharding or the packing. A non-finite g
raises. ``clip = fp32(min(1, max_norm / (norm + 1e-6)))``.

Bin e counts units of ``2^(2 max(e - 1, 0) - 298)``, its upper word 2^24 of them each. A provider may write the same sum
into other bins, with words below zero too: :func:`joined` is the sum, and equal for every provider.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BIAS_SQUARED = 2 * 149  # a subnormal fp32 is an integer times 2^-149


class NonFiniteGradient(ArithmeticError):
    """A gradient holds NaN or infinity: the update is refused."""


class NormBinsProvider:
    def bins(self, *grads: Tensor) -> Tensor:
        """int64 [256, 2] of all elements of fp32 ``grads``, one at least; bin 255 is 0, 0 unless one is not finite."""
        raise AssertionError("a provider defines bins")


def joined(bins: Tensor) -> int:
    """The sum of squares in units of 2^-298, from summed bins [256, 2].

    Raises:
        NonFiniteGradient: bin 255 (NaN, infinity) is not empty.
    """
    words = bins.tolist()
    if words[255] != [0, 0]:
        raise NonFiniteGradient("a gradient element is NaN or infinite")
    return sum((low + (high << 24)) << (2 * max(exponent - 1, 0)) for exponent, (low, high) in enumerate(words))


def norm_from_bins(bins: Tensor) -> float:
    """fp64 norm from summed bins [256, 2].

    Raises:
        NonFiniteGradient: bin 255 (NaN, infinity) is not empty.
    """
    return math.sqrt(math.ldexp(float(joined(bins)), -BIAS_SQUARED))


def clip_factor(norm: float, max_norm: float) -> float:
    """fp32(min(1, max_norm / (norm + 1e-6))); 1 where ``max_norm`` is not positive."""
    if max_norm <= 0:
        return 1.0
    return float(torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32))
