"""Accounting of one pool of KV pages: who holds which page, and which full pages can be shared. Holds no tensor.

A page is free, owned (by one sample or several that share it) or idle: owned by nobody, but full of keys of known
tokens, so a later sample with the same beginning may take it over. Idle pages are given up, the longest unused first,
when no page is free. Every choice follows from the order of calls alone, so that equal ranks choose equally.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class PoolCorrupt(AssertionError):
    """A page is lost, or counted for somebody who does not hold it."""


def block_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """SHA-256 of a page's tokens and of everything before them; ``previous`` is the hash of the page before."""
    return hashlib.sha256(previous + struct.pack(f"<{len(tokens)}q", *tokens)).digest()


class PagePool:
    """``pages`` pages, numbered from 0."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._owners = [0] * pages
        self._hash: dict[int, bytes] = {}
        self._page: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can still hand out."""
        return len(self._free) + len(self._idle)

    def grow(self, pages: int) -> None:
        """Adds pages until there are ``pages``."""
        self._free = list(range(pages - 1, self.pages - 1, -1)) + self._free
        self._owners += [0] * (pages - self.pages)
        self.pages = pages

    def take(self) -> int | None:
        """A page for one owner, its content worthless; None where every page is owned."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._page[self._hash.pop(page)]
        else:
            return None
        self._owners[page] = 1
        return page

    def share(self, key: bytes) -> int | None:
        """The page that holds the block ``key``, with one owner more, or None."""
        page = self._page.get(key)
        if page is not None:
            self._owners[page] += 1
            self._idle.pop(page, None)
        return page

    def owned(self, key: bytes) -> bool | None:
        """Whether the page of the block ``key`` has an owner; None where no page holds it."""
        page = self._page.get(key)
        return None if page is None else self._owners[page] > 0

    def give(self, pages: Iterable[int]) -> None:
        """One owner less for each page of a sample, in its order; its beginning stays longest in the idle list."""
        for page in reversed(list(pages)):
            if self._owners[page] <= 0:
                raise PoolCorrupt(f"page {page} is given back, but nobody owns it")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._hash:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, key: bytes) -> None:
        """An owned page will hold the whole block ``key`` from now on. A second page of the same block is not kept."""
        if key not in self._page and page not in self._hash:
            self._page[key] = page
            self._hash[page] = key

    def forget(self) -> None:
        """No page can be shared any more: the weights have changed."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._hash.clear()
        self._page.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares the books with the block tables of everybody who holds pages.

        Raises:
            PoolCorrupt: a page is leaked, doubly owned, or in two places.
        """
        held = Counter(page for table in tables for page in table)
        for page, owners in enumerate(self._owners):
            if held[page] != owners:
                raise PoolCorrupt(f"page {page} has {owners} owners in the books, {held[page]} tables hold it")
        owned = [page for page, owners in enumerate(self._owners) if owners]
        if sorted([*owned, *self._free, *self._idle]) != list(range(self.pages)):
            raise PoolCorrupt("the free, idle and owned pages are not every page once")
        if self._page != {key: page for page, key in self._hash.items()}:
            raise PoolCorrupt("a shared block and its page do not know each other")
        if any(page in self._hash for page in self._free) or any(page not in self._hash for page in self._idle):
            raise PoolCorrupt("a free page is still shared, or an idle one cannot be")
