"""Paged decode on a Hopper: which form of ``hopper_decode`` a call takes, and its launch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from rl_engine.ops.attention.hopper_decode import BLOCK, QUERY_ROWS, SPLIT_BLOCKS, attention_units_kernel


@dataclasses.dataclass(frozen=True)
class Form:
    """How a decode pass is cut; every choice gives the same bits.

    Attributes:
        whole: a program takes all splits of a sample and merges them itself, else one split.
        columns: columns of V of a program.
        step: blocks that are computed at a time, 1 or 2.
        ring: steps that have room in shared memory.
        warps: 4, or 8.
    """

    whole: bool
    columns: int
    step: int
    ring: int
    warps: int = 4


SPLITS = Form(whole=False, columns=128, step=1, ring=4)
WHOLE = Form(whole=True, columns=128, step=1, ring=4)
ALONE = Form(whole=True, columns=128, step=2, ring=4)  # one program fills a multiprocessor
HALVES = Form(whole=False, columns=64, step=2, ring=3)
FORMS = {"splits": SPLITS, "whole": WHOLE, "alone": ALONE, "halves": HALVES}


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
    """Whether these kernels take the call: at most 8 query rows of a KV head, head_dim 64 or 128, pages of whole
    blocks of keys, base and rows in steps of 16 and 32 bytes. ``triton_decode`` takes all others."""
    return (
        queries * (q.shape[1] // k.shape[1]) <= QUERY_ROWS.value
        and q.shape[2] in (64, 128)
        and k.shape[2] % BLOCK.value == 0
        and all(x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in x.stride()[:-1]) for x in (q, k, v))
    )


def choose(samples: int, kv_heads: int, splits: int, keys: int, processors: int) -> Form:
    """The form that was the fastest on an H200 for samples of at most ``splits`` splits and ``keys`` keys together.

    Few splits share the columns of V out. Whole samples need no merge, but the longest must not be left alone: they are
    taken together only where there is one for almost every multiprocessor and the mean length is 2/3 of the longest.
    """
    pairs = samples * kv_heads
    if 2 * pairs * splits <= processors:
        return HALVES
    even = 3 * keys >= 2 * samples * splits * SPLIT_BLOCKS.value * BLOCK.value
    if splits > 1 and even and 10 * pairs >= 9 * processors:
        return ALONE if pairs <= processors else WHOLE
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
    kernel: Any = attention_units_kernel,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(o fp32 [Q, heads, splits, D], l, mu fp32 [Q, heads, splits]) of every split, to be merged; None where ``out``
    and ``lse`` are the result already: one split, or a form that merges them itself. Another ``kernel`` is what a
    control gives."""
    heads, width, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    group, direct, columns = heads // kv_heads, form.whole or splits == 1, min(form.columns, width)
    rows = 4 if queries * group <= 4 else QUERY_ROWS.value
    o, l, mu = out, out, out
    if not direct:
        state = (q.shape[0], heads, splits)
        o = torch.empty(*state, width, dtype=torch.float32, device=q.device)
        l, mu = (torch.empty(state, dtype=torch.float32, device=q.device) for _ in range(2))
    kernel[(kv_heads * (width // columns), 1 if form.whole else splits, items.shape[0])](
        *(q, k, v, out, out if lse is None else lse, o, l, mu, items, tables, c),
        *(q.stride(0), q.stride(1), k.stride(2), k.stride(1), k.stride(0), v.stride(2), v.stride(1), v.stride(0)),
        *(out.stride(0), out.stride(1), 0 if lse is None else lse.stride(1), tables.stride(0), heads, splits),
        tables.shape[0],
        GROUP=group,
        D=width,
        DV=columns,
        R=rows,
        PAGE=k.shape[2],
        ALL=form.whole,
        DIRECT=direct,
        WITH_LSE=lse is not None,
        STEP=form.step,
        RING=form.ring,
        WARPS=form.warps,
        SCORES=scores_layout(rows, form.warps),
        num_warps=form.warps,
        enable_fp_fusion=False,
        launch_pdl=True,
    )
    return None if direct else (o, l, mu)


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
