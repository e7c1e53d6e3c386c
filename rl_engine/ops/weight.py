"""A weight as the operators see it: bf16 values in the HF layout, an fp32 gradient, and the packed copy for
decoding."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Part:
    """One HF tensor's rows inside a merged weight: rows [first, first + rows) here are rows [offset, ...) of the
    tensor."""

    name: str
    first: int
    rows: int
    offset: int = 0


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
        self.grad_rows = (0, self.shape[0])
        self.input_shard: Weight | None = None
        self.lookups: list[tuple[Tensor, Tensor]] = []
        self.packed: Tensor | None = None

    def enable_training(self, rows: tuple[int, int] | None = None) -> None:
        """Allocates the fp32 gradient of ``rows`` (first, last + 1), all by default; zero."""
        self.grad_rows = rows or (0, self.shape[0])
        first, last = self.grad_rows
        self.grad = torch.zeros((last - first, *self.shape[1:]), dtype=torch.float32, device=self.value.device)

    def drop_gradient(self) -> None:
        """Gives the gradient's memory back; :meth:`enable_training` makes a new one."""
        self.grad = None

    def part_gradients(self) -> dict[str, tuple[int, Tensor]]:
        """HF name -> (first row, view of the fp32 gradient), for the parts that ``grad_rows`` touches."""
        assert self.grad is not None, f"{self.name} does not train"
        start, end = self.grad_rows
        found = {}
        for part in self.parts:
            first, last = max(part.first, start), min(part.first + part.rows, end)
            if first < last:
                found[part.name] = (part.offset + first - part.first, self.grad[first - start : last - start])
        return found
