"""The page pool's books, and the scheduler over a pool without a model."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from rl_engine.engines.rollout.builtin.memory import PagedMemory
from rl_engine.engines.rollout.builtin.pool import PagePool, PoolCorrupt, block_hash
from rl_engine.engines.rollout.builtin.scheduler import Scheduler
from rl_engine.engines.rollout.builtin.sequence import Job, RolloutSettings, Sequence
from rl_engine.engines.types import Request
from rl_engine.ops.attention.paged import PagedCache
from tests.helpers.models import sampling


def test_books_after_10000_random_operations() -> None:
    """Take, share, register, give and forget, against a model that only knows the tables."""
    rng, pool = random.Random(0), PagePool(40)
    tables: dict[int, list[int]] = {}
    contents: dict[int, bytes] = {}
    done = {"take": 0, "share": 0, "give": 0, "forget": 0, "full": 0}
    for number in range(10_000):
        kind = rng.choice(["take"] * 5 + ["share"] * 3 + ["give"] * 2) if rng.random() < 0.998 else "forget"
        if kind == "take":
            page = pool.take()
            assert (page is None) == (len({p for table in tables.values() for p in table}) == 40)
            if page is None:
                done["full"] += 1
                continue
            assert all(page not in table for table in tables.values()), "a page was handed out twice"
            tables.setdefault(rng.randrange(12), []).append(page)
            contents[page] = block_hash(b"", [rng.randrange(60)])
            pool.register(page, contents[page])
        elif kind == "share":
            key = block_hash(b"", [rng.randrange(60)])
            page = pool.share(key)
            if page is None:
                continue
            assert contents[page] == key, "a shared page holds other tokens"
            tables[100 + number] = [page]
        elif kind == "give" and tables:
            pool.give(tables.pop(rng.choice(list(tables))))
        elif kind == "forget":
            pool.forget()
        done[kind] += 1
        pool.check(tables.values())
    assert min(done.values()) > 5, done
    for table in tables.values():
        pool.give(table)
    assert pool.available == pool.pages == 40


def test_wrong_books_are_noticed() -> None:
    """The control: a leaked page, one in a table too many, and one given back twice."""
    pool = PagePool(3)
    first, second = pool.take(), pool.take()
    assert first is not None and second is not None
    pool.check([[first], [second]])
    with pytest.raises(PoolCorrupt, match="has 1 owners in the books, 0 tables hold it"):
        pool.check([[first]])
    with pytest.raises(PoolCorrupt, match="2 tables hold it"):
        pool.check([[first, second], [first]])
    pool.give([second])
    with pytest.raises(PoolCorrupt, match="nobody owns it"):
        pool.give([second])


def test_idle_pages_are_kept_until_needed_and_the_beginning_longest() -> None:
    pool = PagePool(3)
    table = [page for page in (pool.take(), pool.take(), pool.take()) if page is not None]
    keys = [block_hash(b"", [0]), block_hash(b"", [1]), block_hash(b"", [2])]
    for page, key in zip(table, keys, strict=True):
        pool.register(page, key)
    pool.give(table)
    assert pool.available == 3
    assert pool.take() == table[2], "the end of a sample goes first"
    assert pool.owned(keys[2]) is None
    assert pool.share(keys[0]) == table[0] and pool.owned(keys[0]) is True
    assert pool.owned(keys[1]) is False
    pool.forget()
    assert pool.share(keys[1]) is None
    pool.check([[table[2]], [table[0]]])


def test_growing_keeps_what_is_owned() -> None:
    pool = PagePool(1)
    page = pool.take()
    pool.grow(3)
    assert page == 0 and pool.available == 2
    pool.check([[0]])


def test_hash_depends_on_everything_before() -> None:
    one, two = block_hash(b"", [1, 2]), block_hash(b"", [2, 1])
    assert one != two
    assert block_hash(one, [3]) != block_hash(two, [3])
    assert block_hash(b"", [1, 256]) != block_hash(b"", [257, 0])
    assert block_hash(one, [5, 2**40]) == hashlib.sha256(one + np.array([5, 2**40], dtype="<i8").tobytes()).digest()


@pytest.mark.parametrize(("late", "count", "shared"), [(True, 1, 0), (True, 16, 0), (True, 17, 1), (False, 1, 1)])
def test_a_page_that_few_tokens_fill_is_shared_from_the_next_pass_on(late: bool, count: int, shared: int) -> None:
    """On a GPU: its decode kernel may fetch old keys while those of its own pass are stored; behind a prefill kernel
    they are there."""
    memory = PagedMemory(PagedCache(1, 1, 1, 20, 32), False, True, late=late)
    tokens = tuple(range(40))
    first, second, third = (Sequence.begin(n, Job(Request(n, 0, tokens), 0, sampling())) for n in range(3))
    for sequence in (first, second, third):
        memory.join(sequence)
    first.computed = 32 - count
    assert memory.extend(first, count)
    memory.announce(first, count)
    memory.match(second)
    assert len(memory.tables[1]) == shared
    memory.settle()
    memory.match(third)
    assert memory.tables[2] == memory.tables[0][:1]
    memory.check()


class World:
    """Scheduler and pool over a cache of one tiny layer; a pass only counts tokens, and every draw is the same id."""

    def __init__(self, rng: random.Random, **settings: int) -> None:
        self.rng = rng
        self.settings = RolloutSettings(**settings)
        self.memory = PagedMemory(PagedCache(1, 1, 1, settings["pages"], settings["page"]), False, True)
        self.scheduler = Scheduler(self.settings, self.memory)
        self.living: list[Sequence] = []
        self.finished = self.added = 0

    def add(self) -> None:
        start, length = self.rng.choice([0, 0, 7]), self.rng.randrange(1, 60)
        request = Request(self.added, 0, tuple(range(start, start + length)))
        job = Job(request, 0, sampling(max_response_len=self.rng.randrange(1, 20)))
        self.living.append(Sequence.begin(self.added, job))
        self.scheduler.queue(self.living[-1])
        self.added += 1

    def cancel(self) -> None:
        if self.living:
            self.scheduler.remove(self.living.pop(self.rng.randrange(len(self.living))))

    def tick(self) -> None:
        oldest = self.living[0] if self.living else None
        work, _ = self.scheduler.decide()
        assert sum(count for _, count in work) <= self.settings.budget
        assert len(self.scheduler.running) <= self.settings.max_batch
        assert all(count <= self.settings.chunk for _, count in work)
        assert oldest is None or any(sequence is oldest for sequence, _ in work), "the oldest sample stands still"
        waiting = [s.number for s in self.scheduler.waiting]
        assert not waiting or all(s.number < min(waiting) for s in self.scheduler.running), "a sample was overtaken"
        for sequence, count in work:
            sequence.computed += count
            if sequence.remaining == 0:
                sequence.tokens.append(5)
        for sequence in [s for s in self.living if s.responses >= s.job.sampling.max_response_len]:
            self.living.remove(sequence)
            self.scheduler.remove(sequence)
            self.finished += 1
        self.memory.check()


def test_scheduler_over_10000_random_operations() -> None:
    """The budget is kept, nobody is overtaken, the oldest always moves, no page is lost; the pool is far too small."""
    rng = random.Random(1)
    world = World(rng, max_batch=6, chunk=9, page=4, budget=24, pages=20)
    cancelled = 0
    for _ in range(10_000):
        kind = rng.choice(["add", "cancel", *["tick"] * 18])
        if kind == "add" and len(world.living) < 30:
            world.add()
        elif kind == "cancel" and world.living and rng.random() < 0.3:
            world.cancel()
            cancelled += 1
        elif kind == "tick":
            world.tick()
    while world.living:
        world.tick()
    assert world.finished + cancelled == world.added > 300
    assert cancelled > 50
    assert world.memory.available() == 20


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="a budget of 10 tokens is below max_batch 64"):
        RolloutSettings(budget=10)
    with pytest.raises(ValueError, match="page 0 is below 1"):
        RolloutSettings(page=0)
    with pytest.raises(ValueError, match="a pool of 0 pages"):
        RolloutSettings(pages=0)
