"""Paged KV cache: one pool per layer, block tables, and what one forward pass needs to know about its batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Self

import torch
from torch import Tensor

from rl_engine.ops.layout import PackedLayout


class OutOfPages(RuntimeError):
    """The pool cannot hold the tokens asked for."""


@dataclasses.dataclass(frozen=True)
class PagedBatch:
    """Queries of several samples, joined without padding, and the pages their keys lie in.

    Attributes:
        table: int32 [S, W], page numbers of each sample (0 behind the last).
        q_offsets: int64 [S + 1], rows of q of each sample.
        q_position: int64 [S], logical position of each sample's first query.
        positions: int64 [T], logical position of each query.
        slots: int64 [T], page number * page size + slot of each new key; a negative one is stored nowhere.
    """

    table: Tensor
    q_offsets: Tensor
    q_position: Tensor
    positions: Tensor
    slots: Tensor

    @staticmethod
    def build(tables: list[list[int]], starts: list[int], counts: list[int], page: int) -> PagedBatch:
        width = max(len(table) for table in tables)
        table = torch.tensor([pages + [0] * (width - len(pages)) for pages in tables], dtype=torch.int32)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        rows = torch.repeat_interleave(torch.arange(len(tables)), torch.tensor(counts))
        slots = table[rows, positions // page].long() * page + positions % page
        offsets = torch.tensor([0, *counts]).cumsum(0)
        return PagedBatch(table, offsets, torch.tensor(starts), positions, slots)

    def counts(self) -> list[int]:
        """Queries of each sample; 0 where it has none in this pass."""
        if "_counts" not in self.__dict__:
            self.__dict__["_counts"] = self.q_offsets.diff().tolist()
        found: list[int] = self.__dict__["_counts"]
        return found

    def doubled(self, page: int) -> Self:
        """The same batch over pages of which each is two of a tensor (``AttentionProvider.paired_pages``)."""
        slots = torch.where(self.slots < 0, self.slots, self.slots // page * (2 * page) + self.slots % page)
        return dataclasses.replace(self, table=self.table * 2, slots=slots)

    def tiles(self, queries: int) -> Tensor:
        """int64 [n, 2]: (sample, first query) of every tile of ``queries`` queries."""
        cached: dict[int, Tensor] = self.__dict__.setdefault("_tiles", {})
        if queries not in cached:
            cached[queries] = tiles_of(self.counts(), queries)
        return cached[queries]


def tiles_of(counts: list[int], queries: int) -> Tensor:
    """``PagedBatch.tiles`` of samples with so many queries each."""
    rows = [(s, first) for s, count in enumerate(counts) for first in range(0, count, queries)]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2)


class PagedCache:
    """Keys [pages, kv_heads, D, page] (a page's keys are transposed, so a score row is read along the page) and values
    [pages, kv_heads, page, D] per layer, bf16. Fresh pages hold NaN: a read outside the valid region shows.

    ``join``, ``batch`` and ``leave`` hand out pages of one owner each. An engine that shares pages keeps its own tables
    and reads ``k``, ``v``, ``page`` and ``pages`` alone.
    """

    def __init__(self, layers: int, kv_heads: int, width: int, pages: int, page: int) -> None:
        self.page = page
        self.k = [_fresh(pages, kv_heads, width, page) for _ in range(layers)]
        self.v = [_fresh(pages, kv_heads, page, width) for _ in range(layers)]
        self.pages = pages
        self._free = list(range(pages))
        self._tables: dict[int, list[int]] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def grow(self, pages: int) -> None:
        """More pages; those that exist keep number and content."""
        for tensors in (self.k, self.v):
            for layer, old in enumerate(tensors):
                tensors[layer] = torch.cat([old, _fresh(pages - self.pages, *old.shape[1:])])
        self._free.extend(range(self.pages, pages))
        self.pages = pages

    def join(self) -> int:
        """A handle for a new, empty sample."""
        handle, self._next = self._next, self._next + 1
        self._tables[handle] = []
        return handle

    def leave(self, handles: list[int]) -> None:
        """Gives the samples' pages back."""
        for handle in handles:
            self._free.extend(self._tables.pop(handle))

    def batch(self, handles: list[int], starts: list[int], counts: list[int]) -> PagedBatch:
        """The pass that appends ``counts`` tokens at ``starts`` to each sample; takes pages as needed.

        Raises:
            OutOfPages: the pool is exhausted; nothing has been taken.
        """
        wanted = [
            max(-(-(start + count) // self.page) - len(self._tables[handle]), 0)
            for handle, start, count in zip(handles, starts, counts, strict=True)
        ]
        if sum(wanted) > len(self._free):
            raise OutOfPages(f"{sum(wanted)} pages asked for, {len(self._free)} free of {self.pages}")
        for handle, pages in zip(handles, wanted, strict=True):
            self._tables[handle].extend(self._free.pop() for _ in range(pages))
        return PagedBatch.build([self._tables[handle] for handle in handles], starts, counts, self.page)


def _fresh(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.bfloat16)


def _own_tables(layout: PackedLayout, page: int) -> list[list[int]]:
    """Pages of each sample, numbered in order."""
    tables, used = [], 0
    for length in layout.lengths:
        pages = -(-length // page)
        tables.append(list(range(used, used + pages)))
        used += pages
    return tables


@functools.lru_cache(maxsize=8)
def packed_batch(layout: PackedLayout, page: int) -> PagedBatch:
    """Whole samples as a batch over pages of their own."""
    tables = _own_tables(layout, page)
    return PagedBatch.build(tables, [0] * len(tables), list(layout.lengths), page)


@functools.lru_cache(maxsize=8)
def run_batch(layout: PackedLayout, page: int, runs: tuple[tuple[int, int, int], ...]) -> PagedBatch:
    """Runs (sample, first position, count) of queries over the pages of :func:`packed_batch`."""
    tables = _own_tables(layout, page)
    starts, counts = [first for _, first, _ in runs], [count for _, _, count in runs]
    return PagedBatch.build([tables[sample] for sample, _, _ in runs], starts, counts, page)


def transposed_pairs(pages: Tensor) -> tuple[Tensor, Tensor]:
    """``AttentionProvider.paired_pages`` with keys [D, page] inside a page, as :class:`PagedCache` has them."""
    number, heads, page, width = pages.shape
    assert number % 2 == 0 and pages.is_contiguous(), (pages.shape, pages.stride())
    return pages[:-1].view(number - 1, heads, width, page), pages[1:]
