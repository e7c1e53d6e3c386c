"""Attention on a GPU, in Triton: launches, tiles and the cache of the built-in engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_engine.numerics.contract import Contract
from rl_engine.ops.attention import AttentionProvider, hopper_backward, hopper_forward, hopper_paged, run_rows
from rl_engine.ops.attention.paged import PagedBatch, PagedCache
from rl_engine.ops.attention.static import DecodeBatch
from rl_engine.ops.attention.triton_backward import attention_delta_kernel, attention_dkv_kernel, attention_dq_kernel
from rl_engine.ops.attention.triton_decode import attention_decode_kernel, attention_merge_kernel, kv_store_kernel
from rl_engine.ops.attention.triton_forward import attention_fwd_kernel
from rl_engine.ops.layout import PackedLayout, Runs
from rl_engine.ops.triton_functions import launch

BLOCK, SPLIT = Contract().kv_block, Contract().kv_split
LOG2_E = 1.44269504088896341
DECODE_ROWS = 16  # query rows of one KV head that the decode kernel takes


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a kernel is cut; every choice gives the same bits.

    Attributes:
        queries: query rows of a program, or of a step of the dK and dV kernel.
        keys: keys of a step, or of a program of the dK and dV kernel.
        registers: most registers of a thread in decode, so that more programs run at once; 0 lets the compiler choose.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of every kernel: packed forward, prefill and decode over pages, dQ, and dK with dV.

    ``decode`` is for pages that hold whole blocks of keys, ``scattered`` for smaller ones.

    ``hopper`` is the number of K and V blocks in flight of the warp-specialized packed forward; 0 leaves that and
    ``hopper_paged`` out. ``hopper_dkv`` likewise of Q and dO blocks of the warp-specialized dK and dV; ``hopper_dq`` is
    the tile of the warp-specialized dQ, None where it is not used.
    """

    forward: Tile
    prefill: Tile
    decode: Tile
    scattered: Tile
    dq: Tile
    dkv: Tile
    hopper: int = 0
    hopper_dq: Tile | None = None
    hopper_dkv: int = 0


_D64 = Tiles(
    forward=Tile(128, 64, 4, 3),
    prefill=Tile(128, 64, 4, 5),
    decode=Tile(16, 64, 4, 7),
    scattered=Tile(16, 64, 4, 7),
    dq=Tile(128, 64, 4, 2),
    dkv=Tile(64, 128, 8, 2),
    hopper=4,
)
_D128 = Tiles(
    forward=Tile(128, 64, 8, 3),
    prefill=Tile(128, 64, 8, 3),
    decode=Tile(16, 64, 4, 5),
    scattered=Tile(16, 64, 4, 3, 128),
    dq=Tile(128, 64, 8, 3),
    dkv=Tile(32, 64, 4, 4),
    hopper=3,
    hopper_dq=Tile(128, 64, 8, 3),
    hopper_dkv=2,
)
TILES = {32: dataclasses.replace(_D64, hopper=0), 64: _D64, 128: _D128}
_ONE, _TWO = Tile(16, 64, 1, 1), Tile(16, 16, 1, 1)
ANCHOR = dict.fromkeys(TILES, Tiles(_ONE, _ONE, _ONE, _ONE, _TWO, _TWO))


@functools.cache
def scales(width: int) -> tuple[float, float]:
    """(fp32(D^-1/2 log2 e), fp32(D^-1/2)), each from fp64."""
    values = torch.tensor([width**-0.5 * LOG2_E, width**-0.5], dtype=torch.float64).float().tolist()
    return values[0], values[1]


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return hopper_forward.available(device)


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        if x.shape[2] not in TILES:
            known = ", ".join(str(width) for width in TILES)
            raise ValueError(f"the triton attention provider knows head_dim {known}, not {x.shape[2]}")
        assert x.dtype == torch.bfloat16 and x.stride(2) == 1, (x.dtype, x.stride())


def _items(rows: Iterable[tuple[int, int, int, int]], device: torch.device) -> Tensor:
    return torch.tensor(list(rows), dtype=torch.int32).view(-1, 4).to(device)


def _pieces(first: int, count: int, size: int) -> list[tuple[int, int]]:
    """(position, count) of the tiles of ``size`` that cover ``count`` positions from ``first``."""
    return [(start, min(size, first + count - start)) for start in range(first, first + count, size)]


@functools.lru_cache(maxsize=32)
def query_tiles(layout: PackedLayout, runs: Runs, size: int, whole: bool, device: torch.device) -> Tensor:
    """int32 [tiles, 4]: row, position, count, the sample's first row. Rows count over the runs, or (``whole``) over
    all tokens. Longest first."""
    offsets, done, tiles = layout.offsets.tolist(), 0, []
    for sample, first, count in runs:
        row = offsets[sample] if whole else done - first
        tiles += [(row + at, at, n, offsets[sample]) for at, n in _pieces(first, count, size)]
        done += count
    return _items(sorted(tiles, key=lambda tile: -tile[1]), device)


@functools.lru_cache(maxsize=32)
def _key_tiles(layout: PackedLayout, runs: Runs, size: int, device: torch.device) -> Tensor:
    """int32 [tiles, 4]: position, count, the sample's first row and length. Most queries first."""
    offsets, tiles = layout.offsets.tolist(), []
    for sample, first, count in runs:
        length = layout.lengths[sample]
        tiles += [(at, n, offsets[sample], length) for at, n in _pieces(first, count, size)]
    return _items(sorted(tiles, key=lambda tile: tile[0] - tile[3]), device)


def by_head(rows: int, heads: int, device: torch.device) -> Tensor:
    """fp32 [rows, heads], stored head by head."""
    return torch.empty(heads, rows, dtype=torch.float32, device=device).t()


def _head_stride(x: Tensor) -> tuple[Tensor, int]:
    """A per-row, per-head tensor with neighbouring rows, and its head stride."""
    if x.shape[0] > 1 and x.stride(0) != 1:
        x = x.t().contiguous().t()
    return x, x.stride(1)


def forward_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    items: Tensor,
    tables: Tensor,
    page: int,
    out: Tensor,
    lse: Tensor | None,
    tile: Tile,
    run: Callable[..., None] = launch,
) -> None:
    """Attention of query tiles over joined keys (page 0, k and v [T, kv_heads, D]) or over pages (k and v [pages,
    kv_heads, page, D]). ``run`` starts the kernel; only a control gives another."""
    _check(q, k[0] if page else k, v[0] if page else v)
    heads, width, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    k_strides = (k.stride(2), k.stride(1), k.stride(0)) if page else (k.stride(0), k.stride(1), 0)
    v_strides = (v.stride(2), v.stride(1), v.stride(0)) if page else (v.stride(0), v.stride(1), 0)
    run(
        attention_fwd_kernel,
        (heads * items.shape[0],),
        *(q, k, v, out, out if lse is None else lse, items, tables, scales(width)[0]),
        *(q.stride(0), q.stride(1), *k_strides, *v_strides, out.stride(0), out.stride(1)),
        *(0 if lse is None else lse.stride(1), tables.stride(0), heads),
        warps=tile.warps,
        stages=tile.stages,
        GROUP=heads // kv_heads,
        D=width,
        M=tile.queries,
        PAGE=page,
        WITH_LSE=lse is not None,
        STAGES=tile.stages,
    )


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    items: Tensor,
    tables: Tensor,
    queries: int,
    splits: int,
    out: Tensor,
    lse: Tensor | None,
    tile: Tile,
) -> None:
    """Attention of samples with at most ``queries`` new tokens each over pages (k and v [pages, kv_heads, page, D]).

    items int32 [S, 4] on the device: first row of q, its position, count, row of ``tables``; they may change between
    replays of a graph. No sample may be longer than ``splits`` KV splits.
    """
    _check(q, k[0], v[0])
    heads, width, kv_heads, samples = q.shape[1], q.shape[2], k.shape[1], items.shape[0]
    assert queries * (heads // kv_heads) <= tile.queries, "too many queries for the decode kernel"
    direct, state = splits == 1, (q.shape[0], heads, splits)
    o, l, mu = out, out, out
    lse_head = 0 if lse is None else lse.stride(1)
    if not direct:
        o = torch.empty(*state, width, dtype=torch.float32, device=q.device)
        l, mu = (torch.empty(state, dtype=torch.float32, device=q.device) for _ in range(2))
    launch(
        attention_decode_kernel,
        (kv_heads, splits, samples),
        *(q, k, v, out, out if lse is None else lse, o, l, mu, items, tables, scales(width)[0]),
        *(q.stride(0), q.stride(1), k.stride(2), k.stride(1), k.stride(0), v.stride(2), v.stride(1), v.stride(0)),
        *(out.stride(0), out.stride(1), lse_head, tables.stride(0), heads, splits),
        warps=tile.warps,
        stages=tile.stages,
        GROUP=heads // kv_heads,
        D=width,
        DV=width,
        M=tile.queries,
        PAGE=k.shape[2],
        DIRECT=direct,
        WITH_LSE=lse is not None,
        STAGES=tile.stages,
        **({"maxnreg": tile.registers} if tile.registers else {}),
    )
    if not direct:
        merge((o, l, mu), items, queries, out, lse, False)


def merge(
    states: tuple[Tensor, Tensor, Tensor], items: Tensor, queries: int, out: Tensor, lse: Tensor | None, early: bool
) -> None:
    heads, splits, width = states[0].shape[1:]
    launch(
        attention_merge_kernel,
        (heads, queries, items.shape[0]),
        *(*states, out, out if lse is None else lse, items, out.stride(0), out.stride(1)),
        *(0 if lse is None else lse.stride(1), heads, splits),
        warps=1,
        D=width,
        WITH_LSE=lse is not None,
        STAGES=4,
        EARLY=early,
        **({"launch_pdl": True} if early else {}),
    )


def decode_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    items: Tensor,
    tables: Tensor,
    queries: int,
    splits: int,
    keys: int,
    out: Tensor,
    lse: Tensor | None,
    tiles: Tiles,
    form: hopper_paged.Form | None = None,
    *,
    settled: bool = False,
) -> None:
    """As :func:`decode`, by the fastest kernels that take the call: ``hopper_paged``'s where they fit (``form`` instead
    of the one it chooses), otherwise the tiles for these pages. ``keys`` of all samples together: only speed depends on
    it, so a graph may be replayed with others.

    ``settled`` says that the kernel ahead of this one in the stream writes neither ``items`` nor ``tables`` nor a key
    or value before the first new one of its sample, and that what did was over when that kernel began. Then old
    keys are fetched while it still runs."""
    if tiles.hopper and _is_hopper(q.device) and hopper_paged.fits(q, k, v, queries):
        _check(q, k[0], v[0])
        processors = hopper_paged.processors(q.device)
        sizes = (items.shape[0], k.shape[1], splits, keys, processors)
        form = form or hopper_paged.choose(*sizes, "pairs" in hopper_paged.forms(q.shape[2]))
        c = scales(q.shape[2])[0]
        states = hopper_paged.launch_states(q, k, v, items, tables, queries, splits, out, lse, c, form, settled)
        if states is not None:
            merge(states, items, queries, out, lse, True)
        return
    cut = tiles.decode if k.shape[2] % BLOCK == 0 else tiles.scattered
    decode(q, k, v, items, tables, queries, splits, out, lse, cut)


def store(k: Tensor, v: Tensor, slots: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Copies k, v [T, kv_heads, D] into the slots (int64 [T]) of pages [pages, kv_heads, page, D]; a token of a
    negative slot nowhere."""
    _check(k, v)
    tokens, kv_heads, width = k.shape
    launch(
        kv_store_kernel,
        (-(-tokens // 16), kv_heads),
        *(k, v, slots, k_pages, v_pages, tokens, k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(k_pages.stride(0), k_pages.stride(1), k_pages.stride(2)),
        *(v_pages.stride(0), v_pages.stride(1), v_pages.stride(2), k_pages.shape[2]),
        warps=4,
        R=16,
        D=width,
        EARLY=_is_hopper(k.device),
    )


class TritonCache(PagedCache):
    """Keys and values [pages, kv_heads, page, D] per layer, bf16, on the GPU. Fresh pages hold NaN."""

    def __init__(self, layers: int, kv_heads: int, width: int, pages: int, page: int, device: torch.device) -> None:
        super().__init__(0, kv_heads, width, pages, page)
        shape = (pages, kv_heads, page, width)
        self.k, self.v = ([_nan(shape, device) for _ in range(layers)] for _ in range(2))

    def grow(self, pages: int) -> None:
        for tensors in (self.k, self.v):
            for layer, old in enumerate(tensors):
                tensors[layer] = torch.cat([old, _nan((pages - self.pages, *old.shape[1:]), old.device)])
        self._free.extend(range(self.pages, pages))
        self.pages = pages


def _nan(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One pass over a cache: what the two kernels take, on the device."""

    slots: Tensor
    tables: Tensor
    tiles: Tensor
    few: Tensor
    rows: int
    queries: int
    splits: int
    keys: int


def _output(q: Tensor, padded: bool) -> Tensor:
    """The result's memory; it is +0 where rows belong to no sample. Made before the keys are stored: the kernel right
    ahead of decode must be the one that stores them."""
    make = torch.zeros if padded else torch.empty
    return make(q.shape, dtype=torch.bfloat16, device=q.device)


def _plan(batch: PagedBatch, group: int, size: int, device: torch.device) -> _Plan:
    """Samples with few new tokens go to the decode kernel, all others are cut into tiles; made once a batch."""
    plans: dict[tuple[int, int, torch.device], _Plan] = batch.__dict__.setdefault("_triton", {})
    key = (group, size, device)
    if key not in plans:
        rows, starts, counts = batch.q_offsets.tolist(), batch.q_position.tolist(), batch.counts()
        tiles, few, queries, longest, keys = [], [], 0, 0, 0
        for s, (row, start, count) in enumerate(zip(rows, starts, counts, strict=False)):
            if not count:
                continue
            if count * group <= DECODE_ROWS:
                few.append((row, start, count, s))
                queries, longest, keys = max(queries, count), max(longest, start + count), keys + start + count
            else:
                tiles += [(row + at - start, at, n, s) for at, n in _pieces(start, count, size)]
        tiles.sort(key=lambda tile: -tile[1])
        plans[key] = _Plan(
            *(batch.slots.to(device), batch.table.to(device), _items(tiles, device), _items(few, device)),
            *(sum(counts), queries, -(-longest // SPLIT), keys),
        )
    return plans[key]


class TritonAttention(AttentionProvider):
    """``tiles`` by head_dim; ``ANCHOR``'s are those whose bits all others must have: one warp, one step in flight."""

    def __init__(self, tiles: Mapping[int, Tiles] = TILES) -> None:
        self.tiles = tiles

    def forward_runs(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, runs: Runs) -> tuple[Tensor, Tensor]:
        _check(q, k, v)
        tiles = self.tiles[q.shape[2]]
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
        lse = by_head(q.shape[0], q.shape[1], q.device)
        if tiles.hopper and _is_hopper(q.device) and hopper_forward.fits(q, k, v):
            items = query_tiles(layout, runs, hopper_forward.QUERIES, False, q.device)
            hopper_forward.forward(q, k, v, items, out, lse, scales(q.shape[2])[0], tiles.hopper)
            return out, lse
        items = query_tiles(layout, runs, tiles.forward.queries, False, q.device)
        forward_tiles(q, k, v, items, items, 0, out, lse, tiles.forward)
        return out, lse

    def new_cache(
        self, layers: int, kv_heads: int, width: int, pages: int, page: int, device: torch.device
    ) -> PagedCache:
        return TritonCache(layers, kv_heads, width, pages, page, device)

    def over_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: PagedBatch,
        *,
        settled: bool = False,
    ) -> Tensor:
        _check(q, k, v)
        if isinstance(batch, DecodeBatch):
            return self._over_static_pages(q, k, v, k_pages, v_pages, batch, settled)
        tile = self.tiles[q.shape[2]].prefill
        plan = _plan(batch, q.shape[1] // k.shape[1], tile.queries, q.device)
        out = _output(q, plan.rows < q.shape[0])
        store(k, v, plan.slots, k_pages, v_pages)
        if plan.tiles.shape[0]:
            forward_tiles(q, k_pages, v_pages, plan.tiles, plan.tables, k_pages.shape[2], out, None, tile)
        if plan.few.shape[0]:
            tiles = self.tiles[q.shape[2]]
            counts = (plan.queries, plan.splits, plan.keys)
            decode_pages(q, k_pages, v_pages, plan.few, plan.tables, *counts, out, None, tiles, settled=settled)
        return out

    def _over_static_pages(
        self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: DecodeBatch, settled: bool
    ) -> Tensor:
        """One new token of every sample; nothing is read from the batch on the host."""
        out = _output(q, batch.padded)
        store(k, v, batch.slots, k_pages, v_pages)
        counts, tiles = (1, batch.splits, batch.keys), self.tiles[q.shape[2]]
        decode_pages(q, k_pages, v_pages, batch.items, batch.table, *counts, out, None, tiles, settled=settled)
        return out

    def paired_pages(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        assert pages.shape[0] % 2 == 0 and pages.is_contiguous(), (pages.shape, pages.stride())
        return pages[:-1], pages[1:]

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        _check(dout, out)
        rows, heads, width = out.shape
        delta = by_head(rows, heads, out.device)
        launch(
            attention_delta_kernel,
            (-(-rows // 32), heads),
            *(dout, out, delta, rows, dout.stride(0), dout.stride(1), out.stride(0), out.stride(1), delta.stride(1)),
            warps=4,
            R=32,
            D=width,
        )
        return delta

    def backward_runs(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        layout: PackedLayout,
        runs: Runs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.gradients(dout, q, k, v, lse, delta, layout, runs, torch.bfloat16)

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        layout: PackedLayout,
        runs: Runs,
        kind: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``backward_runs`` with results in bf16, or in fp32 as they are before the last rounding, for proofs."""
        _check(dout, q, k, v)
        width = q.shape[2]
        dq, dk, dv = (torch.empty(x.shape, dtype=kind, device=x.device) for x in (q, k, v))
        (lse, lse_head), (delta, delta_head) = _head_stride(lse), _head_stride(delta)
        tiles, numbers = self.tiles[width], scales(width)

        def launch_tiles(kernel: Any, outs: tuple[Tensor, ...], items: Tensor, tile: Tile) -> None:
            heads = outs[0].shape[1]
            strides = (n for x in (q, k, v, dout, *outs) for n in x.stride()[:2])
            launch(
                kernel,
                (heads * items.shape[0],),
                *(q, k, v, dout, lse, delta, *outs, items, *numbers, *strides, lse_head, delta_head, heads),
                warps=tile.warps,
                stages=tile.stages,
                GROUP=q.shape[1] // k.shape[1],
                D=width,
                M=tile.queries,
                N=tile.keys,
                STAGES=tile.stages,
            )

        bulk = _is_hopper(q.device) and hopper_forward.fits(q, k, v, dout)
        if bulk and tiles.hopper_dq:
            tile = tiles.hopper_dq
            items = query_tiles(layout, runs, hopper_backward.QUERIES, True, q.device)
            hopper_backward.gradients_of_queries(q, k, v, dout, lse, delta, dq, items, numbers, tile.keys, tile.stages)
        else:
            items = query_tiles(layout, runs, tiles.dq.queries, True, q.device)
            launch_tiles(attention_dq_kernel, (dq,), items, tiles.dq)
        if bulk and tiles.hopper_dkv:
            items = _key_tiles(layout, runs, hopper_backward.KEYS, q.device)
            hopper_backward.gradients_of_keys(q, k, v, dout, lse, delta, dk, dv, items, numbers, tiles.hopper_dkv)
        else:
            items = _key_tiles(layout, runs, tiles.dkv.keys, q.device)
            launch_tiles(attention_dkv_kernel, (dk, dv), items, tiles.dkv)
        if sum(count for _, _, count in runs) == q.shape[0]:
            return dq, dk, dv
        rows = run_rows(layout, runs).to(q.device)
        return dq[rows], dk[rows], dv[rows]
