"""LM head: fp32 logits straight from the accumulator, ``z[T, V] = h[T, H] W[V, H]^T``, not rounded to bf16.

Contract. As ``linear``, one fp32 chain over H per logit. Training allocates no memory for all logits:
``selected_logp.score`` goes vocabulary group by group and keeps them where it finds room, or computes them again.
"""

from __future__ import annotations

from torch import Tensor

from rl_engine.ops.weight import Weight


class HeadProvider:
    def logits(
        self, hidden: Tensor, weight: Weight, columns: tuple[int, int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """fp32 [T, columns] of hidden bf16 [T, H]; ``columns`` (first, last) of the vocabulary, all by default.

        Written into ``out`` (contiguous columns, any stride of its rows) where it is given.
        """
        raise AssertionError("a provider defines logits")

    def add_input_gradient(self, dz: Tensor, weight: Weight, columns: tuple[int, int], dh: Tensor) -> None:
        """dh fp32 [T, H] += chain over the columns of dz bf16 [T, columns]."""
        raise AssertionError("a provider defines add_input_gradient")

    def add_weight_gradient(self, dz: Tensor, hidden: Tensor, columns: tuple[int, int], grad: Tensor) -> None:
        """rows ``columns`` of grad fp32 [V, H] += chain over tokens of dz and hidden (one fold unit)."""
        raise AssertionError("a provider defines add_weight_gradient")

    def add_unit_gradients(
        self, dz: Tensor, hidden: Tensor, bounds: list[tuple[int, int]], columns: tuple[int, int], grad: Tensor
    ) -> None:
        """``add_weight_gradient`` of every fold unit ``bounds`` (first, last + 1 of the rows), ascending."""
        for first, last in bounds:
            self.add_weight_gradient(dz[first:last], hidden[first:last], columns, grad)

    def set_unit_gradients(
        self, dz: Tensor, hidden: Tensor, bounds: list[tuple[int, int]], columns: tuple[int, int], grad: Tensor
    ) -> None:
        """``add_unit_gradients`` into rows ``columns`` of grad as if they held +0, whatever they hold."""
        grad[columns[0] : columns[1]].zero_()
        self.add_unit_gradients(dz, hidden, bounds, columns, grad)
