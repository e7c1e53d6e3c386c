"""Where samples and fold units lie in a packed row of tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from torch import Tensor

Runs = tuple[tuple[int, int, int], ...]  # (sample, first position, count), ascending


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """Whole samples joined without padding, and the fold units they belong to.

    Attributes:
        lengths: tokens of each sample, in canonical order.
        unit_samples: number of samples in each fold unit; sums to ``len(lengths)``.
    """

    lengths: tuple[int, ...]
    unit_samples: tuple[int, ...]

    def __post_init__(self) -> None:
        assert sum(self.unit_samples) == len(self.lengths)
        assert all(length > 0 for length in self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @functools.cached_property
    def offsets(self) -> Tensor:
        """int64 [samples + 1]: first token of each sample."""
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @functools.cached_property
    def unit_offsets(self) -> Tensor:
        """int64 [units + 1]: first token of each fold unit."""
        return self.offsets[torch.tensor([0, *self.unit_samples]).cumsum(0)].contiguous()

    @functools.cached_property
    def unit_bounds(self) -> list[tuple[int, int]]:
        """(first token, last token + 1) of each fold unit."""
        bounds = self.unit_offsets.tolist()
        return list(itertools.pairwise(bounds))

    @functools.cached_property
    def positions(self) -> Tensor:
        """int64 [tokens]: position inside the sample."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def unit_rows(self, rows: Tensor) -> list[tuple[int, int]]:
        """(first, last + 1) among ``rows``, ascending int64 places of tokens, of every fold unit that has some."""
        ends = torch.searchsorted(rows, self.unit_offsets.to(rows.device)).tolist()
        return [(first, last) for first, last in itertools.pairwise(ends) if last > first]

    def blocks(self, size: int) -> Tensor:
        """int64 [n, 2]: (sample, first position) of every block of ``size`` positions."""
        rows = [(s, first) for s, length in enumerate(self.lengths) for first in range(0, length, size)]
        return torch.tensor(rows, dtype=torch.int64)


def whole_runs(layout: PackedLayout) -> Runs:
    """One run a sample."""
    return tuple((sample, 0, length) for sample, length in enumerate(layout.lengths))
