"""Paged decode on a Hopper: which form of ``hopper_decode`` or ``hopper_pairs`` a call takes, and its launch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_engine.ops import cuda_source
from rl_engine.ops.attention import hopper_pairs
from rl_engine.ops.attention.hopper_decode import BLOCK, CHUNK, QUERY_ROWS, SPLIT_BLOCKS, attention_units_kernel
from rl_engine.ops.attention.hopper_forward import shared_rows


@dataclasses.dataclass(frozen=True)
class Form:
    """How a decode pass is cut; every choice gives the same bits.

    Attributes:
        whole: a program takes all splits of a sample and merges them itself, else one split.
        columns: columns of V of a program.
        ring: pairs of blocks that have room in shared memory.
        warps: that compute; 8 only with 128 columns.
        registers: most registers of a thread, so that two programs fit a multiprocessor; None: all that there are.
        late: the kernel behind may start when so many slots of the ring are left to be asked for (half as many if it
            merges splits), 0: at once. Keys that it fetches early then do not hold up this one's.
        pairs: two programs of a cluster share a split, by ``hopper_pairs``: ``late`` counts its smaller slots, half of
            them at most, the ring takes what room there is, and nothing else is chosen.
    """

    whole: bool
    columns: int
    ring: int
    warps: int = 4
    registers: int | None = None
    late: int = 0
    pairs: bool = False


SPLITS = Form(whole=False, columns=128, ring=2, registers=128)
WHOLE = Form(whole=True, columns=128, ring=2, registers=128)
SINGLES = Form(whole=False, columns=128, ring=5, warps=8, late=4)  # one program fills a multiprocessor, here and below
ALONE = Form(whole=True, columns=128, ring=4, warps=8)
HALVES = Form(whole=False, columns=64, ring=5, late=3)
WHOLE_HALVES = Form(whole=True, columns=64, ring=5)
PAIRS = Form(whole=False, columns=64, ring=0, late=16, pairs=True)
FORMS = {
    **{"splits": SPLITS, "singles": SINGLES, "halves": HALVES},
    **{"whole": WHOLE, "alone": ALONE, "whole halves": WHOLE_HALVES, "pairs": PAIRS},
}


def forms(width: int) -> dict[str, Form]:
    """Those that run here with this head_dim."""
    pairs = width == hopper_pairs.WIDTH and cuda_source.available()
    return {name: form for name, form in FORMS.items() if pairs or not form.pairs}


@functools.cache
def scores_layout(rows: int, warps: int) -> Any:
    """Layout of a split's scores [16, rows, 64]: two threads share the keys of a block (four, where that leaves warps
    without a place), so a row sum needs no other warp; rows, then blocks, fill what is left."""
    rest = [[0, row, 0] for row in (1, 2, 4) if row < rows] + [[block, 0, 0] for block in (1, 2, 4, 8)]
    over, keys = warps.bit_length() - 1, [[0, 0, key] for key in (4, 2, 1, 8, 16, 32)]
    spread = 1 if len(rest) >= 4 + over else 2
    lanes, rest = keys[:spread] + rest[: 5 - spread], rest[5 - spread :]
    return gl.DistributedLinearLayout(keys[spread:] + rest[over:], lanes, rest[:over], [], [16, rows, 64])


def fits(q: Tensor, k: Tensor, v: Tensor, queries: int) -> bool:
    """Whether this kernel takes the call: at most 8 query rows of a KV head, head_dim 64 or 128, pages of whole blocks
    of keys that lie one behind the other in less than 2^31 rows, and alignment as the copy engine and 16-byte loads
    need it. ``triton_decode`` takes all others."""
    return (
        queries * (q.shape[1] // k.shape[1]) <= QUERY_ROWS.value
        and q.shape[2] in (64, 128)
        and k.shape[2] % BLOCK.value == 0
        and k.shape[:3].numel() < 1 << 31
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (k, v))
        and q.data_ptr() % 16 == 0
        and all(step % 16 == 0 for step in q.stride()[:-1])
    )


def choose(samples: int, kv_heads: int, splits: int, keys: int, processors: int, pairs_fit: bool) -> Form:
    """The form that was the fastest on an H200 for samples of at most ``splits`` splits and ``keys`` keys together.

    If ``pairs_fit`` (:func:`forms`), two programs take a split as long as there is a multiprocessor for every split,
    and share it. Otherwise:

    Very few splits share the columns of V out, if the programs of two calls in a row then find a multiprocessor each;
    up to one split for every multiprocessor, each takes a whole one. Whole samples need no merge, but the longest must
    not be left alone: they are taken together only where there is a program for almost every multiprocessor and the
    mean length is 2/3 of the longest, or 9/10 where there is no other program to fill the gaps.
    """
    pairs, most = samples * kv_heads, samples * splits * SPLIT_BLOCKS.value * BLOCK.value
    if pairs_fit and pairs * splits <= processors:
        return PAIRS
    if 4 * pairs * splits <= processors:
        return HALVES
    if pairs * splits <= processors:
        return SINGLES
    if splits > 1 and 3 * keys >= 2 * most and 10 * pairs >= 9 * processors:
        return ALONE if pairs <= processors else WHOLE
    if 10 * keys >= 9 * most and 9 * processors <= 20 * pairs <= 10 * processors:
        return WHOLE_HALVES
    return SPLITS


def launch_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    items: Tensor,
    tables: Tensor,
    queries: int,
    splits: int,
    out: Tensor,
    lse: Tensor | None,
    c: float,
    form: Form,
    settled: bool = False,
    kernel: Any = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(o fp32 [Q, heads, splits, D], l, mu fp32 [Q, heads, splits]) of every split, to be merged; None where ``out``
    and ``lse`` are the result already: one split, or a form that merges them itself. ``settled`` as ``decode_pages``
    says; another ``kernel`` (or ``cuda_source.Source``) than the form's own is what a control gives."""
    heads, width, kv_heads, page = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    group, direct, columns = heads // kv_heads, form.whole or splits == 1, min(form.columns, width)
    if form.pairs:
        direct = direct and lse is None  # it stores no LSE: that of a single split comes from its state
    rows, block = 4 if queries * group <= 4 else QUERY_ROWS.value, BLOCK.value
    o, l, mu = out, out, out
    if not direct:
        state = (q.shape[0], heads, splits)
        o = torch.empty(*state, width, dtype=torch.float32, device=q.device)
        l, mu = (torch.empty(state, dtype=torch.float32, device=q.device) for _ in range(2))
    if form.pairs:
        states = None if direct else (o, l, mu)
        source = kernel or hopper_pairs.SOURCE
        hopper_pairs.launch(q, k, v, out, states, items, tables, splits, rows, c, settled, form.late, source)
        return states
    warps = form.warps if columns == 128 else 4
    chunk = [block, CHUNK.value]
    k_d, v_d = (
        TensorDescriptor(x, [k.shape[:3].numel(), width], [width, 1], chunk, shared_rows(chunk[1])) for x in (k, v)
    )
    (kernel or attention_units_kernel)[(kv_heads * (width // columns), 1 if form.whole else splits, items.shape[0])](
        *(k_d, v_d, q, out, out if lse is None else lse, o, l, mu, items, tables, c, q.stride(0), q.stride(1)),
        *(out.stride(0), out.stride(1), 0 if lse is None else lse.stride(1), tables.stride(0), heads, splits, kv_heads),
        CHUNKED=shared_rows(CHUNK.value),
        PAIR=shared_rows(width, 2 * block),
        ROWS=shared_rows(width),
        QUERIES=shared_rows(width, QUERY_ROWS.value),
        WEIGHTS=shared_rows(block, QUERY_ROWS.value),
        GROUP=group,
        D=width,
        DV=columns,
        R=rows,
        PAGE=page,
        ALL=form.whole,
        DIRECT=direct,
        WITH_LSE=lse is not None,
        RING=form.ring,
        WARPS=warps,
        SETTLED=settled,
        LATE=form.late if direct else (form.late + 1) // 2,
        SCORES=scores_layout(rows, warps),
        num_warps=warps,
        enable_fp_fusion=False,
        launch_pdl=True,
        **({"maxnreg": form.registers} if form.registers else {}),
    )
    return None if direct else (o, l, mu)


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
