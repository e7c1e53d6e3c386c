"""The vocabulary's tiles and groups, in which log-probabilities and the head's products are cut."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from rl_engine.numerics.contract import Contract

TILE, GROUPS = Contract().logp_tile, Contract().logp_groups


def group_columns(vocabulary: int) -> int:
    """Columns of one vocabulary group (the last is shorter)."""
    tiles = -(-vocabulary // TILE)
    return -(-tiles // GROUPS) * TILE


def groups(vocabulary: int) -> list[tuple[int, int]]:
    """(first column, last column + 1) of every group."""
    width = group_columns(vocabulary)
    return [(first, min(first + width, vocabulary)) for first in range(0, vocabulary, width)]


@dataclasses.dataclass(frozen=True)
class Share:
    """The columns of a vocabulary that one rank has: the whole groups ``groups``, (first column, last + 1)."""

    vocabulary: int
    groups: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        return self.groups[0][0]

    @property
    def whole(self) -> bool:
        return self.groups[-1][1] - self.first == self.vocabulary

    def rows(self, columns: tuple[int, int]) -> tuple[int, int]:
        """The rank's rows of the head for ``columns`` of the vocabulary."""
        return columns[0] - self.first, columns[1] - self.first

    def own(self, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Targets and packed retained sets counted from the rank's first column; other ranks' targets are no column."""
        if self.first == 0:
            return targets, mask
        return targets - self.first, None if mask is None else mask[:, self.first // 8 :].contiguous()


def whole_share(vocabulary: int) -> Share:
    """Every column."""
    return Share(vocabulary, tuple(groups(vocabulary)))
