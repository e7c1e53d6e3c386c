"""A weight as the operators see it: bf16 values in the HF layout, an fp32 gradient, and the packed copy for
decoding."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Part:
    """One HF tensor's rows inside a merged weight: rows [first, first + rows) here are rows [offset, ...) of the
    tensor."""

    name: str
    first: int
    rows: int
    offset: int = 0


class Loan:
    """The memory of a gradient that is still +0, lent until its first unit arrives (:meth:`Weight.lend_gradient`).

    Attributes:
        space: fp32, the gradient's memory; the borrower may write anything into it while the loan holds.
    """

    def __init__(self, space: Tensor) -> None:
        self.space = space


class Weight:
    """One parameter tensor, possibly several HF tensors joined along the output axis (q, k, v; gate, up).

    Attributes:
        name: name inside the model.
        parts: the HF tensors in canonical column order.
        value: bf16, [out, in] or [width].
        lookups: (token ids int64 [T], gradient rows bf16 [T, width]) kept by ``embedding`` until the end of the step.
    """

    def __init__(self, name: str, value: Tensor, parts: tuple[Part, ...]) -> None:
        assert value.dtype == torch.bfloat16, (name, value.dtype)
        assert sum(part.rows for part in parts) == value.shape[0], name
        self.name = name
        self.parts = parts
        self.value = value.contiguous()
        self.shape = tuple(value.shape)
        self._grad: Tensor | None = None
        self._cleared = False  # the gradient is +0, but nobody wrote that into its memory
        self._loan: Loan | None = None
        self.grad_rows = (0, self.shape[0])
        self.input_shard: Weight | None = None
        self.lookups: list[tuple[Tensor, Tensor]] = []
        self.packed: Tensor | None = None

    def enable_training(self, rows: tuple[int, int] | None = None) -> None:
        """Allocates the fp32 gradient of ``rows`` (first, last + 1), all by default; zero."""
        self.grad_rows = rows or (0, self.shape[0])
        first, last = self.grad_rows
        self.grad = torch.empty((last - first, *self.shape[1:]), dtype=torch.float32, device=self.value.device)
        self.clear_gradient()

    @property
    def trains(self) -> bool:
        """Whether there is a gradient; unlike reading ``grad`` this ends no loan."""
        return self._grad is not None

    @property
    def grad(self) -> Tensor | None:
        """fp32 of ``grad_rows``, or None where the weight does not train. Operators add fold units into it in order.

        Whoever reads it may write it: a cleared gradient is filled with +0 first, and a loan is at its end.
        """
        if self._grad is not None and (self._cleared or self._loan is not None):
            self._grad.zero_()
            self._cleared, self._loan = False, None
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._grad, self._cleared, self._loan = value, False, None

    def clear_gradient(self) -> None:
        """The gradient is +0 from here on; its memory is filled when somebody reads it."""
        assert self._grad is not None, f"{self.name} does not train"
        self._cleared, self._loan = True, None

    def lend_gradient(self) -> Loan | None:
        """The memory of a gradient that was cleared and not read since, or None where there is no such memory.

        The loan holds until the gradient is read, cleared or replaced.
        """
        if self._grad is None or not self._cleared:
            return None
        self._cleared, self._loan = False, Loan(self._grad)
        return self._loan

    def settle(self, loan: Loan | None) -> Tensor | None:
        """Ends ``loan``: the gradient, every element of which the caller overwrites; None where it no longer held."""
        if loan is None or self._loan is not loan:
            return None
        self._loan = None
        return loan.space

    def drop_gradient(self) -> None:
        """Gives the gradient's memory back; :meth:`enable_training` makes a new one."""
        self.grad = None

    def part_gradients(self) -> dict[str, tuple[int, Tensor]]:
        """HF name -> (first row, view of the fp32 gradient), for the parts that ``grad_rows`` touches."""
        grad = self.grad
        assert grad is not None, f"{self.name} does not train"
        start, end = self.grad_rows
        found = {}
        for part in self.parts:
            first, last = max(part.first, start), min(part.first + part.rows, end)
            if first < last:
                found[part.name] = (part.offset + first - part.first, grad[first - start : last - start])
        return found
