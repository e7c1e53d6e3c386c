"""Attention on the GPU: one result whatever the tiles, pages and chunks; wrong sums are caught before the rounding."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rl_engine.models.config import ModelConfig
from rl_engine.numerics.contract import Contract
from rl_engine.ops.attention import (
    hopper_decode,
    hopper_forward,
    hopper_paged,
    triton_decode,
    triton_forward,
    whole_runs,
)
from rl_engine.ops.attention.triton import (
    ANCHOR,
    TILES,
    Tile,
    TritonAttention,
    TritonCache,
    by_head,
    decode_pages,
    forward_tiles,
    query_tiles,
    scales,
    store,
)
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.triton_functions import launch
from rl_engine.qualify.cases import Case, close
from rl_engine.qualify.gpu.data import Inputs, differing

LAYOUT = PackedLayout((1, 63, 66, 1100), (4,))
OTHER: dict[str, Any] = {"forward": Tile(64, 64, 4, 2), "dq": Tile(64, 32, 4, 2), "dkv": Tile(64, 64, 4, 2)}
OTHER |= {"hopper": 0, "hopper_dq": None, "hopper_dkv": 0}
GRADIENTS = ("dQ", "dK", "dV")


PARTS = (
    *("forward", "backward", "backward_order", "other_forward", "other_backward"),
    *("pages", "small_pages", "decode_forms", "row_sums", "contraction"),
)


def forward(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """The default tiles: whole, a sample alone, and values that reveal the order of keys; the anchor against fp64."""
    q, k, v = _qkv(config, inputs)
    anchor, tested = TritonAttention(ANCHOR), TritonAttention()
    out, lse = anchor.forward_packed(q, k, v, LAYOUT)
    exact = exact_attention(q, k, v)
    yield close("attention", "the anchor, fp64", out, exact, 2e-2, 5e-3 * float(exact.abs().max()))
    yield from _forward("default", tested, q, k, v, out, lse)
    part = slice(64, 130)
    alone = tested.forward_packed(q[part], k[part], v[part], PackedLayout((66,), (1,)))
    yield _case("a sample alone", alone[0], out[part])
    loud = inputs.order_revealing(2 * config.head_dim, LAYOUT.tokens).T.contiguous().unflatten(1, (2, config.head_dim))
    still = torch.zeros_like(q)
    right = anchor.forward_packed(still, k, loud, LAYOUT)[0]
    yield _case("order-revealing values", tested.forward_packed(still, k, loud, LAYOUT)[0], right)
    backwards = anchor.forward_packed(still, k, loud.flip(0).contiguous(), LAYOUT)[0]
    yield _case("values backwards", backwards[-1], right[-1], control=True)


def backward(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    yield from _backward("default", TritonAttention(), config, inputs)


def backward_order(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """Order-revealing rows in turn where dQ, dK and dV read them, the scores all zero, before the last rounding; a
    group's heads backwards must be seen."""
    q, k, v = _qkv(config, inputs)
    dout, anchor, tested = inputs.normal(*q.shape, scale=2.0), TritonAttention(ANCHOR), TritonAttention()
    still_q, still_k, still_v = (torch.zeros_like(x) for x in (q, k, v))
    sets = ((dout, still_q, _loud(inputs, k), v), (dout, _loud(inputs, q), still_k, v))
    for i, rows in enumerate((*sets, (_loud(inputs, dout), still_q, k, still_v))):
        out, lse = anchor.forward_packed(*rows[1:], LAYOUT)
        delta = anchor.delta(rows[0], out)
        right = _sums(anchor, *rows, lse, delta)[i]
        yield _case(f"{GRADIENTS[i]}, fp32, order-revealing rows", _sums(tested, *rows, lse, delta)[i], right)
        group = config.heads // config.kv_heads
        if i and group > 1:
            members = torch.arange(2 * group, device=q.device).unflatten(0, (2, group)).flip(1).flatten()
            lse, delta = (x[:, members].t().contiguous().t() for x in (lse, delta))
            found = _sums(anchor, rows[0][:, members], rows[1][:, members], *rows[2:], lse, delta)[i]
            yield _case(f"{GRADIENTS[i]}, fp32, a group's heads backwards", found, right, control=True)


def other_forward(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """Tiles that no launch takes by itself: what the default ones are may change, the bits may not."""
    q, k, v = _qkv(config, inputs)
    out, lse = TritonAttention(ANCHOR).forward_packed(q, k, v, LAYOUT)
    yield from _forward("other tiles", _others(config.head_dim), q, k, v, out, lse)


def other_backward(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    yield from _backward("other tiles", _others(config.head_dim), config, inputs)


def pages(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """Pages of whole key blocks."""
    yield _paged(config, inputs, 64, 500)


def small_pages(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """Several pages a key block."""
    yield _paged(config, inputs, 16, 100)


def decode_forms(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """The last tokens of all samples at once, in every form that decode has where they fit; and, in fp32, l of each
    split with a row sum in another order, which must be seen."""
    q, k, v = _qkv(config, inputs)
    out, lse = TritonAttention(ANCHOR).forward_packed(q, k, v, LAYOUT)
    batch = last_tokens(q, k, v, LAYOUT, 64, 1)
    if not (hopper_forward.available(q.device) and hopper_paged.fits(batch.q, batch.keys, batch.values, 1)):
        return
    for name, form in hopper_paged.forms(q.shape[2]).items():
        for settled in (False, True):
            what = f"{name}, old keys early" if settled else name
            found, found_lse = batch.decoded(form, settled)
            yield _case(f"decode over pages, {what}", found, out[batch.rows])
            yield _case(f"decode's LSE, fp32, {what}", found_lse, lse[batch.rows])
            found = batch.output(form, settled)
            yield _case(f"decode without its LSE, {what}", found, out[batch.rows])
    right = batch.states(hopper_paged.SPLITS)[1]
    yield _case("l, fp32, half the columns", batch.states(hopper_paged.HALVES)[1], right)
    wrong = other_row_sums()
    yield _case("row sum of neighbours", batch.states(hopper_paged.SPLITS, wrong)[1], right, control=True)


def row_sums(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """l in fp32: the written sum over four warps, and the library's, which must be seen."""
    q, k, v = _qkv(config, inputs)
    written: Callable[..., Any] = triton_decode.attention_decode_kernel
    step = replaced(triton_forward.block_step, sum_block=library_sum)
    wrong = replaced(triton_decode.attention_decode_kernel, block_step=step)
    right = split_sums(written, q, k, v, 1)
    yield _case("l, fp32, four warps", split_sums(written, q, k, v, 4), right)
    yield _case("library's sum, 4 warps", split_sums(wrong, q, k, v, 4), right, control=True)


def contraction(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """The forward kernel with fused multiply-adds wherever the compiler likes must be seen in the LSE."""
    q, k, v = _qkv(config, inputs)
    lse = TritonAttention(ANCHOR).forward_packed(q, k, v, LAYOUT)[1]
    tile, out = TILES[q.shape[2]].forward, torch.empty_like(q)
    items = query_tiles(LAYOUT, whole_runs(LAYOUT), tile.queries, False, q.device)
    found = by_head(*q.shape[:2], q.device)
    forward_tiles(q, k, v, items, items, 0, out, found, tile, fused)
    yield _case("contraction on", found, lse, control=True)


def _qkv(config: ModelConfig, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    heads, width = 2 * (config.heads // config.kv_heads), config.head_dim
    q = inputs.normal(LAYOUT.tokens, heads, width, scale=2.0)
    return q, inputs.normal(LAYOUT.tokens, 2, width), inputs.normal(LAYOUT.tokens, 2, width)


def _others(width: int) -> TritonAttention:
    return TritonAttention({width: dataclasses.replace(TILES[width], **OTHER)} if width in TILES else TILES)


def _forward(
    name: str, tested: TritonAttention, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Iterator[Case]:
    found, found_lse = tested.forward_packed(q, k, v, LAYOUT)
    yield _case(f"forward, {name}", found, out)
    yield _case(f"LSE, fp32, {name}", found_lse, lse)


def _backward(name: str, tested: TritonAttention, config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    q, k, v = _qkv(config, inputs)
    dout, anchor = inputs.normal(*q.shape, scale=2.0), TritonAttention(ANCHOR)
    out, lse = anchor.forward_packed(q, k, v, LAYOUT)
    delta = anchor.delta(dout, out)
    yield _case(f"delta, {name}", tested.delta(dout, out), delta)
    expected, found = (_sums(provider, dout, q, k, v, lse, delta) for provider in (anchor, tested))
    gradients = tested.backward_packed(dout, q, k, v, out, lse, LAYOUT)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.autograd.set_multithreading_enabled(False):  # autograd's own thread would lack a device context
        exact = torch.autograd.grad(exact_attention(*leaves), leaves, dout.double())
    for what, a, b, c, rounded in zip(GRADIENTS, found, expected, exact, gradients, strict=True):
        yield _case(f"{what}, fp32, {name}", a, b)
        yield _case(f"{what}, {name}", rounded, b.bfloat16())
        yield close("attention", f"{what} of the anchor, fp64", b, c, 2e-2, 1e-2 * float(c.abs().max()))


def _sums(
    provider: TritonAttention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV before their last rounding."""
    return provider.gradients(dout, q, k, v, lse, delta, LAYOUT, whole_runs(LAYOUT), torch.float32)


def _loud(inputs: Inputs, like: Tensor) -> Tensor:
    """Order-revealing values along the tokens of ``like`` [T, heads, D]."""
    return inputs.order_revealing(like[0].numel(), len(like)).T.contiguous().unflatten(1, like.shape[1:])


def _paged(config: ModelConfig, inputs: Inputs, page: int, chunk: int) -> Case:
    q, k, v = _qkv(config, inputs)
    out = TritonAttention(ANCHOR).forward_packed(q, k, v, LAYOUT)[0]
    return _case(f"prefill and decode, pages of {page}", through_pages(TritonAttention(), q, k, v, page, chunk), out)


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fp64 [T, heads, D] of causal attention over the layout's samples; any dtype in."""
    group, outs = q.shape[1] // k.shape[1], []
    for length, first in zip(LAYOUT.lengths, LAYOUT.offsets.tolist(), strict=False):
        a, b, c = (x[first : first + length].double().transpose(0, 1) for x in (q, k, v))
        scores = a @ b.repeat_interleave(group, 0).transpose(1, 2) * q.shape[2] ** -0.5
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outs.append((weights @ c.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(outs)


@dataclasses.dataclass(frozen=True)
class LastTokens:
    """The last queries of several samples and the pages of all their keys; a slot that no key lies in holds NaN.

    ``rows`` are the queries' rows in the packed form.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    items: Tensor
    tables: Tensor
    queries: int
    splits: int
    rows: Tensor

    @property
    def keys_in_all(self) -> int:
        return int((self.items[:, 1] + self.items[:, 2]).sum())

    def decoded(self, form: hopper_paged.Form | None, settled: bool = False) -> tuple[Tensor, Tensor]:
        """(output, LSE) by one form, or by the one that is chosen; ``settled``: old keys may be fetched early."""
        lse = by_head(*self.q.shape[:2], self.q.device).fill_(torch.nan)
        return self.output(form, settled, lse), lse

    def output(self, form: hopper_paged.Form | None, settled: bool = False, lse: Tensor | None = None) -> Tensor:
        """The output alone, or with it the LSE into ``lse``."""
        out = torch.full_like(self.q, torch.nan)
        places = (self.q, self.keys, self.values, self.items, self.tables, self.queries, self.splits)
        if settled:
            torch.cuda.synchronize()
        decode_pages(*places, self.keys_in_all, out, lse, TILES[self.q.shape[2]], form, settled=settled)
        return out

    def states(self, form: hopper_paged.Form, kernel: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """o, l, mu in fp32 of every split that has a key; room for one more split, so that they are written."""
        places = (self.q, self.keys, self.values, self.items, self.tables, self.queries, self.splits + 1)
        results = (torch.empty_like(self.q), None, scales(self.q.shape[2])[0])
        found = hopper_paged.launch_states(*places, *results, form, kernel=kernel)
        assert found is not None
        exists = torch.zeros(found[1].shape, dtype=torch.bool, device=self.q.device)
        for first, position, count, _ in self.items.tolist():
            for query in range(count):
                exists[first + query, :, : (position + query) // Contract().kv_split + 1] = True
        return tuple(x[exists] for x in found)  # type: ignore[return-value]


def last_tokens(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, page: int, queries: int) -> LastTokens:
    """At most ``queries`` last tokens of every sample, its keys in pages in random order."""
    lengths, offsets, device = layout.lengths, layout.offsets.tolist(), q.device
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 2, device=device).to(torch.int32)
    shape = (sum(counts) + 2, k.shape[1], page, k.shape[2])
    keys, values = (torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device) for _ in range(2))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
    items: list[list[int]] = []
    rows: list[int] = []
    for i, (length, first) in enumerate(zip(lengths, offsets, strict=False)):
        tables[i, : counts[i]], order = order[: counts[i]], order[counts[i] :]
        place, part = torch.arange(length, device=device), slice(first, first + length)
        store(k[part], v[part], tables[i, place // page].long() * page + place % page, keys, values)
        count = min(queries, length)
        items.append([len(rows), length - count, count, i])
        rows += range(first + length - count, first + length)
    items[0], items[-1] = items[-1], items[0]  # an item's place is not its row of the tables
    at = torch.tensor(rows, device=device)
    splits = -(-max(lengths) // Contract().kv_split)
    places = (torch.tensor(items, dtype=torch.int32, device=device), tables, queries, splits)
    return LastTokens(q[at].contiguous(), keys, values, *places, at)


def through_pages(provider: TritonAttention, q: Tensor, k: Tensor, v: Tensor, page: int, chunk: int) -> Tensor:
    """Every sample of the layout through a cache whose fresh pages hold NaN, the last three tokens one by one."""
    pages = sum(-(-length // page) for length in LAYOUT.lengths)
    cache = TritonCache(1, k.shape[1], k.shape[2], pages, page, k.device)
    out = torch.full_like(q, torch.nan)
    for sample, length in enumerate(LAYOUT.lengths):
        handle, start, offset = cache.join(), 0, int(LAYOUT.offsets[sample])
        while start < length:
            count = min(chunk, length - start - 3) if length - start > 3 else 1
            part = slice(offset + start, offset + start + count)
            batch = cache.batch([handle], [start], [count])
            out[part] = provider.cached(q[part], k[part], v[part], cache, 0, batch)
            start += count
    return out


def replaced(kernel: Any, **functions: Any) -> Any:
    """A copy of a Triton function in which names of its module stand for other functions: what a control runs."""
    old = kernel.fn
    new = types.FunctionType(old.__code__, {**old.__globals__, **functions}, old.__name__, old.__defaults__)
    new.__kwdefaults__, new.__annotations__, new.__module__ = old.__kwdefaults__, old.__annotations__, old.__module__
    new.__qualname__ = f"{old.__qualname__}_{'_'.join(functions)}"
    return gluon.jit(new) if kernel.is_gluon() else triton.jit(new)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def library_sum(p):
    """The compiler's own order: it changes with the number of warps."""
    return tl.reduce(p, 1, add)


@gluon.jit
def neighbour_sums(p):
    """[B, R, 64] -> [B, R]: the plain pair tree, another order than the written one."""
    x = p.reshape((p.shape[0], p.shape[1], 2, 2, 2, 2, 2, 2))
    for axis in gl.static_range(6):
        x = gl.reduce(x, 7 - axis, hopper_decode.add)
    return x


def other_row_sums() -> Any:
    """The decode kernel with :func:`neighbour_sums`."""
    weights = replaced(hopper_decode.weights, block_sums=neighbour_sums)
    compute = replaced(hopper_decode.compute, weights=weights)
    return replaced(hopper_decode.attention_units_kernel, compute=compute)


def split_sums(kernel: Any, q: Tensor, k: Tensor, v: Tensor, warps: int) -> Tensor:
    """l fp32 of every split of 16 queries against one sample's keys, as the decode kernel leaves it for the merge."""
    tokens, kv_heads, width = k.shape
    pages, heads = tokens // 64, q.shape[1]
    keys, values = (x[: pages * 64].unflatten(0, (pages, 64)).transpose(1, 2).contiguous() for x in (k, v))
    last, splits = pages * 64 - 1, -(-pages // 16)
    rows = [[i, last - 7 * i, 1, 0] for i in range(16)]
    items = torch.tensor(rows, dtype=torch.int32, device=q.device)
    table = torch.arange(pages, dtype=torch.int32, device=q.device)[None]
    o = torch.zeros(16, heads, splits, width, device=q.device)
    l, mu = (torch.zeros(16, heads, splits, device=q.device) for _ in range(2))
    strides = (q.stride(0), q.stride(1), *(x.stride(i) for x in (keys, values) for i in (2, 1, 0)))
    launch(
        kernel,
        (kv_heads, splits, 16),
        *(q, keys, values, q, q, o, l, mu, items, table, scales(width)[0], *strides, 0, 0, 0, pages, heads, splits),
        warps=warps,
        GROUP=heads // kv_heads,
        D=width,
        DV=width,
        M=16,
        PAGE=64,
        DIRECT=False,
        WITH_LSE=False,
        STAGES=1,
    )
    return l


def fused(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, stages: int = 1, **meta: Any) -> None:
    kernel[grid](*args, num_warps=warps, num_stages=stages, enable_fp_fusion=True, **meta)


def _case(what: str, found: Tensor, expected: Tensor, control: bool = False) -> Case:
    return Case("attention", "triton", what, expected.numel(), differing(found, expected), control)
