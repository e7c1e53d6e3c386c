"""Which rows of which tensors a tensor-parallel rank holds. Every element stays whole: only rows (output columns) are
cut.

Query and KV heads, gate and up columns, o and down outputs are contiguous slices; the vocabulary is cut at whole
vocabulary groups of ``selected_logp``; norms are on every rank.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.ops.selected_logp.vocabulary import group_columns, groups
from rl_engine.parallel import bounds

MERGED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class LayoutRefused(ValueError):
    """The model cannot be cut as asked."""


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


def _is_norm(name: str) -> bool:
    return "norm" in name.rsplit(".", 2)[-2]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Rows of every tensor for each of ``size`` TP ranks; ``index`` is this one.

    Attributes:
        even_vocabulary: every rank has as many vocabulary groups, as engines cut it that pad the vocabulary to even
            shares (:attr:`padded_vocabulary`); otherwise the numbers differ by one at most, and nothing is padded. No
            bit depends on it.

    Raises:
        LayoutRefused: ``size`` does not divide the query and KV heads, or leaves a rank without a vocabulary group.
    """

    config: ModelConfig
    size: int = 1
    index: int = 0
    even_vocabulary: bool = False

    def __post_init__(self) -> None:
        if self.config.heads % self.size or self.config.kv_heads % self.size:
            heads = f"{self.config.heads} query and {self.config.kv_heads} KV heads"
            raise LayoutRefused(f"TP {self.size} with {heads}: it must divide both")
        number = len(groups(self.config.vocabulary))
        if (self.size - 1) * self._groups_each >= number if self.even_vocabulary else self.size > number:
            shares = f", {self._groups_each} a rank: the last would have none" if self.even_vocabulary else ""
            raise LayoutRefused(f"TP {self.size} with {number} vocabulary groups{shares}")

    @property
    def heads(self) -> int:
        return self.config.heads // self.size

    @property
    def kv_heads(self) -> int:
        return self.config.kv_heads // self.size

    def rows(self, name: str, rank: int | None = None) -> tuple[int, int]:
        """(first, last + 1) row of HF tensor ``name`` on ``rank`` (default: this one)."""
        rank = self.index if rank is None else rank
        total = self.config.tensor_shapes()[name][0]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return self.vocabulary(rank)
        if _is_norm(name):
            return 0, total
        if ".self_attn.q_proj." in name or ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            share = total // self.size  # whole heads: TP divides them
            return rank * share, (rank + 1) * share
        return bounds(total, self.size)[rank]

    def vocabulary(self, rank: int) -> tuple[int, int]:
        """(first, last + 1) vocabulary row on ``rank``: whole groups, ranks may own different numbers."""
        edges = groups(self.config.vocabulary)
        if self.even_vocabulary:
            first, last = rank * self._groups_each, min((rank + 1) * self._groups_each, len(edges))
        else:
            first, last = bounds(len(edges), self.size)[rank]
        return edges[first][0], edges[last - 1][1]

    @property
    def _groups_each(self) -> int:
        """Vocabulary groups of a rank by the even rule; the last may have fewer."""
        return -(-len(groups(self.config.vocabulary)) // self.size)

    @property
    def padded_vocabulary(self) -> int:
        """The vocabulary's size to tell an engine that cuts it into even shares, so that its ranks' rows are those of
        the even rule; rows from the true size on are padding."""
        return self.size * self._groups_each * group_columns(self.config.vocabulary)

    def groups(self, rank: int) -> list[tuple[int, int]]:
        """(first column, last + 1) of the vocabulary groups on ``rank``."""
        first, last = self.vocabulary(rank)
        return [group for group in groups(self.config.vocabulary) if first <= group[0] < last]

    def inputs(self, merged: str, rank: int | None = None) -> tuple[int, int]:
        """(first, last + 1) input column of the K-sharded copy of a merged linear weight on ``rank``."""
        rank = self.index if rank is None else rank
        if merged.endswith("self_attn.o_proj.weight"):
            share = self.heads * self.config.head_dim
            return rank * share, (rank + 1) * share
        width = self.config.intermediate if merged.endswith("mlp.down_proj.weight") else self.config.hidden
        return bounds(width, self.size)[rank]

    @functools.cached_property
    def _parts(self) -> dict[str, tuple[str, ...]]:
        return merged_names(self.config)

    def part_rows(self, merged: str, rank: int) -> list[int]:
        """Rows that ``rank`` holds of each HF tensor joined in a merged weight, in HF order (q, k, v; gate, up)."""
        return [last - first for first, last in (self.rows(part, rank) for part in self._parts[merged])]

    def canonical_rows(self, merged: str, rank: int) -> Tensor:
        """int64: canonical row (HF order: q, k, v; gate, up) of every row that ``rank`` holds of a merged weight."""
        shapes, base, pieces = self.config.tensor_shapes(), 0, []
        for part in self._parts[merged]:
            first, last = self.rows(part, rank)
            pieces.append(torch.arange(first, last) + base)
            base += shapes[part][0]
        return torch.cat(pieces)

    def is_replicated(self, merged: str) -> bool:
        """Whether every TP rank holds the whole weight (norms)."""
        return _is_norm(merged)
