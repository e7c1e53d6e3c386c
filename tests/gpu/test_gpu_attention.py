"""Attention on a GPU: every tile against the anchor's bits, training form = chunked prefill = paged decode, gradients,
and the wrong orders that must be caught."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_engine.ops import cuda_source
from rl_engine.ops.attention import run_rows
from rl_engine.ops.layout import PackedLayout
from tests.helpers.gpu import attention_fp64, differing, needs_gpu, on_gpu
from tests.helpers.numeric import assert_bitwise, assert_close
from tests.helpers.ops import bf16_randn, in_nan, order_revealing

pytestmark = [pytest.mark.gpu, needs_gpu]

HEADS = [(8, 2, 128), (6, 2, 64), (3, 1, 128)]
WHY = "bf16 roundings of p, dS and the result"


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    assert_bitwise(actual.cpu().contiguous(), expected.cpu().contiguous(), what)


def qkv(tokens: int, heads: tuple[int, int, int], scale: float = 1.0) -> tuple[Tensor, ...]:
    q, kv, width = heads
    return on_gpu(
        bf16_randn(tokens, q, width, seed=1, scale=scale),
        bf16_randn(tokens, kv, width, seed=2),
        bf16_randn(tokens, kv, width, seed=3),
    )


def anchor() -> Any:
    from rl_engine.ops.attention.triton import ANCHOR, TritonAttention

    return TritonAttention(ANCHOR)


def provider(*choice: tuple[int, int, int, int]) -> Any:
    """One tile choice for every kernel: (queries, keys, warps, stages) of forward, dq and dkv."""
    from rl_engine.ops.attention.triton import TILES, Tile, TritonAttention

    if not choice:
        return TritonAttention()
    forward, dq, dkv = (Tile(*tile) for tile in choice)
    changes = {"forward": forward, "prefill": forward, "dq": dq, "dkv": dkv}
    tiles = dataclasses.replace(TILES[128], **changes, hopper=0, hopper_dq=None, hopper_dkv=0)
    return TritonAttention(dict.fromkeys(TILES, tiles))


CHOICES = [
    (),
    ((128, 64, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2)),
    ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3)),
    ((16, 64, 4, 2), (64, 32, 4, 2), (32, 128, 8, 2)),
]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", [(1, 63, 64, 65), (1023,), (1024, 17), (1025,), (2100, 130)], ids=str)
def test_every_tile_has_the_anchors_bits(heads: tuple[int, int, int], lengths: tuple[int, ...]) -> None:
    layout = PackedLayout(lengths, (len(lengths),))
    q, k, v = qkv(layout.tokens, heads, 2.0)
    dout = bf16_randn(*q.shape, seed=4).cuda()
    out, lse = anchor().forward_packed(q, k, v, layout)
    assert not bool(lse.isnan().any()) and not bool(out.isnan().any())
    gradients = anchor().backward_packed(dout, q, k, v, out, lse, layout)
    found, found_lse = provider().forward_packed(q, k, v, layout)
    same(found_lse, lse, "aligned inputs: LSE")
    same(found, out, "aligned inputs: output")
    for choice in CHOICES:
        tested = provider(*choice)
        found, found_lse = tested.forward_packed(*(in_nan(x) for x in (q, k, v)), layout)
        same(found, out, f"{choice} output")
        same(found_lse, lse, f"{choice} LSE")
        for name, a, b in zip(
            ("dq", "dk", "dv"), tested.backward_packed(dout, q, k, v, out, lse, layout), gradients, strict=True
        ):
            same(a, b, f"{choice} {name}")


@pytest.mark.parametrize("heads", [(32, 8, 128), (12, 4, 64)], ids=str)
def test_a_program_takes_many_tiles_of_unequal_length(heads: tuple[int, int, int]) -> None:
    """More tiles than multiprocessors, long and short, whole samples and parts of them: what one tile leaves behind may
    not reach the next."""
    lengths = (1, 63, 64, 65, 127, 128, 129, 1000, 1025, 2100, 66)
    layout = PackedLayout(lengths, (len(lengths),))
    parts = ((3, 1, 60), (7, 100, 333), (7, 990, 10), (8, 960, 65), (9, 37, 1), (9, 1000, 700), (10, 0, 66))
    q, k, v = qkv(layout.tokens, heads, 2.0)
    out, lse = anchor().forward_packed(q, k, v, layout)
    rows = run_rows(layout, parts).cuda()
    for turn in range(10):
        found, found_lse = provider().forward_packed(q, k, v, layout)
        same(found, out, f"turn {turn}: output")
        same(found_lse, lse, f"turn {turn}: LSE")
        found, found_lse = provider().forward_runs(q[rows], k, v, layout, parts)
        same(found, out[rows], f"turn {turn}, parts of samples: output")
        same(found_lse, lse[rows], f"turn {turn}, parts of samples: LSE")


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", [(1, 63, 64, 65, 127, 129), (1023,), (1024, 17), (2100, 130)], ids=str)
def test_gradients_before_the_last_rounding(heads: tuple[int, int, int], lengths: tuple[int, ...]) -> None:
    """fp32 sums of the shipped kernels against the anchor's; a group's heads backwards are the control."""
    from rl_engine.ops.attention import whole_runs

    layout = PackedLayout(lengths, (len(lengths),))
    q, k, v = qkv(layout.tokens, heads, 2.0)
    dout = bf16_randn(*q.shape, seed=4).cuda()
    out, lse = anchor().forward_packed(q, k, v, layout)
    delta = anchor().delta(dout, out)
    rest = (layout, whole_runs(layout), torch.float32)
    expected = anchor().gradients(dout, q, k, v, lse, delta, *rest)
    found = provider().gradients(dout, q, k, v, lse, delta, *rest)
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        same(a, b, name)
    members = torch.arange(heads[0]).unflatten(0, (heads[1], -1)).flip(1).flatten().cuda()
    lse, delta = (x[:, members].t().contiguous().t() for x in (lse, delta))
    other = provider().gradients(dout[:, members], q[:, members], k, v, lse, delta, *rest)
    for name, a, b in zip(("dk", "dv"), other[1:], expected[1:], strict=True):
        assert differing(a, b) > 100, f"the control: {name} with a group's heads backwards"


def test_gradients_beside_nan() -> None:
    """Neighbours full of NaN do not reach a sample's gradients."""
    from rl_engine.ops.attention import whole_runs

    lengths = (65, 131, 70)
    layout = PackedLayout(lengths, (3,))
    q, k, v = qkv(layout.tokens, (8, 2, 128))
    dout = bf16_randn(*q.shape, seed=4).cuda()
    out, lse = anchor().forward_packed(q, k, v, layout)
    delta = anchor().delta(dout, out)
    rest = (layout, whole_runs(layout), torch.float32)
    expected = anchor().gradients(dout, q, k, v, lse, delta, *rest)
    part = slice(65, 196)
    for x in (q, k, v, dout, lse, delta):
        x[: part.start], x[part.stop :] = torch.nan, torch.nan
    found = provider().gradients(dout, q, k, v, lse, delta, *rest)
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        same(a[part], b[part], name)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_values_are_close_to_fp64(heads: tuple[int, int, int]) -> None:
    lengths = (1, 130, 1100)
    layout = PackedLayout(lengths, (3,))
    q, k, v = qkv(layout.tokens, heads)
    dout = bf16_randn(*q.shape, seed=4).cuda()
    out, lse = provider().forward_packed(q, k, v, layout)
    expected = attention_fp64(q, k, v, dout, lengths)
    found = (out, *provider().backward_packed(dout, q, k, v, out, lse, layout))
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        top = float(b.abs().max())
        assert_close(a.cpu(), b.cpu(), rtol=2e-2, atol=5e-3 * top, why=f"{name}: {WHY}")


def test_values_are_close_to_the_reference() -> None:
    from rl_engine.ops.attention.reference import ReferenceAttention

    layout = PackedLayout((1, 65, 100), (3,))
    q, k, v = qkv(166, (4, 2, 64))
    out, lse = provider().forward_packed(q, k, v, layout)
    expected, natural = ReferenceAttention().forward_packed(q.cpu(), k.cpu(), v.cpu(), layout)
    assert_close(out.cpu(), expected, rtol=2**-7, atol=2e-3, why="one bf16 rounding either way")
    assert_close(lse.cpu() * 0.6931471805599453, natural, rtol=1e-6, atol=2e-6, why="base 2 against base e")


def cached(tested: Any, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], page: int, chunk: int) -> Tensor:
    """All samples together through the cache: chunks of ``chunk`` tokens, the last five tokens one by one."""
    pages = 3 + sum(-(-n // page) for n in lengths)
    cache = tested.new_cache(1, k.shape[1], k.shape[2], pages, page, k.device)
    handles, starts = [cache.join() for _ in lengths], [0] * len(lengths)
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    out = torch.full_like(q, torch.nan)
    while any(start < n for start, n in zip(starts, lengths, strict=True)):
        live = [i for i, n in enumerate(lengths) if starts[i] < n]
        counts = [min(chunk, lengths[i] - starts[i] - 5) if lengths[i] - starts[i] > 5 else 1 for i in live]
        batch = cache.batch([handles[i] for i in live], [starts[i] for i in live], counts)
        places = torch.cat([torch.arange(n) + offsets[i] + starts[i] for i, n in zip(live, counts, strict=True)]).cuda()
        out[places] = tested.cached(q[places], k[places], v[places], cache, 0, batch)
        for i, n in zip(live, counts, strict=True):
            starts[i] += n
    return out


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("page", "chunk"), [(16, 100), (64, 1000), (256, 3)], ids=str)
def test_prefill_and_decode_over_pages_have_the_training_forms_bits(
    heads: tuple[int, int, int], page: int, chunk: int
) -> None:
    """Fresh pages hold NaN, so a key behind the last one would show."""
    lengths = (5, 131, 1030) if chunk == 3 else (5, 131, 1030, 2055)
    layout = PackedLayout(lengths, (len(lengths),))
    q, k, v = qkv(layout.tokens, heads, 2.0)
    expected = anchor().forward_packed(q, k, v, layout)[0]
    same(cached(provider(), q, k, v, lengths, page, chunk), expected, f"page {page}, chunks of {chunk}")


def decode_once(
    length: int, kernel_tile: tuple[int, int, int, int], heads: tuple[int, int, int] = (8, 2, 128)
) -> tuple[Tensor, Tensor]:
    """(output, LSE) of one new token of one sample."""
    from rl_engine.ops.attention.triton import Tile, by_head, decode, store

    q, k, v = qkv(length, heads, 2.0)
    pages = -(-length // 64)
    shape = (pages, heads[1], 64, heads[2])
    keys, values = (torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    store(k, v, torch.arange(length).cuda(), keys, values)
    items = torch.tensor([[0, length - 1, 1, 0]], dtype=torch.int32, device="cuda")
    table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
    out, found = torch.empty_like(q[-1:]), by_head(1, heads[0], q.device)
    decode(q[-1:], keys, values, items, table, 1, -(-length // 1024), out, found, Tile(*kernel_tile))
    return out, found


@pytest.mark.parametrize("tile", [(16, 64, 1, 1), (16, 64, 2, 3), (16, 64, 4, 5), (16, 64, 8, 7)], ids=str)
@pytest.mark.parametrize("length", [1, 64, 1000, 1025, 3000])
def test_decode_has_the_anchors_lse(tile: tuple[int, int, int, int], length: int) -> None:
    q, k, v = qkv(length, (8, 2, 128), 2.0)
    out, lse = anchor().forward_packed(q, k, v, PackedLayout((length,), (1,)))
    found, found_lse = decode_once(length, tile)
    same(found, out[-1:], "output")
    same(found_lse, lse[-1:], "LSE")


RAGGED = [
    ((32, 8, 128), (1, 63, 64, 65, 500, 1023, 1024, 1025, 2047, 5000), 64, 1),
    ((32, 8, 128), (1024, 900, 64), 64, 1),
    ((8, 2, 128), (1024, 1, 640, 129), 256, 1),
    ((8, 2, 128), (2, 66, 1025, 1026, 2300), 64, 2),
    ((8, 1, 128), (5, 1025, 130), 128, 1),
    ((4, 2, 64), (7, 1500, 64), 64, 3),
    ((4, 1, 64), (1000, 3, 128), 64, 1),
    ((8, 8, 128), (1, 1300), 64, 1),
]


FORMS = (
    *("chosen", "splits", "singles", "halves", "whole", "alone", "whole halves"),
    *("one in flight", "two small ones", "late splits", "pairs", "pairs at once", "pairs late"),
)


def decode_form(name: str) -> Any:
    """The one that is chosen (None), a named one, or one that no launch takes by itself."""
    from rl_engine.ops.attention import hopper_paged

    form = hopper_paged.Form
    others = {"chosen": None, "one in flight": form(True, 64, 1), "two small ones": form(False, 128, 2, 8, 80)}
    others["late splits"] = form(False, 128, 2, registers=128, late=20)  # before the first slot
    for which, late in (("pairs at once", 0), ("pairs late", 40)):
        others[which] = form(False, 64, 0, late=late, pairs=True)
    return (hopper_paged.FORMS | others)[name]


def takes(name: str, width: int) -> bool:
    """Whether the form of this name runs here with this head_dim."""
    from rl_engine.ops.attention import hopper_paged

    return not name.startswith("pairs") or "pairs" in hopper_paged.forms(width)


def hopper() -> None:
    from rl_engine.ops.attention import hopper_forward

    if not hopper_forward.available(torch.device("cuda")):
        pytest.skip("these kernels are for Hopper")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_decode_has_the_anchors_bits(name: str) -> None:
    """Ragged samples at once, old keys fetched late or early; slots without a key hold NaN."""
    from rl_engine.qualify.gpu_attention import last_tokens

    hopper()
    for heads, lengths, page, queries in RAGGED:
        if not takes(name, heads[2]):
            continue
        layout = PackedLayout(lengths, (len(lengths),))
        q, k, v = qkv(layout.tokens, heads, 2.0)
        out, lse = anchor().forward_packed(q, k, v, layout)
        batch = last_tokens(q, k, v, layout, page, queries)
        for settled in (False, True):
            found, found_lse = batch.decoded(decode_form(name), settled)
            same(found, out[batch.rows], f"{heads}, {lengths} output, {settled}")
            same(found_lse, lse[batch.rows], f"{heads}, {lengths} LSE, {settled}")
            same(batch.output(decode_form(name), settled), found, f"{heads}, {lengths} without LSE, {settled}")


def test_two_programs_of_a_cluster_need_every_rounding_in_its_place(tmp_path: Path) -> None:
    """Controls: a row sum, a score or O added in another order, and a factor contracted into l are seen."""
    from rl_engine.ops.attention import hopper_pairs
    from rl_engine.qualify.gpu_attention import last_tokens

    hopper()
    if not takes("pairs", 128):
        pytest.skip("NVRTC is not here")
    layout = PackedLayout((3000, 1100), (2,))
    batch = last_tokens(*qkv(layout.tokens, (8, 2, 128), 2.0), layout, 64, 1)
    right = batch.states(decode_form("splits"))
    for name, a, b in zip(("o", "l", "mu"), batch.states(decode_form("pairs")), right, strict=True):
        same(a, b, name)
    source = hopper_pairs.SOURCE.path.read_text()
    for which, old, new in (
        (1, "n == 4 ? 8 : n == 8 ? 1 : n == 1 ? 2 : 0", "n == 4 ? 1 : n == 1 ? 2 : n == 2 ? 8 : 0"),
        (1, "__fadd_rn(__fmul_rn(l, factor), more)", "__fmaf_rn(l, factor, more)"),
        (2, "product(d, k[step / 4][step % 4], q[step][0], q[step][1])",
            "product(d, k[1 - step / 4][step % 4], q[step ^ 4][0], q[step ^ 4][1])"),
        (0, "product(o, v[0], early.x, early.y);\n        product(o, v[1], early.z, early.w);",
            "product(o, v[1], early.z, early.w);\n        product(o, v[0], early.x, early.y);"),
    ):  # fmt: skip
        assert source.count(old) == 1, old
        path = tmp_path / "wrong.cu"
        path.write_text(source.replace(old, new))
        wrong = cuda_source.Source(path, hashlib.sha256(path.read_bytes()).hexdigest())
        found = batch.states(decode_form("pairs"), wrong)
        assert differing(found[which], right[which]) > 0, old


NOT_NUMBERS = {
    "one key": [700],
    "a thread's four keys": [704, 705, 712, 713],
    "a block": range(704, 768),
    "the first block": range(64),
    "all but one key": [n for n in range(1300) if n != 900],
    "the last key": [1299],
}


@pytest.mark.parametrize("which", NOT_NUMBERS)
def test_a_score_that_is_not_a_number_gives_a_result_that_is_none(which: str) -> None:
    """In every form, as in the training form, wherever the key lies; another sample's result stays."""
    from rl_engine.ops.attention import hopper_paged
    from rl_engine.qualify.gpu_attention import last_tokens

    hopper()
    layout = PackedLayout((1300, 1100), (2,))
    q, k, v = qkv(layout.tokens, (8, 2, 128), 2.0)
    k[list(NOT_NUMBERS[which]), 0, 5] = torch.nan
    batch = last_tokens(q, k, v, layout, 64, 1)
    right = anchor().forward_packed(q, k, v, layout)[0][batch.rows]
    first = batch.rows == 1299
    assert (
        right[first][:, :4].isnan().all() and not right[~first].isnan().any() and not right[first][:, 4:].isnan().any()
    )
    for name, form in hopper_paged.forms(128).items():
        found = batch.output(form)
        assert torch.equal(found.isnan(), right.isnan()), name
        same(found[:, 4:], right[:, 4:], name)
        same(found[~first], right[~first], name)


def test_every_split_of_every_form_has_the_same_state_and_another_row_sum_is_caught() -> None:
    from rl_engine.qualify.gpu_attention import last_tokens, other_row_sums

    hopper()
    layout = PackedLayout((3000, 1100), (2,))
    batch = last_tokens(*qkv(layout.tokens, (8, 2, 128), 2.0), layout, 64, 1)
    right = batch.states(decode_form("splits"))
    for form in ("singles", "halves", "two small ones", "late splits"):  # of pairs: above
        for name, a, b in zip(("o", "l", "mu"), batch.states(decode_form(form)), right, strict=True):
            same(a, b, f"{form}: {name}")
    wrong_l = batch.states(decode_form("splits"), other_row_sums())[1]
    assert differing(wrong_l, right[1]) > 5, "the plain pair tree"


@pytest.mark.parametrize("length", [700, 1024, 2048])
def test_a_decode_that_starts_early_sees_what_the_kernels_before_it_wrote(length: int) -> None:
    """A graph of (positions, new key and value, decode) over several caches without a pause, its inputs changed between
    replays, against launches one by one. Also with old keys fetched early: the kernel ahead writes new ones only."""
    from rl_engine.ops.attention.triton import TILES, decode, decode_pages, store
    from rl_engine.qualify.gpu.timing import captured

    hopper()
    samples, heads, kv_heads, width, page = 6, 16, 4, 128, 64
    pages, splits, every = -(-length // page), -(-length // 1024), torch.arange(6, device="cuda")
    sets = []
    for _ in range(5):
        keys, values = torch.randn(2, samples * pages, kv_heads, page, width, device="cuda").bfloat16()
        table = torch.randperm(samples * pages, device="cuda").to(torch.int32).view(samples, pages)
        new = torch.zeros(2, samples, kv_heads, width, dtype=torch.bfloat16, device="cuda")
        wanted, items = (torch.zeros(samples, 4, dtype=torch.int32, device="cuda") for _ in range(2))
        slots = torch.zeros(samples, dtype=torch.int64, device="cuda")
        out = torch.empty(samples, heads, width, dtype=torch.bfloat16, device="cuda")
        sets.append((keys, values, table, new, wanted, items, slots, out))
    q = torch.randn(samples, heads, width, device="cuda").bfloat16() * 2
    every_key = samples * length
    for name, settled in itertools.product((*FORMS[:7], "late splits", *FORMS[-3:]), (False, True)):
        if not takes(name, width):
            continue
        chosen = decode_form(name)

        def run(which: int, form: Any = chosen, settled: bool = settled) -> None:
            keys, values, table, new, wanted, items, slots, out = sets[which]
            items.copy_(wanted)
            store(new[0], new[1], slots, keys, values)
            places, tiles = (q, keys, values, items, table, 1, splits), TILES[width]
            decode_pages(*places, every_key, out, None, tiles, form, settled=settled)

        replay = captured([lambda which=which, run=run: run(which) for which in range(len(sets))])
        for turn in range(10):
            for _keys, _values, table, new, wanted, _items, slots, out in sets:
                position = torch.randint(max(0, length - 130), length, (samples,), device="cuda")
                wanted.copy_(torch.stack([every, position, torch.ones_like(every), every], 1))
                slots.copy_(table[every, position // page].long() * page + position % page)
                new.normal_()
                out.fill_(torch.nan)
            for _ in range(3):
                replay()
            torch.cuda.synchronize()
            for keys, values, table, _new, wanted, _items, _slots, out in sets:
                expected = torch.full_like(out, torch.nan)
                decode(q, keys, values, wanted, table, 1, splits, expected, None, TILES[width].decode)
                same(out, expected, f"{name}, {settled}, turn {turn}")


def test_calls_that_the_hopper_forms_do_not_take() -> None:
    from rl_engine.ops.attention.hopper_paged import fits

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    pages = empty(4, 2, 64, 128)
    assert fits(empty(3, 8, 128), pages, pages, 2)
    assert not fits(empty(3, 8, 128), pages, pages, 3), "12 query rows"
    assert not fits(empty(3, 8, 128), empty(4, 2, 16, 128), empty(4, 2, 16, 128), 1), "pages of 16"
    assert not fits(empty(3, 8, 32), empty(4, 2, 64, 32), empty(4, 2, 64, 32), 1), "head_dim 32"
    odd = empty(4 * 2 * 64 * 128 + 1)[1:].view(4, 2, 64, 128)
    assert not fits(empty(3, 8, 128), odd, odd, 1), "not aligned"
    apart = empty(4, 2, 128, 128)[:, :, :64]
    assert not fits(empty(3, 8, 128), apart, apart, 1), "pages apart"


def test_order_revealing_values() -> None:
    """+2^22 and -2^22 among the values: an order of keys that differs shows in the output."""
    layout = PackedLayout((1300,), (1,))
    q, k, _ = qkv(1300, (4, 1, 128), 0.0)
    v = order_revealing(128, 1300, seed=3).T.contiguous()[:, None].cuda()
    expected = anchor().forward_packed(q, k, v, layout)[0]
    for choice in CHOICES:
        same(provider(*choice).forward_packed(q, k, v, layout)[0], expected, str(choice))
    backwards = anchor().forward_packed(q, k, v.flip(0).contiguous(), layout)[0]
    assert differing(backwards[-1], expected[-1]) > 50, "the control: keys in another order"


def test_a_sample_does_not_depend_on_its_batch_mates_nor_a_group_on_others() -> None:
    lengths = (65, 1, 1130)
    layout = PackedLayout(lengths, (3,))
    q, k, v = qkv(1196, (4, 2, 64))
    dout = bf16_randn(*q.shape, seed=9).cuda()
    out, lse = provider().forward_packed(q, k, v, layout)
    whole = provider().backward_packed(dout, q, k, v, out, lse, layout)
    for first, length in ((0, 65), (65, 1), (66, 1130)):
        part = slice(first, first + length)
        alone, one = (q[part], k[part], v[part]), PackedLayout((length,), (1,))
        a, a_lse = provider().forward_packed(*alone, one)
        same(a, out[part], f"output of {length} alone")
        same(a_lse, lse[part], f"LSE of {length} alone")
        found = provider().backward_packed(dout[part], *alone, a, a_lse, one)
        for name, x, y in zip(("dq", "dk", "dv"), found, whole, strict=True):
            same(x, y[part], f"{name} of {length} alone")
    second = (q[:, 2:], k[:, 1:], v[:, 1:])
    a, a_lse = provider().forward_packed(*second, layout)
    same(a, out[:, 2:], "second group")
    found = provider().backward_packed(dout[:, 2:], *second, a, a_lse, layout)
    for x, y in zip(found, (whole[0][:, 2:], whole[1][:, 1:], whole[2][:, 1:]), strict=True):
        same(x, y, "second group's gradient")


@pytest.mark.parametrize("width", [64, 128])
def test_runs_are_parts_of_the_whole(width: int) -> None:
    """What a context-parallel rank computes."""
    from rl_engine.ops.attention import run_rows

    layout = PackedLayout((1, 600, 1100), (3,))
    q, k, v = qkv(layout.tokens, (4, 2, width))
    dout = bf16_randn(*q.shape, seed=9).cuda()
    out, lse = provider().forward_packed(q, k, v, layout)
    delta = provider().delta(dout, out)
    whole = provider().backward_runs(dout, q, k, v, lse, delta, layout, ((0, 0, 1), (1, 0, 600), (2, 0, 1100)))
    runs = ((1, 7, 40), (1, 300, 201), (2, 999, 101))
    rows = run_rows(layout, runs).cuda()
    part, part_lse = provider().forward_runs(q[rows], k, v, layout, runs)
    same(part, out[rows], "output")
    same(part_lse, lse[rows], "LSE")
    for a, b in zip(provider().backward_runs(dout, q, k, v, lse, delta, layout, runs), whole, strict=True):
        same(a, b[rows], "gradients of runs")


def test_a_graph_replays_the_same_bits_at_other_positions() -> None:
    """One captured decode, replayed after the positions moved, against eager launches."""
    from rl_engine.ops.attention.triton import TILES, decode

    q, k, v = qkv(2048, (8, 2, 128))
    keys, values = (x.unflatten(0, (32, 64)).transpose(1, 2).contiguous() for x in (k, v))
    table = torch.arange(32, dtype=torch.int32, device="cuda")[None].expand(3, 32).contiguous()

    def items(positions: list[int]) -> Tensor:
        return torch.tensor([[i, p, 1, i] for i, p in enumerate(positions)], dtype=torch.int32, device="cuda")

    def run(where: Tensor, out: Tensor) -> None:
        decode(q[:3], keys, values, where, table, 1, 2, out, None, TILES[128].decode)

    where, out = items([10, 700, 1500]), torch.empty_like(q[:3])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(where, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(where, out)
    for positions in ([10, 700, 1500], [63, 1023, 2047], [64, 1024, 1]):
        where.copy_(items(positions))
        graph.replay()
        eager = torch.empty_like(out)
        run(items(positions), eager)
        same(out, eager, f"positions {positions}")


def test_other_row_sums_and_contraction_are_caught() -> None:
    """The controls: the library's own sum over columns that lie in several warps, and fused multiply-adds."""
    from rl_engine.ops.attention import triton_decode, triton_forward
    from rl_engine.ops.attention.triton import Tile, by_head, forward_tiles, query_tiles
    from rl_engine.qualify.gpu_attention import fused, library_sum, replaced, split_sums

    q, k, v = qkv(3072, (8, 2, 128), 2.0)
    step = replaced(triton_forward.block_step, sum_block=library_sum)
    wrong = replaced(triton_decode.attention_decode_kernel, block_step=step)
    right = split_sums(triton_decode.attention_decode_kernel, q, k, v, 1)
    same(split_sums(triton_decode.attention_decode_kernel, q, k, v, 4), right, "the written sum over four warps")
    assert differing(split_sums(wrong, q, k, v, 4), right) > 10, "the library's sum over four warps"
    layout, tile = PackedLayout((600,), (1,)), Tile(128, 64, 8, 2)
    q, k, v = qkv(600, (8, 2, 128), 2.0)
    expected = anchor().forward_packed(q, k, v, layout)[1]
    items, found = query_tiles(layout, ((0, 0, 600),), 128, False, q.device), by_head(600, 8, q.device)
    forward_tiles(q, k, v, items, items, 0, torch.empty_like(q), found, tile, fused)
    assert differing(found, expected) > 100, "contraction"


def test_an_unknown_width_is_refused() -> None:
    q, k, v = qkv(4, (2, 1, 80))
    with pytest.raises(ValueError, match=r"knows head_dim 32, 64, 128, not 80"):
        provider().forward_packed(q, k, v, PackedLayout((4,), (1,)))
