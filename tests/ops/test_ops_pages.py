"""Attention over pages that somebody else owns: pairs of pages in one tensor, slots that are nowhere, padded rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from rl_engine.ops import Operators
from rl_engine.ops.attention.paged import PagedBatch
from rl_engine.ops.attention.static import DecodeBatch
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ops import bf16_randn, differing, operators

HEADS, KV_HEADS, WIDTH = 4, 2, 64  # a stream of 256 in small; lengths below cross pages, blocks and a split
Pass = tuple[list[int], list[int]]  # (starts, counts)


def passes(lengths: tuple[int, ...], chunk: int) -> list[Pass]:
    """Chunks of every sample together; behind its end a sample has no query."""
    found, done = [], [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        counts = [min(chunk, n - d) for d, n in zip(done, lengths, strict=True)]
        found.append((list(done), counts))
        done = [d + c for d, c in zip(done, counts, strict=True)]
    return found


def tables(lengths: tuple[int, ...], page: int, first: int = 1) -> list[list[int]]:
    """Pages of each sample, scattered: neighbours in the pool belong to different samples."""
    wanted = [-(-n // page) for n in lengths]
    order = [(i, s) for i in range(max(wanted)) for s in range(len(lengths)) if i < wanted[s]]
    found: list[list[int]] = [[] for _ in lengths]
    for number, (_, sample) in enumerate(order):
        found[sample].append(first + number)
    return found


def rows_of(lengths: tuple[int, ...], starts: list[int], counts: list[int]) -> Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return torch.cat([torch.arange(c) + offsets[s] + starts[s] for s, c in enumerate(counts)])


def over_cache(ops: Operators, data: list[Tensor], lengths: tuple[int, ...], chunk: int, page: int) -> Tensor:
    """The built-in engine's way: a ``PagedCache`` and its own tables."""
    out = torch.full_like(data[0], torch.nan)
    cache = ops.new_cache(1, KV_HEADS, WIDTH, 2 + sum(-(-n // page) for n in lengths), page)
    for starts, counts in passes(lengths, chunk):
        live = [s for s, count in enumerate(counts) if count]
        batch = PagedBatch.build(
            [tables(lengths, page)[s] for s in live], [starts[s] for s in live], [counts[s] for s in live], page
        )
        rows = rows_of(lengths, starts, counts)
        out[rows] = ops.attention_cached(*(x[rows] for x in data), cache, 0, batch)
    return out


def over_pairs(
    ops: Operators, data: list[Tensor], lengths: tuple[int, ...], chunk: int, page: int, *, doubled: bool = True
) -> Tensor:
    """Another engine's way: K and V of a page side by side in one tensor, padded queries, samples without a query."""
    out = torch.full_like(data[0], torch.nan)
    number = 2 + sum(-(-n // page) for n in lengths)
    pages = ops.paired_pages(torch.full((2 * number, KV_HEADS, page, WIDTH), torch.nan, dtype=torch.bfloat16))
    for starts, counts in passes(lengths, chunk):
        plain = PagedBatch.build(tables(lengths, page), starts, counts, page)
        rows, padding = rows_of(lengths, starts, counts), 3
        slots = torch.cat([plain.slots, torch.full((padding,), -1)])
        batch = dataclasses.replace(plain, slots=slots)
        padded = [torch.cat([x[rows], torch.full((padding, *x.shape[1:]), 9.0).bfloat16()]) for x in data]
        found = ops.attention_over_pages(*padded, *pages, batch.doubled(page) if doubled else batch, settled=False)
        assert not found[len(rows) :].any(), "a row without a sample is not +0"
        out[rows] = found[: len(rows)]
    return out


@pytest.mark.parametrize(
    ("name", "lengths", "chunk", "page"),
    [
        ("cpu", (1, 65, 130, 63), 7, 16),
        ("cpu", (1100, 3, 64), 300, 64),
        ("cpu", (70, 70), 1, 8),
        ("reference", (3, 70), 40, 16),
    ],
)
def test_pairs_of_pages_in_one_tensor_have_the_bits_of_a_cache(
    name: str, lengths: tuple[int, ...], chunk: int, page: int
) -> None:
    ops, total = operators(name), sum(lengths)
    data = [bf16_randn(total, heads, WIDTH, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    with torch.no_grad():
        expected = over_cache(ops, data, lengths, chunk, page)
        assert_bitwise(over_pairs(ops, data, lengths, chunk, page), expected, "pairs of pages")
        if name == "cpu":
            undoubled = over_pairs(ops, data, lengths, chunk, page, doubled=False)
            assert differing(undoubled.nan_to_num(7.0), expected) > 100, "the control: page ids as they were"


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_negative_slot_is_stored_nowhere(name: str) -> None:
    """The pages lie inside a larger allocation, whose every byte must stay."""
    ops, page = operators(name), 16
    store = torch.full((6, KV_HEADS, page, WIDTH), 5.0, dtype=torch.bfloat16)
    pages = ops.paired_pages(store[2:4])
    q, k, v = (bf16_randn(3, heads, WIDTH, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    plain = PagedBatch.build([[0]], [0], [1], page)
    batch = dataclasses.replace(plain, slots=torch.tensor([0, -1, -1]))
    out = ops.attention_over_pages(q, k, v, *pages, batch.doubled(page))
    assert_bitwise(out[0], v[0].repeat_interleave(HEADS // KV_HEADS, 0), "one key: its own value")
    assert int((store != 5.0).sum()) == k[0].numel() + v[0].numel(), "more was written than one key and value"
    assert not (store[:2] != 5.0).any() and not (store[4:] != 5.0).any(), "outside the pages"


def test_padded_rows_of_a_static_batch_are_skipped() -> None:
    """Lengths on the device, as a captured pass reads them; 0 is a row without a sample."""
    ops, page, lengths = operators("cpu"), 16, (33, 0, 5, 0, 16)
    data = [bf16_randn(33, heads, WIDTH, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    pool = torch.full((2 * 20, KV_HEADS, page, WIDTH), torch.nan, dtype=torch.bfloat16)
    pages, table = ops.paired_pages(pool), torch.tensor([[1, 2, 3], [0] * 3, [4, 0, 0], [0] * 3, [5, 6, 0]])
    expected = torch.zeros(len(lengths), HEADS, WIDTH, dtype=torch.bfloat16)
    news = [torch.full((len(lengths), *x.shape[1:]), 3.0).bfloat16() for x in data]
    slots = torch.full((len(lengths),), -1)
    with torch.no_grad():
        for row, length in enumerate(lengths):
            if not length:
                continue
            whole = ops.new_cache(1, KV_HEADS, WIDTH, 3, page)
            one = PagedBatch.build([[0, 1, 2]], [0], [length], page)
            expected[row] = ops.attention_cached(*(x[:length] for x in data), whole, 0, one)[-1]
            before = PagedBatch.build([table[row].tolist()], [0], [length - 1], page).doubled(page)
            ops.attention_over_pages(*(x[: length - 1] for x in data), *pages, before)
            for new, x in zip(news, data, strict=True):
                new[row] = x[length - 1]
            slots[row] = int(table[row, (length - 1) // page]) * page + (length - 1) % page
        batch = DecodeBatch.of_lengths(table.int(), torch.tensor(lengths), slots, splits=1, keys=54)
        held = pool.clone()
        assert_bitwise(ops.attention_over_pages(*news, *pages, batch.doubled(page)), expected, "padded decode")
        written = int((pool.view(torch.int16) != held.view(torch.int16)).sum())
        assert written == 3 * 2 * KV_HEADS * WIDTH, "keys and values of three samples"
