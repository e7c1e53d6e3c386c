"""The KV cache as the scheduler sees it: pages with tables and sharing, or torch's dense rows in native mode."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Protocol

from rl_engine.engines.rollout.builtin.pool import PagePool
from rl_engine.engines.rollout.builtin.sequence import Job, Sequence
from rl_engine.ops.attention.paged import PagedBatch, PagedCache
from rl_engine.ops.attention.stock import DenseBatch, DenseCache

FEW = 16  # tokens of one sample that a decode kernel may take in a pass
EXPECTED = 256  # response tokens that a cache of no fixed size has room for before it grows

Work = Items[tuple[Sequence, int]]  # (sample, tokens to append), a pass


class Memory(Protocol):
    """Room for keys. A sample joins, asks for room before every pass, and leaves; leaving forgets its keys."""

    cache: Any
    shared: int  # tokens that :meth:`match` took over so far

    @property
    def pages(self) -> int:
        """Pages that samples can have; 0 where there are none."""

    def missing(self, sequence: Sequence) -> int:
        """Available pages that a sample from the queue needs for all its known tokens; shared ones cost nothing."""

    def available(self) -> int:
        """Pages nobody owns."""

    def limit(self) -> int | None:
        """Tokens of the longest sample that fits alone, or None."""

    def plan_for(self, jobs: Items[Job], rows: int) -> None:
        """Prepares for these samples, at most ``rows`` at a time."""

    def join(self, sequence: Sequence) -> None: ...

    def leave(self, sequence: Sequence) -> None: ...

    def match(self, sequence: Sequence) -> None:
        """Takes over every full page at the sample's end of computed tokens that somebody has, or will have before
        the pass attends."""

    def extend(self, sequence: Sequence, count: int) -> bool:
        """Room for ``count`` more tokens; False, and nothing taken, where the pool has none."""

    def touches(self, position: int) -> bool:
        """Whether a token at ``position`` begins a page or fills one; for others :meth:`extend` and :meth:`announce` by
        one token do nothing."""

    def announce(self, sequence: Sequence, count: int) -> None:
        """The next pass surely computes ``count`` tokens of the sample: pages that become full can be shared, at once
        or from the pass behind it on."""

    def settle(self) -> None:
        """The next pass is decided: what was announced can be shared."""

    def batch(self, work: Work) -> tuple[Work, Any]:
        """The pass, its samples in the order that the cache wants, and what attention needs to know of it."""

    def forget(self) -> None:
        """The weights have changed: nothing is shared any more."""

    def check(self) -> None:
        """Raises where the books are wrong."""


class PagedMemory:
    """One pool of pages for all layers, samples of any length.

    A page is shared from the moment a pass that fills it is certain: attention stores all keys of a pass before it
    reads any, so samples of one prompt that start together compute their common pages once. With ``late`` a page whose
    last tokens are few is shared from the next pass on: a GPU's decode kernel may fetch a sample's old keys while new
    ones are stored.

    A pool that ``grows`` takes more memory where one of fixed size has none left. With ``scratch`` one page belongs to
    no sample: rows that pad a captured pass write there. A table is a list that only grows, a new one after a sample
    left.
    """

    def __init__(self, cache: PagedCache, grows: bool, share: bool, scratch: bool = False, late: bool = False) -> None:
        self.cache, self.pool, self.grows, self.sharing = cache, PagePool(cache.pages), grows, share
        self.page = cache.page
        self.tables: dict[int, list[int]] = {}
        self.late = late
        self.shared = 0
        self._later: list[tuple[int, bytes]] = []
        self.scratch: int | None = None
        if scratch:
            if grows:
                self._grow(1)
            self.scratch = self.pool.take()
            assert self.scratch is not None

    @property
    def pages(self) -> int:
        """Pages that samples can have."""
        return self.pool.pages - (self.scratch is not None)

    def needed(self, tokens: int) -> int:
        """Pages of a sample of ``tokens`` tokens."""
        return -(-tokens // self.page)

    def available(self) -> int:
        return self.pool.available

    def missing(self, sequence: Sequence) -> int:
        if self.grows:
            return 0
        pages = self.needed(len(sequence.tokens))
        block = 0
        while self.sharing and (block + 1) * self.page < len(sequence.tokens):
            owned = self.pool.owned(sequence.hash_of(block, self.page))
            if owned is None:
                break
            pages -= owned
            block += 1
        return pages

    def limit(self) -> int | None:
        return None if self.grows else self.pages * self.page

    def plan_for(self, jobs: Items[Job], rows: int) -> None:
        if self.grows:
            first = [min(job.cached_tokens, len(job.request.tokens) + EXPECTED) for job in jobs]
            self._grow(sum(sorted(map(self.needed, first), reverse=True)[:rows]))

    def _grow(self, pages: int) -> None:
        if pages > self.pages:
            all_pages = pages + self.pool.pages - self.pages
            self.cache.grow(all_pages)
            self.pool.grow(all_pages)

    def join(self, sequence: Sequence) -> None:
        self.tables[sequence.number] = []

    def leave(self, sequence: Sequence) -> None:
        self.pool.give(self.tables.pop(sequence.number))
        sequence.computed = 0

    def match(self, sequence: Sequence) -> None:
        """The last known token is always left: its hidden state is what the next token is drawn from."""
        page, table = self.page, self.tables[sequence.number]
        while self.sharing and sequence.computed % page == 0 and sequence.computed + page < len(sequence.tokens):
            found = self.pool.share(sequence.hash_of(sequence.computed // page, page))
            if found is None:
                return
            table.append(found)
            sequence.computed += page
            sequence.shared_tokens += page
            self.shared += page

    def extend(self, sequence: Sequence, count: int) -> bool:
        table = self.tables[sequence.number]
        if sequence.computed + count <= len(table) * self.page:
            return True
        wanted = self.needed(sequence.computed + count) - len(table)
        if wanted > self.pool.available:
            if not self.grows:
                return False
            self._grow(self.pages + max(wanted, self.pages // 2))
        for _ in range(wanted):
            page = self.pool.take()
            assert page is not None
            table.append(page)
        return True

    def touches(self, position: int) -> bool:
        return (position + 1) % self.page < 2

    def announce(self, sequence: Sequence, count: int) -> None:
        page = self.page
        first, last = sequence.computed // page, (sequence.computed + count) // page
        if first == last or not self.sharing:
            return
        table = self.tables[sequence.number]
        found = [(table[block], sequence.hash_of(block, page)) for block in range(first, last)]
        if self.late and count <= FEW:
            self._later += found
            return
        for owned, key in found:
            self.pool.register(owned, key)

    def settle(self) -> None:
        for owned, key in self._later:
            self.pool.register(owned, key)
        self._later.clear()

    def batch(self, work: Work) -> tuple[Work, PagedBatch]:
        tables = [self.tables[sequence.number] for sequence, _ in work]
        starts, counts = [sequence.computed for sequence, _ in work], [count for _, count in work]
        return work, PagedBatch.build(tables, starts, counts, self.page)

    def forget(self) -> None:
        self._later.clear()
        self.pool.forget()

    def check(self) -> None:
        self.pool.check([*self.tables.values(), [] if self.scratch is None else [self.scratch]])


class DenseMemory:
    """Native mode: one dense row per sample. There are no pages, so nothing is shared and nothing is preempted; the
    number of rows is what bounds the memory."""

    pages = shared = 0

    def __init__(self, cache: DenseCache) -> None:
        self.cache = cache
        self.handles: dict[int, int] = {}

    def missing(self, sequence: Sequence) -> int:
        return 0

    def available(self) -> int:
        return 0

    def limit(self) -> int | None:
        return None

    def plan_for(self, jobs: Items[Job], rows: int) -> None:
        first = [min(job.cached_tokens, len(job.request.tokens) + EXPECTED) for job in jobs]
        self.cache.reserve(min(rows, len(jobs)), max(first))

    def join(self, sequence: Sequence) -> None:
        self.handles[sequence.number] = self.cache.join()

    def leave(self, sequence: Sequence) -> None:
        self.cache.leave([self.handles.pop(sequence.number)])
        sequence.computed = 0

    def match(self, sequence: Sequence) -> None:
        return

    def extend(self, sequence: Sequence, count: int) -> bool:
        return True

    def touches(self, position: int) -> bool:
        return False

    def announce(self, sequence: Sequence, count: int) -> None:
        return

    def settle(self) -> None:
        return

    def batch(self, work: Work) -> tuple[Work, DenseBatch]:
        rows = {number: self.cache.row(handle) for number, handle in self.handles.items()}
        work = sorted(work, key=lambda item: rows[item[0].number])
        handles = [self.handles[sequence.number] for sequence, _ in work]
        starts, counts = [sequence.computed for sequence, _ in work], [count for _, count in work]
        return work, self.cache.batch(handles, starts, counts)

    def forget(self) -> None:
        return

    def check(self) -> None:
        assert set(self.handles.values()) == set(self.cache.handles)
