"""What a proof is made of: comparisons of bits, and of values."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison of bits; a control must differ."""

    operator: str
    provider: str
    what: str
    elements: int
    differing: int
    control: bool = False

    @property
    def holds(self) -> bool:
        return (self.differing > 0) == self.control


def close(operator: str, what: str, found: Tensor, expected: Tensor, rtol: float, atol: float) -> Case:
    """Values against fp64: elements further away than ``atol + rtol |expected|``, or not finite."""
    far = ~((found.double() - expected).abs() <= atol + rtol * expected.abs())
    return Case(operator, "triton", what, expected.numel(), int(far.sum()))
