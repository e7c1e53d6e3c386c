"""Attention: the C provider against the reference, and training form = prefill = chunked prefill = paged decode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_engine.ops.attention.paged import OutOfPages
from rl_engine.ops.attention.reference import ReferenceAttention
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import Operators
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ops import (
    THREADS,
    assert_providers_agree,
    assert_same,
    bf16_randn,
    differing,
    in_nan,
    kernel_threads,
    operators,
    order_revealing,
    run,
)

Heads = tuple[int, int, int]  # query heads, KV heads, width


def qkv(tokens: int, heads: Heads, *, seed: int = 1, scale: float = 1.0) -> dict[str, Tensor]:
    q_heads, kv_heads, width = heads
    return {
        "q": bf16_randn(tokens, q_heads, width, seed=seed, scale=scale),
        "k": bf16_randn(tokens, kv_heads, width, seed=seed + 1),
        "v": bf16_randn(tokens, kv_heads, width, seed=seed + 2),
    }


def packed(ops: Operators, data: dict[str, Tensor], *lengths: int) -> Tensor:
    with torch.no_grad():
        return ops.attention_packed(data["q"], data["k"], data["v"], PackedLayout(lengths, (1,) * len(lengths)))


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        ((1, 1, 2), (1,)),
        ((2, 1, 17), (1, 2, 3)),
        ((6, 2, 64), (63, 64, 65)),
        ((4, 4, 40), (1, 37, 130, 70)),
        ((9, 3, 64), (11, 129)),
        ((16, 1, 32), (5, 66)),
        ((2, 1, 128), (128, 100)),
    ],
)
def test_packed_forward_and_backward(heads: Heads, lengths: tuple[int, ...]) -> None:
    layout = PackedLayout(lengths, (len(lengths),))
    data = qkv(layout.tokens, heads)
    views = {name: in_nan(x) for name, x in data.items()}
    for given in (data, views):
        assert_providers_agree(lambda ops, q, k, v: ops.attention_packed(q, k, v, layout), given, f"{heads} {lengths}")


@pytest.mark.parametrize("length", [1023, 1024, 1025])
def test_lengths_around_a_split(length: int) -> None:
    """Backward too; two query heads, so that the order over the group shows."""
    layout = PackedLayout((length,), (1,))
    data = qkv(length, (2, 1, 4), scale=2.0)
    assert_providers_agree(lambda ops, q, k, v: ops.attention_packed(q, k, v, layout), data, f"length {length}")


def test_three_splits() -> None:
    data = qkv(2100, (1, 1, 2), scale=3.0)
    assert_bitwise(packed(operators("cpu"), data, 2100), packed(operators("reference"), data, 2100), "2,100 keys")


@pytest.mark.parametrize("scale", [0.0, 30.0, 1e4])
def test_extreme_scores(scale: float) -> None:
    """All scores equal, or one key taking everything: alpha and p run into 0 and 1."""
    layout = PackedLayout((150,), (1,))
    assert_providers_agree(
        lambda ops, q, k, v: ops.attention_packed(q, k, v, layout), qkv(150, (2, 1, 16), scale=scale), f"scale {scale}"
    )


def test_order_revealing_values() -> None:
    """+2^22 and -2^22 among the values: another order of keys, inside a block or between blocks, changes the output."""
    layout = PackedLayout((200,), (1,))
    data = qkv(200, (2, 1, 24), scale=0.0)
    data["v"] = order_revealing(24, 200, seed=3).T.contiguous()[:, None]
    assert_providers_agree(lambda ops, q, k, v: ops.attention_packed(q, k, v, layout), data, "values")
    backwards = {"q": data["q"], "k": data["k"], "v": data["v"].flip(0)}
    last, last_backwards = (packed(operators("cpu"), x, 200)[-1] for x in (data, backwards))
    assert differing(last, last_backwards) > 10, "the control: keys in another order"


def cached(
    ops: Operators, data: dict[str, Tensor], lengths: tuple[int, ...], chunk: int, page: int, *, prefill: int = 10**9
) -> Tensor:
    """Attention of whole samples through the cache: chunks of ``chunk`` tokens, one by one from ``prefill`` on.

    Samples of a batch advance together, the shorter ones leave first; the pages hold another sample's old values.
    """
    q, k, v = data.values()
    heads, width = k.shape[1:]
    with torch.no_grad():
        cache = ops.new_cache(1, heads, width, 2 + sum(-(-n // page) for n in lengths), page)
        stale = cache.join()
        batch = cache.batch([stale], [0], [2 * page])
        ones = torch.full((2 * page, heads, width), 3e38, dtype=torch.bfloat16)
        ops.attention_cached(ones[:, :1].expand(-1, q.shape[1], -1).contiguous(), ones, ones, cache, 0, batch)
        cache.leave([stale])
        handles = [cache.join() for _ in lengths]
        firsts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        out, done = torch.full_like(q, torch.nan), [0] * len(lengths)
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            live = [i for i, n in enumerate(lengths) if done[i] < n]
            steps = [
                min(1 if done[i] >= prefill else min(chunk, prefill - done[i]), lengths[i] - done[i]) for i in live
            ]
            batch = cache.batch([handles[i] for i in live], [done[i] for i in live], steps)
            rows = torch.cat(
                [torch.arange(firsts[i] + done[i], firsts[i] + done[i] + n) for i, n in zip(live, steps, strict=True)]
            )
            out[rows] = ops.attention_cached(q[rows], k[rows], v[rows], cache, 0, batch)
            for i, n in zip(live, steps, strict=True):
                done[i] += n
            gone = [i for i in live if done[i] == lengths[i]]
            cache.leave([handles[i] for i in gone])
        assert cache.free_pages == cache.pages
    return out


@pytest.mark.parametrize("page", [8, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 64, 10**6])
def test_chunked_prefill_and_decode_equal_the_training_form(chunk: int, page: int) -> None:
    lengths = (1, 65, 130, 63)
    data = qkv(sum(lengths), (6, 2, 16))
    expected = packed(operators("cpu"), data, *lengths)
    assert_bitwise(cached(operators("cpu"), data, lengths, chunk, page), expected, f"chunk {chunk}, page {page}")


@pytest.mark.parametrize(("chunk", "page"), [(7, 8), (64, 16), (200, 64)])
def test_reference_reads_its_cache_alike(chunk: int, page: int) -> None:
    lengths = (3, 70)
    data = qkv(73, (2, 1, 8))
    expected = packed(operators("reference"), data, *lengths)
    assert_bitwise(cached(operators("reference"), data, lengths, chunk, page), expected, "reference")
    assert_bitwise(cached(operators("cpu"), data, lengths, chunk, page), expected, "C")


@pytest.mark.parametrize("page", [8, 64])
def test_decode_across_a_split_equals_the_training_form(page: int) -> None:
    """Prefill of 1,000 tokens in uneven chunks, then one token at a time to 1,100."""
    data = qkv(1100, (4, 2, 32), scale=2.0)
    expected = packed(operators("cpu"), data, 1100)
    assert_bitwise(cached(operators("cpu"), data, (1100,), 300, page, prefill=1000), expected, "decode")


def test_stock_decode_differs_from_stock_prefill() -> None:
    """The control: the same tokens through SDPA, in one go and one at a time, have other bits."""
    lengths = (300,)
    data = qkv(300, (6, 2, 64))
    whole = packed(operators("stock"), data, *lengths)
    ops = operators("stock")
    with torch.no_grad():
        cache = ops.new_cache(1, 2, 64, 0, 0)
        handle, rows = cache.join(), []
        for t in range(300):
            batch = cache.batch([handle], [t], [1])
            rows.append(ops.attention_cached(*(x[t : t + 1] for x in data.values()), cache, 0, batch))
    assert differing(torch.cat(rows), whole) > 100
    assert differing(packed(operators("cpu"), data, *lengths), whole) > 1000


class OneAccumulator(ReferenceAttention):
    """A wrong order on purpose: no splits, every block onto one state."""

    def _head(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        _, l, mu, o = self._split(q, k, v, positions, 0, int(positions[-1]) + 1)
        return o / l[:, None], mu + l.log()


class BlasAttention(ReferenceAttention):
    gemm = staticmethod(torch.matmul)


def test_wrong_orders_are_caught() -> None:
    """The control, in fp32 before the rounding: no splits, and products in the library's order."""
    data = qkv(1300, (1, 1, 4), scale=2.0)
    q, k, v = (x[:, 0].float() for x in data.values())
    positions = torch.arange(1300)
    right, wrong = (x._head(q, k, v, positions)[0] for x in (ReferenceAttention(), OneAccumulator()))
    assert_bitwise(wrong[:1024], right[:1024], "the first split is the same")
    assert differing(wrong[1024:], right[1024:]) > 100
    q, k, v = (x[:, 0].float() for x in qkv(130, (1, 1, 1100)).values())
    right, wrong = (x._head(q, k, v, torch.arange(130))[0] for x in (ReferenceAttention(), BlasAttention()))
    assert differing(wrong, right) > 1000


def test_lse_agrees_bit_for_bit() -> None:
    """fp32, so it shows what the bf16 output may hide."""
    layout = PackedLayout((1, 64, 65, 200), (4,))
    data = qkv(330, (3, 1, 48), scale=2.0)
    provider = operators("cpu")._providers["attention"]
    expected = ReferenceAttention().forward_packed(*data.values(), layout)
    for threads in THREADS:
        with kernel_threads(threads):
            out, lse = provider.forward_packed(*(in_nan(x) for x in data.values()), layout)
        assert_bitwise(out, expected[0], "output")
        assert_bitwise(lse, expected[1], "LSE")


def test_a_sample_does_not_depend_on_its_batch_mates() -> None:
    """Outputs and gradients of a sample alone equal those in a pack, in any order of the samples."""
    lengths = (65, 1, 130)
    data = qkv(196, (4, 2, 32))
    dout = bf16_randn(196, 4, 32, seed=9)
    whole = run(
        operators("cpu"),
        lambda ops, q, k, v: ops.attention_packed(q, k, v, PackedLayout(lengths, (3,))),
        data,
        dout=dout,
    )
    for first, length in ((0, 65), (65, 1), (66, 130)):
        part = slice(first, first + length)
        alone = run(
            operators("cpu"),
            lambda ops, q, k, v, n=length: ops.attention_packed(q, k, v, PackedLayout((n,), (1,))),
            {name: x[part] for name, x in data.items()},
            dout=dout[part],
        )
        assert_same(alone, {name: x[part] for name, x in whole.items()}, f"sample of {length} alone")


def test_heads_do_not_depend_on_each_other() -> None:
    """A KV group alone has the bits it has among others: what a tensor-parallel rank computes."""
    layout = PackedLayout((100,), (1,))
    data, dout = qkv(100, (6, 2, 32)), bf16_randn(100, 6, 32, seed=9)
    call = lambda ops, q, k, v: ops.attention_packed(q, k, v, layout)  # noqa: E731
    whole = run(operators("cpu"), call, data, dout=dout)
    second = {"q": data["q"][:, 3:], "k": data["k"][:, 1:], "v": data["v"][:, 1:]}
    alone = run(operators("cpu"), call, second, dout=dout[:, 3:])
    expected = {name: x[:, 3:] if x.shape[1] == 6 else x[:, 1:] for name, x in whole.items()}
    assert_same(alone, expected, "second group alone")


def test_length_one_is_the_value() -> None:
    data = qkv(1, (4, 2, 32))
    assert_bitwise(packed(operators("cpu"), data, 1), data["v"].repeat_interleave(2, 1), "one key")


def test_pool_gives_pages_back_and_refuses_more_than_it_has() -> None:
    cache = operators("cpu").new_cache(1, 1, 8, 4, 8)
    first = cache.join()
    cache.batch([first], [0], [17])
    assert cache.free_pages == 1
    second = cache.join()
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 free of 4"):
        cache.batch([second], [0], [9])
    assert cache.free_pages == 1, "a refusal takes nothing"
    cache.batch([first], [17], [7])
    assert cache.free_pages == 1, "the last page had room"
    cache.leave([first])
    cache.batch([second], [0], [32])
    assert cache.free_pages == 0


def test_choice_of_a_decode_form() -> None:
    """On 132 multiprocessors, for 8 KV heads."""
    pytest.importorskip("triton")
    from rl_engine.ops.attention.hopper_paged import ALONE, HALVES, PAIRS, SINGLES, SPLITS, WHOLE, WHOLE_HALVES, choose

    def chosen(*lengths: int, pairs: bool = False) -> object:
        return choose(len(lengths), 8, -(-max(lengths) // 1024), sum(lengths), 132, pairs)

    assert chosen(*[1024] * 4) is HALVES and chosen(4096) is HALVES
    assert chosen(*[1024] * 5) is SINGLES and chosen(8192) is SINGLES
    assert chosen(*[1024] * 9) is SINGLES and chosen(*[4096] * 4) is SINGLES and chosen(*[1024] * 17) is SPLITS
    for lengths in ([1024] * 4, [4096], [1024] * 16, [4096] * 4, [500]):
        assert chosen(*lengths, pairs=True) is PAIRS, "a multiprocessor for every split"
    assert chosen(*[1024] * 17, pairs=True) is SPLITS and chosen(*[2048] * 16, pairs=True) is ALONE
    assert chosen(*[8192] * 8) is WHOLE_HALVES and chosen(*[8192] * 7, 500) is SPLITS
    assert chosen(*[2048] * 16) is ALONE and chosen(*[4096] * 32) is WHOLE
    assert chosen(*[2048] * 15, 32768) is SPLITS, "one long sample would be left alone"
    assert chosen(*[1024] * 64) is SPLITS, "one split needs no merge"
