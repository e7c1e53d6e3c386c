"""A weight as the operators see it: bf16 values in the HF layout, an fp32 gradient, and the packed copy for decoding.

Who owns the memory is a :class:`Memory`'s business: :class:`OwnMemory` holds tensors of its own,
:class:`BorrowedMemory` asks somebody else for them at every read (an engine's parameter and its gradient buffer).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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


class Memory:
    """Where a weight's value and gradient lie. What an owner alone can do fails where somebody else is the owner."""

    @property
    def fixed(self) -> bool:
        """Whether the value keeps its place: a new one is written into it."""
        return True

    @property
    def value(self) -> Tensor:
        """bf16, [out, in] or [width]."""
        raise AssertionError("a memory defines value")

    @property
    def trains(self) -> bool:
        """Whether there is a gradient; unlike reading ``grad`` this ends no loan."""
        raise AssertionError("a memory defines trains")

    @property
    def grad(self) -> Tensor | None:
        """fp32, or None. Whoever reads it may write it."""
        raise AssertionError("a memory defines grad")

    def replace(self, value: Tensor) -> None:
        """Another tensor holds the value from here on."""
        raise AssertionError("the value belongs to somebody else: write into it, its place is theirs")

    def replace_gradient(self, grad: Tensor | None) -> None:
        """Another tensor holds the gradient from here on, or none does."""
        raise AssertionError("the gradient belongs to somebody else")

    def clear(self) -> None:
        """The gradient is +0 from here on."""
        raise AssertionError("the gradient belongs to somebody else, who clears it")

    def lend(self) -> Loan | None:
        """A cleared gradient's memory; None where it must hold +0 already."""
        return None

    def settle(self, loan: Loan) -> Tensor | None:
        """Ends ``loan``; None where it no longer held."""
        return None


class OwnMemory(Memory):
    """Tensors that belong to this weight alone. On a GPU the value keeps its place, so that captured passes hold."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.contiguous()
        self._grad: Tensor | None = None
        self._cleared = False  # the gradient is +0, but nobody wrote that into its memory
        self._loan: Loan | None = None

    @property
    def fixed(self) -> bool:
        return self._value.is_cuda

    @property
    def value(self) -> Tensor:
        return self._value

    @property
    def trains(self) -> bool:
        return self._grad is not None

    @property
    def grad(self) -> Tensor | None:
        """A cleared gradient is filled with +0 first, and a loan is at its end."""
        if self._grad is not None and (self._cleared or self._loan is not None):
            self._grad.zero_()
            self._cleared, self._loan = False, None
        return self._grad

    def replace(self, value: Tensor) -> None:
        self._value = value

    def replace_gradient(self, grad: Tensor | None) -> None:
        self._grad, self._cleared, self._loan = grad, False, None

    def clear(self) -> None:
        assert self._grad is not None, "this weight does not train"
        self._cleared, self._loan = True, None

    def lend(self) -> Loan | None:
        if self._grad is None or not self._cleared:
            return None
        self._cleared, self._loan = False, Loan(self._grad)
        return self._loan

    def settle(self, loan: Loan) -> Tensor | None:
        if self._loan is not loan:
            return None
        self._loan = None
        return loan.space


class BorrowedMemory(Memory):
    """Somebody else's tensors, asked for at every read, so that the owner may move them.

    Args:
        value: gives the bf16 value of the weight's shape, rows one behind the other.
        grad: gives the fp32 gradient of the weight's ``grad_rows``, which its owner clears; None where it has none.
            None in place of the function: the weight never trains.
    """

    def __init__(self, value: Callable[[], Tensor], grad: Callable[[], Tensor | None] | None = None) -> None:
        self._read, self._read_gradient = value, grad

    @property
    def value(self) -> Tensor:
        value = self._read()
        assert value.dtype == torch.bfloat16 and value.is_contiguous(), (value.dtype, value.stride())
        return value

    @property
    def trains(self) -> bool:
        return self.grad is not None

    @property
    def grad(self) -> Tensor | None:
        grad = None if self._read_gradient is None else self._read_gradient()
        assert grad is None or grad.dtype == torch.float32, grad
        return grad


class Weight:
    """One parameter tensor, possibly several HF tensors joined along the output axis (q, k, v; gate, up).

    Attributes:
        name: name inside the model.
        parts: the HF tensors in canonical column order.
        memory: who holds the value and the gradient.
        grad_rows: (first, last + 1) of the rows that the gradient holds.
        input_shard: all rows of this TP rank's input columns, with which it computes its slice of dX.
        output_shard: for a weight that is stored by input columns (row-parallel): all input columns of this TP rank's
            output rows, with which it computes its columns of y.
        lookups: (token ids int64 [T], gradient rows bf16 [T, width]) kept by ``embedding`` until the end of the step.
        packed: the copy for decoding, in its provider's layout; ``pack_rows`` writes rows (first, bf16 [n, K]) into it
            and ``read_rows`` gives rows [first, last) of it back, where its layout allows that.
        stale: the value changed after it was packed; whoever reads ``packed`` packs it again first.
    """

    def __init__(self, name: str, value: Tensor | Memory, parts: tuple[Part, ...], shape: tuple[int, ...] = ()) -> None:
        """
        Args:
            value: bf16 [out, in] or [width] to be this weight's own, or the memory that holds it.
            shape: of the value, where its memory cannot say so yet.
        """
        self.memory = OwnMemory(value) if isinstance(value, Tensor) else value
        self.shape = shape or tuple(self.memory.value.shape)
        assert shape or self.memory.value.dtype == torch.bfloat16, (name, self.memory.value.dtype)
        assert sum(part.rows for part in parts) == self.shape[0], name
        self.name = name
        self.parts = parts
        self.grad_rows = (0, self.shape[0])
        self.input_shard: Weight | None = None
        self.output_shard: Weight | None = None
        self.lookups: list[tuple[Tensor, Tensor]] = []
        self.packed: Tensor | None = None
        self.pack_rows: Callable[[int, Tensor], None] | None = None
        self.read_rows: Callable[[int, int], Tensor] | None = None
        self.stale = False

    @property
    def value(self) -> Tensor:
        """bf16, [out, in] or [width]; empty where only the packed copy is left."""
        return self.memory.value

    @value.setter
    def value(self, value: Tensor) -> None:
        self.memory.replace(value)

    @property
    def holds_value(self) -> bool:
        """Whether the value is here, and not in the packed copy alone."""
        return tuple(self.value.shape) == self.shape

    def mark_changed(self) -> None:
        """The value was written, by whomever: a packed copy of it is made again before it is read."""
        self.stale = self.packed is not None

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Rows [first, first + n) become ``rows`` [n, ...] of any float dtype, rounded to bf16: in the value, or in the
        packed copy where that alone is left."""
        last = first + rows.shape[0]
        assert first >= 0 and last <= self.shape[0], (self.name, first, last)
        with torch.no_grad():
            if self.holds_value:
                self.value[first:last].copy_(rows)
                self.mark_changed()
            else:
                assert self.pack_rows is not None, f"{self.name} is packed in a layout that takes no rows"
                self.pack_rows(first, rows.detach().to(torch.bfloat16))

    def rows(self, first: int, last: int) -> Tensor:
        """bf16 rows [first, last): a view of the value, or a copy out of the packed one where that alone is left."""
        if self.holds_value:
            return self.value[first:last]
        assert self.read_rows is not None, f"{self.name} is packed in a layout that gives no rows back"
        return self.read_rows(first, last)

    def enable_training(self, rows: tuple[int, int] | None = None) -> None:
        """Allocates the fp32 gradient of ``rows`` (first, last + 1), all by default; zero."""
        self.grad_rows = rows or (0, self.shape[0])
        first, last = self.grad_rows
        self.grad = torch.empty((last - first, *self.shape[1:]), dtype=torch.float32, device=self.value.device)
        self.clear_gradient()

    @property
    def trains(self) -> bool:
        """Whether there is a gradient; unlike reading ``grad`` this ends no loan."""
        return self.memory.trains

    @property
    def grad(self) -> Tensor | None:
        """fp32 of ``grad_rows``, or None where the weight does not train. Operators add fold units into it in order.

        Whoever reads it may write it: a cleared gradient is filled with +0 first, and a loan is at its end.
        """
        return self.memory.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.memory.replace_gradient(value)

    def clear_gradient(self) -> None:
        """The gradient is +0 from here on; its memory is filled when somebody reads it."""
        self.memory.clear()

    def lend_gradient(self) -> Loan | None:
        """The memory of a gradient that was cleared and not read since, or None where there is no such memory.

        The loan holds until the gradient is read, cleared or replaced.
        """
        return self.memory.lend()

    def settle(self, loan: Loan | None) -> Tensor | None:
        """Ends ``loan``: the gradient, every element of which the caller overwrites; None where it no longer held."""
        return None if loan is None else self.memory.settle(loan)

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
