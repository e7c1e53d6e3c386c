"""A weight as the operators see it: bf16 values in the HF layout, an fp32 gradient, and the packed copy for
decoding."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Part:
    """One HF tensor inside a merged weight: rows [first, first + rows) of its first axis."""

    name: str
    first: int
    rows: int


class Weight:
    """One parameter tensor, possibly several HF tensors joined along the output axis (q, k, v; gate, up).

    Attributes:
        name: name inside the model.
        parts: the HF tensors in canonical column order.
        value: bf16, [out, in] or [width].
        grad: fp32 of the same shape, or None where the weight does not train. Operators add fold units into it in
        order. lookups: (token ids int64 [T], gradient rows bf16 [T, width]) kept by ``embedding`` until the end of the
        step.
    """

    def __init__(self, name: str, value: Tensor, parts: tuple[Part, ...]) -> None:
        assert value.dtype == torch.bfloat16, (name, value.dtype)
        assert sum(part.rows for part in parts) == value.shape[0], name
        self.name = name
        self.parts = parts
        self.value = value.contiguous()
        self.shape = tuple(value.shape)
        self.grad: Tensor | None = None
        self.lookups: list[tuple[Tensor, Tensor]] = []
        self.packed: Tensor | None = None

    def enable_training(self) -> None:
        """Allocates the fp32 gradient, zero."""
        self.grad = torch.zeros(self.shape, dtype=torch.float32)

    def part_values(self) -> dict[str, Tensor]:
        """HF name -> view of the bf16 values."""
        return {part.name: self.value[part.first : part.first + part.rows] for part in self.parts}

    def part_gradients(self) -> dict[str, Tensor]:
        """HF name -> view of the fp32 gradient."""
        assert self.grad is not None, f"{self.name} does not train"
        return {part.name: self.grad[part.first : part.first + part.rows] for part in self.parts}
