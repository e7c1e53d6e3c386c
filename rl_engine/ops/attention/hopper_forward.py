"""Attention forward for Hopper: the same block step as ``triton_forward``, warp-specialized by hand in Gluon.

One warp brings blocks of K and V into shared memory with the bulk copy engine; two groups of four warps take 64 queries
each. A group issues the scores of the next block, then the product with V of this one, and computes the next block's p
while that product runs. There is one program a multiprocessor: it takes tile after tile, and the next tile's Q and K
come while the last one is divided and stored. Only what is in flight differs: every row sees the same operations in the
same order, so the bits are the anchor's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_engine.numerics.contract import Contract
from rl_engine.ops.device import multiprocessors

BLOCK = gl.constexpr(Contract().kv_block)
SPLIT_BLOCKS = gl.constexpr(Contract().kv_split // Contract().kv_block)
QUERIES = 128  # of one program
REGISTERS = 240  # of a thread that computes


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def sum_columns(p):
    """``triton_functions.sum_block``: column bits in the order 0, 3, 4, 5, 1, 2, two elements at a time."""
    x = p.reshape((p.shape[0], 2, 2, 2, 2, 2, 2))
    x = gl.reduce(x, 6, add)
    x = gl.reduce(x, 3, add)
    x = gl.reduce(x, 2, add)
    x = gl.reduce(x, 1, add)
    x = gl.reduce(x, 2, add)
    return gl.reduce(x, 1, add)


@gluon.jit
def softmax_step(s, m, l, mu, c, key, positions, masked, ROWS: gl.constexpr, COLS: gl.constexpr):
    """(m, l, mu, bf16 p, alpha) of one block's scores; a masked score is -inf."""
    if masked:
        exists = (key + gl.arange(0, BLOCK, layout=COLS))[None, :] <= positions[:, None]
        s = gl.where(exists, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1))
    mu_new = top * c
    p = gl.exp2(gl.fma(s, gl.zeros_like(s) + c, gl.zeros_like(s) - mu_new[:, None]))
    alpha = gl.exp2(mu - mu_new)
    if masked:  # a row that has no key yet: -inf against -inf
        p = gl.where((mu_new == float("-inf"))[:, None], 0.0, p)
        alpha = gl.where(mu == float("-inf"), 0.0, alpha)
    l = l * alpha + gl.convert_layout(sum_columns(p), ROWS)
    return top, l, mu_new, p.to(gl.bfloat16), alpha


@gluon.jit
def merge_split(l_all, mu_all, o_all, l, mu, o, O_ROWS: gl.constexpr):
    """A finished split into the sum so far; an empty state is the identity on either side."""
    top = gl.maximum(mu_all, mu)
    a, b = gl.exp2(mu_all - top), gl.exp2(mu - top)
    fresh, none = mu_all == float("-inf"), mu == float("-inf")
    l_sum = gl.where(none, l_all, gl.where(fresh, l, l_all * a + l * b))
    a, b = gl.convert_layout(a, O_ROWS)[:, None], gl.convert_layout(b, O_ROWS)[:, None]
    fresh = (gl.convert_layout(mu_all, O_ROWS) == float("-inf"))[:, None]
    none = (gl.convert_layout(mu, O_ROWS) == float("-inf"))[:, None]
    return l_sum, top, gl.where(none, o_all, gl.where(fresh, o, o_all * a + o * b))


@gluon.jit
def tile(turn):
    """The tile of this program's turn. They come longest first; every second row of them is dealt out backwards, or the
    first program would get the longer one every time."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def turns(total):
    """How many of ``total`` tiles this program takes."""
    full = total // gl.num_programs(0)
    return full + (tile(full) < total).to(gl.int32)


@gluon.jit
def compute(
    part: gl.constexpr, q_s, k_s, v_s, full_q, empty_q, full_k, empty_k, full_v, empty_v, out, lse, c,
    items, heads, total, out_token, out_head, lse_head,
    D: gl.constexpr, STAGES: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """64 of each tile's 128 queries, by four warps; the program's tiles one after the other."""
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_MMA)
    COLS: gl.constexpr = gl.SliceLayout(0, S_MMA)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_MMA)
    V_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    zero = gl.zeros((64, BLOCK), gl.float32, layout=S_MMA)
    step = 0
    for turn in range(0, turns(total)):
        work = tile(turn)
        head = work % heads
        item = items + (work // heads) * 4
        first, position, count = gl.load(item), gl.load(item + 1), gl.load(item + 2)
        last = position + count - 1
        every = last // BLOCK + 1
        mine = position + 64 * part
        blocks = gl.minimum((mine + 63) // BLOCK + 1, last // BLOCK + 1)
        whole = gl.minimum((mine + 1) // BLOCK, blocks)
        positions = mine + gl.arange(0, 64, layout=ROWS)
        m = gl.full((64,), float("-inf"), gl.float32, layout=ROWS)
        l = gl.zeros((64,), gl.float32, layout=ROWS)
        mu, l_all, mu_all, l_done, mu_done = m, l, m, l, m
        o = gl.zeros((64, D), gl.float32, layout=O_MMA)
        o_all = o
        q = q_s.index(part)
        mbarrier.wait(full_q.index(part), turn & 1)
        mbarrier.wait(full_k.index(step % STAGES), step // STAGES & 1)
        s = warpgroup_mma(q, k_s.index(step % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty_k.index(step % STAGES))
        if blocks == 1:
            mbarrier.arrive(empty_q.index(part))
        m, l, mu, p, alpha = softmax_step(s, m, l, mu, c, 0, positions, whole == 0, ROWS, COLS)
        for block in range(0, blocks - 1):
            if block % SPLIT_BLOCKS == 0 and block > 0:
                l_all, mu_all, o_all = merge_split(l_all, mu_all, o_all, l_done, mu_done, o, O_ROWS)
                o = gl.zeros((64, D), gl.float32, layout=O_MMA)
            at_v, at_k = step + block, step + block + 1
            slot, ahead = at_v % STAGES, at_k % STAGES
            mbarrier.wait(full_k.index(ahead), at_k // STAGES & 1)
            s = warpgroup_mma(q, k_s.index(ahead).permute((1, 0)), zero, use_acc=False, is_async=True)
            o = o * gl.convert_layout(alpha, O_ROWS)[:, None]
            p_op = gl.convert_layout(p, gl.DotOperandLayout(0, O_MMA, 2))
            mbarrier.wait(full_v.index(slot), at_v // STAGES & 1)
            o = warpgroup_mma(p_op, v_s.index(slot), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(empty_k.index(ahead))
            if block == blocks - 2:
                mbarrier.arrive(empty_q.index(part))
            if (block + 1) % SPLIT_BLOCKS == 0:
                l_done, mu_done = l, mu
                m = gl.full((64,), float("-inf"), gl.float32, layout=ROWS)
                l, mu = gl.zeros((64,), gl.float32, layout=ROWS), m
            key = (block + 1) * BLOCK
            m, l, mu, p, alpha = softmax_step(s, m, l, mu, c, key, positions, block + 1 >= whole, ROWS, COLS)
            o, p_op = warpgroup_mma_wait(0, deps=[o, p_op])
            mbarrier.arrive(empty_v.index(slot))
        block = blocks - 1
        if block % SPLIT_BLOCKS == 0 and block > 0:
            l_all, mu_all, o_all = merge_split(l_all, mu_all, o_all, l_done, mu_done, o, O_ROWS)
            o = gl.zeros((64, D), gl.float32, layout=O_MMA)
        at_v = step + block
        mbarrier.wait(full_v.index(at_v % STAGES), at_v // STAGES & 1)
        v = v_s.index(at_v % STAGES)
        if block * BLOCK + 63 > last:  # values behind the sample's end are another's; both groups write the same zeros
            held = v.load(V_ROWS)
            n = block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, V_ROWS))
            v.store(gl.where((n <= last)[:, None], held, gl.zeros_like(held)))
            fence_async_shared()
        o = o * gl.convert_layout(alpha, O_ROWS)[:, None]
        p_op = gl.convert_layout(p, gl.DotOperandLayout(0, O_MMA, 2))
        o = warpgroup_mma(p_op, v, o, is_async=True)
        o, p_op = warpgroup_mma_wait(0, deps=[o, p_op])
        mbarrier.arrive(empty_v.index(at_v % STAGES))
        for late in range(step + blocks, step + every):  # the other group's blocks
            mbarrier.wait(full_k.index(late % STAGES), late // STAGES & 1)
            mbarrier.arrive(empty_k.index(late % STAGES))
            mbarrier.wait(full_v.index(late % STAGES), late // STAGES & 1)
            mbarrier.arrive(empty_v.index(late % STAGES))
        l_all, mu_all, o_all = merge_split(l_all, mu_all, o_all, l, mu, o, O_ROWS)
        n = 64 * part + gl.arange(0, 64, layout=O_ROWS)
        cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_MMA))
        sums = gl.convert_layout(l_all, O_ROWS)[:, None] + gl.zeros_like(o_all)
        at = (first + n).to(gl.int64)[:, None] * out_token + head * out_head + cols[None, :]
        gl.store(out + at, gl.div_rn(o_all, sums).to(gl.bfloat16), mask=(n < count)[:, None])
        if WITH_LSE:
            n = 64 * part + gl.arange(0, 64, layout=ROWS)
            gl.store(lse + head.to(gl.int64) * lse_head + first + n, mu_all + gl.log2(l_all), mask=n < count)
        step += every


@gluon.jit
def compute_first(
    q_s, k_s, v_s, full_q, empty_q, full_k, empty_k, full_v, empty_v, out, lse, c,
    items, heads, total, out_token, out_head, lse_head,
    D: gl.constexpr, STAGES: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    compute(0, q_s, k_s, v_s, full_q, empty_q, full_k, empty_k, full_v, empty_v, out, lse, c,
            items, heads, total, out_token, out_head, lse_head, D, STAGES, WITH_LSE)  # fmt: skip


@gluon.jit
def compute_second(
    q_s, k_s, v_s, full_q, empty_q, full_k, empty_k, full_v, empty_v, out, lse, c,
    items, heads, total, out_token, out_head, lse_head,
    D: gl.constexpr, STAGES: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    compute(1, q_s, k_s, v_s, full_q, empty_q, full_k, empty_k, full_v, empty_v, out, lse, c,
            items, heads, total, out_token, out_head, lse_head, D, STAGES, WITH_LSE)  # fmt: skip


@gluon.jit
def bring(
    q_d, k_d, v_d, q_s, k_s, v_s, full_q, empty_q, full_k, empty_k, full_v, empty_v, items, heads, total,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies Q, then K and V block by block, of tile after tile, into slots that both groups have given back."""
    step = 0
    for turn in range(0, turns(total)):
        work = tile(turn)
        head = work % heads
        item = items + (work // heads) * 4
        first, position, count, start = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
        q_column, k_column = head * D, head // GROUP * D
        for part in gl.static_range(2):
            mbarrier.wait(empty_q.index(part), (turn & 1) ^ 1)
            mbarrier.expect(full_q.index(part), q_d.block_type.nbytes)
            tma.async_copy_global_to_shared(q_d, [first + 64 * part, q_column], full_q.index(part), q_s.index(part))
        for block in range(0, (position + count - 1) // BLOCK + 1):
            slot, phase = step % STAGES, (step // STAGES & 1) ^ 1
            mbarrier.wait(empty_k.index(slot), phase)
            mbarrier.expect(full_k.index(slot), k_d.block_type.nbytes)
            tma.async_copy_global_to_shared(k_d, [start + block * BLOCK, k_column], full_k.index(slot), k_s.index(slot))
            mbarrier.wait(empty_v.index(slot), phase)
            mbarrier.expect(full_v.index(slot), v_d.block_type.nbytes)
            tma.async_copy_global_to_shared(v_d, [start + block * BLOCK, k_column], full_v.index(slot), v_s.index(slot))
            step += 1


@gluon.jit
def attention_hopper_kernel(
    q_d, k_d, v_d, out, lse, items, c, out_token, out_head, lse_head, heads, total,
    ROWS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WITH_LSE: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """``total`` pieces of work, from the program's number on in steps of the grid: 128 queries of one head each.

    items int32 [tiles, 4]: first row of q, its position, count, the sample's first row. ROWS: layout of 64 rows in
    shared memory."""
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], ROWS)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], ROWS)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], ROWS)
    full_q = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_q = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full_q.index(i), count=1)
        mbarrier.init(empty_q.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
        mbarrier.init(empty_k.index(i), count=2)
        mbarrier.init(empty_v.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_first, (q_s, k_s, v_s, full_q, empty_q, full_k, empty_k, full_v, empty_v, out, lse, c, items,
                             heads, total, out_token, out_head, lse_head, D, STAGES, WITH_LSE)),
            (compute_second, (q_s, k_s, v_s, full_q, empty_q, full_k, empty_k, full_v, empty_v, out, lse, c, items,
                              heads, total, out_token, out_head, lse_head, D, STAGES, WITH_LSE)),
            (bring, (q_d, k_d, v_d, q_s, k_s, v_s, full_q, empty_q, full_k, empty_k, full_v, empty_v, items, heads,
                     total, GROUP, D, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def fits(*tensors: Tensor) -> bool:
    """Whether the bulk copy engine can address x [T, heads, D]: heads side by side, rows and base in steps of 16
    bytes."""
    return all(
        x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == x.shape[2] and x.shape[0] > 0
        for x in tensors
    )


@functools.cache
def shared_rows(width: int, rows: int = 64) -> Any:
    """Layout of rows of ``width`` bf16 values in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, width], gl.bfloat16)


def descriptor(x: Tensor, layout: Any, rows: int = 64) -> Any:
    """x bf16 [T, heads, D] as a matrix of T rows for the bulk copy engine, ``rows`` of one head at a time."""
    tokens, heads, width = x.shape
    return TensorDescriptor(x, [tokens, heads * width], [x.stride(0), 1], [rows, width], layout)


def forward(
    q: Tensor, k: Tensor, v: Tensor, items: Tensor, out: Tensor, lse: Tensor | None, c: float, stages: int
) -> None:
    """Attention of query tiles over joined keys, bf16 [T, heads, D] with D 64 or 128."""
    heads, width = q.shape[1], q.shape[2]
    if not items.shape[0]:
        return
    layout = shared_rows(width)
    total = heads * items.shape[0]
    attention_hopper_kernel[(min(total, multiprocessors(q.device.index)),)](
        *(*(descriptor(x, layout) for x in (q, k, v)), out, out if lse is None else lse, items, c),
        *(out.stride(0), out.stride(1), 0 if lse is None else lse.stride(1), heads, total),
        ROWS=layout,
        GROUP=heads // k.shape[1],
        D=width,
        STAGES=stages,
        WITH_LSE=lse is not None,
        REGISTERS=REGISTERS,
        num_warps=4,
        enable_fp_fusion=False,
    )


def available(device: torch.device) -> bool:
    """Whether the device is a Hopper."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9
