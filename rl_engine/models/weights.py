"""A model's weights: merged for the operators, named as Hugging Face names them towards the outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.ops.weight import Part, Weight

MERGED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class WeightMismatch(ValueError):
    """Tensors do not fit the model: one is missing, unknown or of another shape."""


def merged_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Merged weight name -> HF tensor names joined in it, in canonical order."""
    names: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for name in config.tensor_shapes():
        if name in taken:
            continue
        parts: tuple[str, ...] = (name,)
        merged = name
        for target, sources in MERGED.items():
            if f".{sources[0]}." in name:
                parts = tuple(name.replace(sources[0], source) for source in sources)
                merged = name.replace(sources[0], target)
        names[merged] = parts
        taken.update(parts)
    return names


class ModelWeights:
    """Every weight of one model copy, by merged name.

    Args:
        config: the model's shape.
        read: HF name -> tensor (any float dtype; rounded to bf16). A tied head is never read.
    """

    def __init__(self, config: ModelConfig, read: Callable[[str], Tensor]) -> None:
        self.config = config
        self._shapes = config.tensor_shapes()
        self._weights: dict[str, Weight] = {}
        for merged, parts in merged_names(config).items():
            first, joined = 0, []
            for part in parts:
                joined.append(Part(part, first, self._shapes[part][0]))
                first += self._shapes[part][0]
            self._weights[merged] = Weight(merged, self._join(parts, read), tuple(joined))

    def _join(self, parts: tuple[str, ...], read: Callable[[str], Tensor]) -> Tensor:
        tensors = []
        for part in parts:
            tensor = read(part)
            if tuple(tensor.shape) != self._shapes[part]:
                raise WeightMismatch(f"{part} has shape {tuple(tensor.shape)}, expected {self._shapes[part]}")
            tensors.append(tensor.to(torch.bfloat16))
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

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces every weight in place.

        Raises:
            WeightMismatch: a tensor is missing, unknown or of another shape; nothing was replaced by name checks.
        """
        different = set(tensors) ^ set(self._shapes)
        if different:
            raise WeightMismatch(f"tensor {sorted(different)[0]} is missing or unknown")
        for weight in self:
            weight.value = self._join(tuple(part.name for part in weight.parts), tensors.__getitem__)

    def export(self) -> dict[str, Tensor]:
        """HF name -> bf16 view, in canonical order."""
        tensors: dict[str, Tensor] = {}
        for weight in self:
            tensors.update(weight.part_values())
        return tensors


def random_weights(config: ModelConfig, seed: int) -> ModelWeights:
    """Normal weights with logits of a usual spread: 0.02 for the embedding, 1/sqrt(in) elsewhere, gains near 1."""
    generator = torch.Generator().manual_seed(seed)

    def read(name: str) -> Tensor:
        shape = config.tensor_shapes()[name]
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return 1.0 + 0.1 * values
        if name == "model.embed_tokens.weight" and not config.tied:
            return values * 0.5
        scale = 2.5 if name in ("lm_head.weight", "model.embed_tokens.weight") else 1.0
        return values * scale * shape[1] ** -0.5

    return ModelWeights(config, read)
