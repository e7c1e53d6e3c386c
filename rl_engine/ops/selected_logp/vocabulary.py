"""The vocabulary's tiles and groups, in which log-probabilities and the head's products are cut."""

from __future__ import annotations

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
