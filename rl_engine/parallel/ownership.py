"""Who owns what: slices of an axis under TP, zig-zag chunks of every sample under CP."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_engine.parallel.groups import Group


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """(first, last + 1) of ``parts`` contiguous slices, the longer ones first; a slice may be empty."""
    short, longer = divmod(length, parts)
    edges = [0]
    for part in range(parts):
        edges.append(edges[-1] + short + (part < longer))
    return [(edges[i], edges[i + 1]) for i in range(parts)]


def zigzag_runs(length: int, parts: int) -> list[list[tuple[int, int]]]:
    """Runs (first position, count) of a sample of ``length`` tokens that each of ``parts`` CP ranks owns.

    The sample is cut into 2 * parts chunks; rank i owns chunks i and 2 * parts - 1 - i, so that causal attention costs
    every rank about the same. Runs are not empty and ascend; a rank may own none of a short sample.
    """
    if parts == 1:
        return [[(0, length)]]
    size = -(-length // (2 * parts))
    chunks = [(k * size, min((k + 1) * size, length)) for k in range(2 * parts)]
    return [
        [(first, last - first) for first, last in (chunks[i], chunks[2 * parts - 1 - i]) if last > first]
        for i in range(parts)
    ]


def join_columns(group: Group, x: Tensor, slices: Sequence[tuple[int, int]], *, purpose: str) -> Tensor:
    """Whole rows [T, ...] of every rank's contiguous columns x [T, own]."""
    if group.size == 1:
        return x
    return torch.cat(group.all_gather(x, [(x.shape[0], b - a) for a, b in slices], purpose=purpose), dim=1)


@dataclasses.dataclass(frozen=True)
class ContextLayout:
    """Which tokens of packed samples each CP rank owns.

    Attributes:
        lengths: tokens of each sample in the joined row.
        parts: CP ranks.
        index: this rank.
    """

    lengths: tuple[int, ...]
    parts: int
    index: int

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(sample, first position, count) of this rank's tokens, in local order."""
        return [
            (sample, first, count)
            for sample, length in enumerate(self.lengths)
            for first, count in zigzag_runs(length, self.parts)[self.index]
        ]

    @functools.cached_property
    def places(self) -> list[Tensor]:
        """For every rank, int64 [tokens it owns]: their places in the joined row."""
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        owned: list[list[Tensor]] = [[] for _ in range(self.parts)]
        for sample, length in enumerate(self.lengths):
            for rank, runs in enumerate(zigzag_runs(length, self.parts)):
                owned[rank].extend(torch.arange(first, first + count) + offsets[sample] for first, count in runs)
        nothing = torch.empty(0, dtype=torch.int64)
        return [torch.cat(parts) if parts else nothing for parts in owned]

    def places_on(self, device: torch.device) -> list[Tensor]:
        """``places`` on ``device``, sent there once."""
        if device.type == "cpu":
            return self.places
        if device not in self._sent:
            self._sent[device] = [places.to(device) for places in self.places]
        return self._sent[device]

    @functools.cached_property
    def _sent(self) -> dict[torch.device, list[Tensor]]:
        return {}

    @property
    def own(self) -> Tensor:
        """int64: places of this rank's tokens in the joined row."""
        return self.places[self.index]

    def gather(self, group: Group, x: Tensor, *, purpose: str) -> Tensor:
        """All ranks' rows x [own tokens, ...] in logical order [tokens, ...]."""
        if self.parts == 1:
            return x
        shapes = [(len(places), *x.shape[1:]) for places in self.places]
        rows = group.all_gather(x, shapes, purpose=purpose)
        return self.merge(rows)

    def columns(self, group: Group, x: Tensor, axis: int, *, purpose: str) -> Tensor:
        """All tokens of this rank's slice of ``axis``, in logical order, of own tokens x [own tokens, ...]."""
        if self.parts == 1:
            return x
        slices = bounds(x.shape[axis], self.parts)
        shape = list(x.shape)
        shape[axis] = slices[self.index][1] - slices[self.index][0]
        received = group.all_to_all(
            [x.narrow(axis, a, b - a).contiguous() for a, b in slices],
            [(len(places), *shape[1:]) for places in self.places],
            purpose=purpose,
        )
        return self.merge(received)

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Every rank's rows [its tokens, ...] in logical order [tokens, ...]."""
        first = parts[0]
        full = torch.empty(sum(self.lengths), *first.shape[1:], dtype=first.dtype, device=first.device)
        for places, part in zip(self.places_on(first.device), parts, strict=True):
            full[places] = part
        return full
