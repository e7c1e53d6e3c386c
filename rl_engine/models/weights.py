"""A model's weights: merged for the operators, named as Hugging Face names them towards the outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rl_engine.families.refusal import WeightMismatch as WeightMismatch
from rl_engine.models.config import ModelConfig
from rl_engine.models.sharding import Sharding, merged_names
from rl_engine.models.shards import in_hf_order, refresh_input_shards
from rl_engine.ops.weight import CPU, Memory, Part, Weight
from rl_engine.parallel import Group

__all__ = ["ModelWeights", "WeightMismatch", "in_hf_order", "random_tensor", "random_weights"]

Read = Callable[[str, int, int], Tensor]  # (HF name, first row, last row + 1) -> tensor of any float dtype


class ModelWeights:
    """Every weight of one model copy, or of one TP rank's shard of it, by merged name.

    Args:
        config: the model's shape.
        read: gives rows of an HF tensor (any float dtype; rounded to bf16). A tied head is never read.
        sharding: which rows this rank holds; all of them by default.
        device: where they lie, and so where a decoder computes.
    """

    def __init__(
        self, config: ModelConfig, read: Read, sharding: Sharding | None = None, device: torch.device = CPU
    ) -> None:
        self._describe(config, sharding, device)
        self._missing: dict[str, list[tuple[int, int]]] = {}
        self._weights = {name: Weight(name, self._join(parts, read), parts) for name, parts in self._parts.items()}

    @classmethod
    def empty(cls, config: ModelConfig, sharding: Sharding | None = None, device: torch.device = CPU) -> ModelWeights:
        """Weights to be filled by :meth:`write`; until then they hold NaN, and :meth:`missing` says what lacks."""
        weights = cls.__new__(cls)
        weights._describe(config, sharding, device)
        weights._missing = {
            part.name: [(part.offset, part.offset + part.rows)]
            for parts in weights._parts.values()
            for part in parts
            if part.rows
        }
        weights._weights = {}
        for name, parts in weights._parts.items():
            shape = (sum(part.rows for part in parts), *weights._shapes[parts[0].name][1:])
            nothing = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
            weights._weights[name] = Weight(name, nothing, parts)
        return weights

    @classmethod
    def over(
        cls,
        config: ModelConfig,
        memory: Callable[[str, tuple[int, ...]], Memory],
        sharding: Sharding | None = None,
        device: torch.device = CPU,
    ) -> ModelWeights:
        """Weights in memory that others own: ``memory`` gives that of a merged weight of a name and shape."""
        weights = cls.__new__(cls)
        weights._describe(config, sharding, device)
        weights._missing, weights._weights = {}, {}
        for name, parts in weights._parts.items():
            shape = (sum(part.rows for part in parts), *weights._shapes[parts[0].name][1:])
            weights._weights[name] = Weight(name, memory(name, shape), parts, shape)
        return weights

    def _describe(self, config: ModelConfig, sharding: Sharding | None, device: torch.device) -> None:
        self.config, self.device = config, device
        self.sharding = sharding or Sharding(config)
        self._shapes = config.tensor_shapes()
        self._parts: dict[str, tuple[Part, ...]] = {}
        for merged, names in merged_names(config).items():
            first, parts = 0, []
            for name in names:
                start, end = self.sharding.rows(name)
                parts.append(Part(name, first, end - start, start))
                first += end - start
            self._parts[merged] = tuple(parts)
        self._places = {part.name: (merged, part) for merged, parts in self._parts.items() for part in parts}

    def _join(self, parts: tuple[Part, ...], read: Read) -> Tensor:
        tensors = []
        for part in parts:
            tensor = read(part.name, part.offset, part.offset + part.rows)
            expected = (part.rows, *self._shapes[part.name][1:])
            if tuple(tensor.shape) != expected:
                raise WeightMismatch(f"{part.name} has rows of shape {tuple(tensor.shape)}", f"{expected}")
            tensors.append(tensor.to(self.device, torch.bfloat16))
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()

    def write(self, name: str, first_row: int, rows: Tensor) -> int:
        """Rows [first_row, first_row + n) of HF tensor ``name`` become ``rows`` [n, ...], of any float dtype on any
        device, rounded to bf16. Other ranks' rows are passed over; so is a tied model's ``lm_head.weight``.

        The values keep their place. Where a weight's packed copy alone is left, the rows are packed into it: the
        weights are never held twice. K-sharded copies must be refreshed afterwards.

        Returns:
            How many of the rows this rank holds.

        Raises:
            WeightMismatch: no such tensor, or rows that it does not have.
        """
        if name == "lm_head.weight" and self.config.tied:
            return 0
        if name not in self._places:
            raise WeightMismatch(f"the model has no tensor {name}")
        shape, last = self._shapes[name], first_row + rows.shape[0]
        if tuple(rows.shape[1:]) != shape[1:] or not 0 <= first_row <= last <= shape[0]:
            found = f"rows {first_row} to {last} of shape {tuple(rows.shape)}"
            raise WeightMismatch(f"{name}: {found}, expected rows of a tensor of shape {shape}")
        merged, part = self._places[name]
        start, end = max(first_row, part.offset), min(last, part.offset + part.rows)
        if start >= end:
            return 0
        self[merged].write_rows(part.first + start - part.offset, rows[start - first_row : end - first_row])
        if name in self._missing:
            self._missing[name] = without(self._missing[name], start, end)
            if not self._missing[name]:
                del self._missing[name]
        return end - start

    def missing(self) -> dict[str, list[tuple[int, int]]]:
        """HF name -> (first, last + 1) of this rank's rows that nobody has written since :meth:`empty`."""
        return {name: list(rows) for name, rows in self._missing.items()}

    def __getitem__(self, name: str) -> Weight:
        return self._weights[name]

    def __iter__(self) -> Iterator[Weight]:
        return iter(self._weights.values())

    @property
    def embedding(self) -> Weight:
        return self["model.embed_tokens.weight"]

    @property
    def head(self) -> Weight:
        return self.embedding if self.config.tied else self["lm_head.weight"]

    @property
    def parameter_bytes(self) -> int:
        """bf16 bytes of this rank's rows, without K-sharded and packed copies."""
        return sum(2 * math.prod(weight.shape) for weight in self)

    def load(self, read: Read) -> None:
        """Replaces every weight by what ``read`` gives; K-sharded copies must be refreshed afterwards.

        On a GPU and in memory of others the values keep their place, so that captured passes over them hold.

        Raises:
            WeightMismatch: rows of another shape.
        """
        for weight in self:
            fresh = self._join(weight.parts, read)
            if weight.memory.fixed:
                with torch.no_grad():
                    weight.value.copy_(fresh)
            else:
                weight.value = fresh.contiguous().requires_grad_(weight.value.requires_grad)
            weight.mark_changed()
        self._missing.clear()

    def export_rows(self) -> dict[str, tuple[int, Tensor]]:
        """HF name -> (first row, bf16 rows of this rank), in canonical order: views, or copies out of a packed weight
        whose value was dropped."""
        return {
            part.name: (part.offset, weight.rows(part.first, part.first + part.rows))
            for weight in self
            for part in weight.parts
        }

    def export(self) -> dict[str, Tensor]:
        """HF name -> bf16 rows of this rank (all of them without sharding), as :meth:`export_rows`."""
        return {name: rows for name, (_, rows) in self.export_rows().items()}

    def clone(self) -> ModelWeights:
        """An independent copy of this rank's rows."""
        rows = self.export_rows()

        def read(name: str, first: int, last: int) -> Tensor:
            start, values = rows[name]
            return values.detach()[first - start : last - start].clone()

        return ModelWeights(self.config, read, self.sharding, self.device)

    def refresh_input_shards(self, tp: Group) -> None:
        """Exchanges rows for input columns (:func:`rl_engine.models.shards.refresh_input_shards`) of every linear."""
        linears = [w for w in self if len(w.shape) > 1 and w not in (self.embedding, self.head)]
        refresh_input_shards(linears, self.sharding, tp)


def without(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """What of disjoint ``ranges`` [a, b) lies outside [first, last)."""
    pieces = [piece for a, b in ranges for piece in ((a, min(b, first)), (max(a, last), b))]
    return [(a, b) for a, b in pieces if a < b]


def random_tensor(config: ModelConfig, name: str, seed: int) -> Tensor:
    """fp32 values of one HF tensor, from the seed and the name alone: usual spread of logits, gains near 1."""
    shape = config.tensor_shapes()[name]
    place = list(config.tensor_shapes()).index(name)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed * 100_003 + place))
    if len(shape) == 1:
        return 1.0 + 0.1 * values
    if name == "model.embed_tokens.weight" and not config.tied:
        return values * 0.5
    scale = 2.5 if name in ("lm_head.weight", "model.embed_tokens.weight") else 1.0
    return values * scale * shape[1] ** -0.5


def random_weights(
    config: ModelConfig, seed: int, sharding: Sharding | None = None, device: torch.device = CPU
) -> ModelWeights:
    """Normal weights whose logits have a usual spread; the same values under any sharding, on any device."""

    def read(name: str, first: int, last: int) -> Tensor:
        return random_tensor(config, name, seed)[first:last]

    return ModelWeights(config, read, sharding, device)
