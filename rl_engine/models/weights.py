"""A model's weights: merged for the operators, named as Hugging Face names them towards the outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rl_engine.families.refusal import WeightMismatch as WeightMismatch
from rl_engine.models.config import ModelConfig
from rl_engine.models.sharding import Sharding, merged_names
from rl_engine.ops.weight import CPU, Part, Weight
from rl_engine.parallel import Group

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
        self.config, self.device = config, device
        self.sharding = sharding or Sharding(config)
        self._shapes = config.tensor_shapes()
        self._weights: dict[str, Weight] = {}
        for merged, names in merged_names(config).items():
            first, parts = 0, []
            for name in names:
                start, end = self.sharding.rows(name)
                parts.append(Part(name, first, end - start, start))
                first += end - start
            self._weights[merged] = Weight(merged, self._join(tuple(parts), read), tuple(parts))

    def _join(self, parts: tuple[Part, ...], read: Read) -> Tensor:
        tensors = []
        for part in parts:
            tensor = read(part.name, part.offset, part.offset + part.rows)
            expected = (part.rows, *self._shapes[part.name][1:])
            if tuple(tensor.shape) != expected:
                raise WeightMismatch(f"{part.name} has rows of shape {tuple(tensor.shape)}", f"{expected}")
            tensors.append(tensor.to(self.device, torch.bfloat16))
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()

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

        On a GPU the values keep their place, so that captured passes over them hold.

        Raises:
            WeightMismatch: rows of another shape.
        """
        for weight in self:
            fresh = self._join(weight.parts, read)
            if weight.value.is_cuda:
                with torch.no_grad():
                    weight.value.copy_(fresh)
            else:
                weight.value = fresh.contiguous().requires_grad_(weight.value.requires_grad)

    def export_rows(self) -> dict[str, tuple[int, Tensor]]:
        """HF name -> (first row, bf16 view of this rank's rows), in canonical order."""
        return {
            part.name: (part.offset, weight.value[part.first : part.first + part.rows])
            for weight in self
            for part in weight.parts
        }

    def export(self) -> dict[str, Tensor]:
        """HF name -> bf16 view of this rank's rows (all of them without sharding), in canonical order."""
        return {name: rows for name, (_, rows) in self.export_rows().items()}

    def clone(self) -> ModelWeights:
        """An independent copy of this rank's rows."""
        rows = self.export_rows()

        def read(name: str, first: int, last: int) -> Tensor:
            start, values = rows[name]
            return values.detach()[first - start : last - start].clone()

        return ModelWeights(self.config, read, self.sharding, self.device)

    def refresh_input_shards(self, tp: Group) -> None:
        """Exchanges rows for input columns: every linear gets its second copy, all rows of this rank's input slice.

        The input gradient then is one chain over all canonical columns, computed whole by one rank.
        """
        if tp.size == 1:
            return
        for weight in self:
            if len(weight.shape) == 1 or weight in (self.embedding, self.head):
                continue
            slices = [self.sharding.inputs(weight.name, rank) for rank in range(tp.size)]
            first, last = slices[tp.index]
            rows = [self.sharding.part_rows(weight.name, rank) for rank in range(tp.size)]
            value = weight.value.detach()
            received = tp.all_to_all(
                [value[:, a:b].contiguous() for a, b in slices],
                [(sum(counts), last - first) for counts in rows],
                purpose="weights",
            )
            copy, total = in_hf_order(received, rows, 0), sum(map(sum, rows))
            weight.input_shard = Weight(f"{weight.name}.inputs", copy, (Part(weight.name, 0, total),))


def in_hf_order(pieces: Sequence[Tensor], counts: Sequence[Sequence[int]], axis: int) -> Tensor:
    """Every TP rank's rows of a merged weight (or columns of what it makes), joined tensor by tensor.

    ``counts``: for every rank, its rows of each HF tensor (``Sharding.part_rows``).
    """
    cut = [piece.split(list(rows), axis) for piece, rows in zip(pieces, counts, strict=True)]
    return torch.cat([part for parts in zip(*cut, strict=True) for part in parts], axis)


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
