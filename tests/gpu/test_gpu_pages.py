"""Pages that somebody else owns, on a GPU: pairs of pages in one tensor, negative slots, padded rows of a graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_engine.ops import Operators, uniform
from rl_engine.ops.attention.paged import PagedBatch
from rl_engine.ops.attention.static import DecodeBatch
from tests.helpers.gpu import needs_gpu, on_gpu
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ops import bf16_randn

pytestmark = [pytest.mark.gpu, needs_gpu]

PAGE = 64
LENGTHS = (1, 700, 1024, 2100)


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    assert_bitwise(actual.cpu().contiguous(), expected.cpu().contiguous(), what)


def operators() -> Operators:
    return Operators(uniform("gpu"))


def tables() -> tuple[list[list[int]], int]:
    """Scattered pages of every sample; page 0 is nobody's."""
    wanted = [-(-n // PAGE) for n in LENGTHS]
    numbers = (torch.randperm(sum(wanted), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    return [[numbers.pop() for _ in range(n)] for n in wanted], sum(wanted) + 1


def inputs(heads: int, kv_heads: int, width: int) -> tuple[Tensor, ...]:
    shapes = ((heads, 1), (kv_heads, 2), (kv_heads, 3))
    return on_gpu(*(bf16_randn(sum(LENGTHS), h, width, seed=seed) for h, seed in shapes))


@pytest.mark.parametrize("shape", [(8, 2, 128), (6, 2, 64), (16, 4, 128)])
@pytest.mark.parametrize("settled", [False, True])
def test_pairs_of_pages_have_the_bits_of_a_cache(shape: tuple[int, int, int], settled: bool) -> None:
    """Prefill, then one token of every sample between padded rows, as a captured pass has them."""
    _, kv_heads, width = shape
    ops, data, (rows, number) = operators(), inputs(*shape), tables()
    cache = ops.new_cache(1, kv_heads, width, number, PAGE, torch.device("cuda"))
    pool = torch.full((2 * number, kv_heads, PAGE, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    pages = ops.paired_pages(pool)
    ends = torch.tensor(LENGTHS).cumsum(0)
    before = torch.cat([torch.arange(e - n, e - 1) for e, n in zip(ends.tolist(), LENGTHS, strict=True)]).cuda()
    last = (ends - 1).cuda()
    with torch.no_grad():
        batch = PagedBatch.build(rows[1:], [0] * 3, [n - 1 for n in LENGTHS[1:]], PAGE)
        expected = ops.attention_cached(*(x[before] for x in data), cache, 0, batch)
        found = ops.attention_over_pages(*(x[before] for x in data), *pages, batch.doubled(PAGE), settled=settled)
        same(found, expected, "prefill")
        batch = PagedBatch.build(rows, [n - 1 for n in LENGTHS], [1] * 4, PAGE)
        expected = ops.attention_cached(*(x[last] for x in data), cache, 0, batch)
        found = ops.attention_over_pages(*(x[last] for x in data), *pages, batch.doubled(PAGE), settled=settled)
        same(found, expected, "decode")
        places = torch.tensor([1, 3, 4, 6]).cuda()  # the rows between are padding
        table = torch.zeros(7, batch.table.shape[1], dtype=torch.int32, device="cuda")
        lengths = torch.zeros(7, dtype=torch.int64, device="cuda")
        slots = torch.full((7,), -1, device="cuda")
        table[places], lengths[places], slots[places] = (
            batch.table.cuda(),
            ends.diff(prepend=ends[:1] * 0).cuda(),
            (batch.slots.cuda()),
        )
        padded = [torch.full((7, *x.shape[1:]), 9.0, dtype=x.dtype, device="cuda") for x in data]
        for into, x in zip(padded, data, strict=True):
            into[places] = x[last]
        static = DecodeBatch.of_lengths(table, lengths, slots, 3, sum(LENGTHS)).doubled(PAGE)
        held = pool.clone()
        found = ops.attention_over_pages(*padded, *pages, static, settled=settled)
        same(found[places], expected, "decode between padded rows")
        assert not found[[0, 2, 5]].any(), "a padded row is not +0"
        same(pool, held, "the same keys and values again, and nothing else")


def test_a_negative_slot_is_stored_nowhere() -> None:
    """The pages lie inside a larger allocation, whose every byte must stay."""
    ops, kv_heads, width = operators(), 2, 128
    around = torch.full((6, kv_heads, PAGE, width), 5.0, dtype=torch.bfloat16, device="cuda")
    pages = ops.paired_pages(around[2:4])
    q, k, v = on_gpu(*(bf16_randn(20, heads, width, seed=heads) for heads in (8, kv_heads, kv_heads)))
    plain = PagedBatch.build([[0]], [0], [1], PAGE)
    slots = torch.tensor([0] + [-1] * 18 + [-(2**20)])
    batch: Any = dataclasses.replace(plain, slots=slots)
    out = ops.attention_over_pages(q, k, v, *pages, batch.doubled(PAGE))
    torch.cuda.synchronize()
    same(out[0], v[0].repeat_interleave(4, 0), "one key: its own value")
    assert not out[1:].any()
    assert int((around != 5.0).sum()) == k[0].numel() + v[0].numel(), "more was written than one key and value"
