"""Attention forward in Triton: packed samples, chunked prefill and paged decode with one block step.

Why the bits agree. Every row goes through the same sequence of 64-key blocks and 1,024-key splits, whatever tile, warps
or launch it lies in: the score is a chain over head_dim, the row sum is the written tree, the output accumulator is
carried by the matrix unit over the block's keys ascending. A key that does not exist is loaded as +0 and gets p = +0.
Decode computes splits in parallel and merges their states ascending in a second kernel; prefill merges as it goes.

Letters: T tokens, M rows of a tile, D head_dim, S samples.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_engine.numerics.contract import Contract
from rl_engine.ops.triton_functions import exp2, log2, sum_block

BLOCK = tl.constexpr(Contract().kv_block)
SPLIT_BLOCKS = tl.constexpr(Contract().kv_split // Contract().kv_block)


@triton.jit
def load_keys(base, key, last, start, table, slot_stride, page_stride, column, D: tl.constexpr,
              PAGE: tl.constexpr, ALL: tl.constexpr):  # fmt: skip
    """bf16 [64, D] of the keys ``key`` + 0 ... 63 of one head, from ``column`` on; +0 behind ``last`` unless ALL exist.

    PAGE 0: rows from ``start`` of a joined tensor. Otherwise ``table`` points at the sample's page numbers.
    """
    n = tl.arange(0, BLOCK)
    columns = tl.arange(0, D)[None, :] + column
    if PAGE == 0:
        at = base + (start + key).to(tl.int64) * slot_stride + (n[:, None] * slot_stride + columns)
    elif PAGE % BLOCK == 0:
        page = tl.load(table + key // PAGE).to(tl.int64)
        at = base + page * page_stride + key % PAGE * slot_stride + (n[:, None] * slot_stride + columns)
    else:
        page = tl.load(table + (key + n) // PAGE, mask=key + n <= last, other=0).to(tl.int64)
        at = base + (page * page_stride + (key + n) % PAGE * slot_stride)[:, None] + columns
    if ALL:
        return tl.load(at)
    return tl.load(at, mask=(key + n <= last)[:, None], other=0.0)


@triton.jit
def block_step(q, k, v, key, positions, m, l, mu, o, c, MASK: tl.constexpr):
    """One block of 64 keys into the state (m, l, mu, o) of the rows."""
    d = tl.dot(q, tl.trans(k))
    if MASK:
        exists = (key + tl.arange(0, BLOCK))[None, :] <= positions[:, None]
        top = tl.maximum(m, tl.max(tl.where(exists, d, float("-inf")), 1))
    else:
        top = tl.maximum(m, tl.max(d, 1))
    mu_new = top * c
    p = exp2(tl.fma(d, c, -mu_new[:, None]))
    alpha = exp2(mu - mu_new)
    if MASK:
        p = tl.where(exists, p, 0.0)
        alpha = tl.where(m == float("-inf"), 0.0, alpha)
    l = l * alpha + sum_block(p)
    o = tl.dot(p.to(tl.bfloat16), v, o * alpha[:, None])
    return top, l, mu_new, o


@triton.jit
def merge_states(l_all, mu_all, o_all, l, mu, o):
    """A finished split into the sum so far; an empty state is the identity on either side."""
    top = tl.maximum(mu_all, mu)
    a, b = exp2(mu_all - top), exp2(mu - top)
    fresh, none = mu_all == float("-inf"), mu == float("-inf")
    l_sum = tl.where(none, l_all, tl.where(fresh, l, l_all * a + l * b))
    both = o_all * a[:, None] + o * b[:, None]
    o_sum = tl.where(none[:, None], o_all, tl.where(fresh[:, None], o, both))
    return l_sum, top, o_sum


@triton.jit
def attention_fwd_kernel(
    q, k, v, out, lse, items, tables, c,
    q_token, q_head, k_slot, k_head, k_page, v_slot, v_head, v_page, out_token, out_head,
    lse_head, table_width, heads,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr, WITH_LSE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of M queries of one head. items int32 [tiles, 4]: first row of q, its position, count, and the sample's
    first key row (PAGE 0) or its row of ``tables`` int32 [S, table_width]."""
    head = tl.program_id(0) % heads
    item = items + (tl.program_id(0) // heads) * 4
    first, position, count, at = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    k += (head // GROUP).to(tl.int64) * k_head
    v += (head // GROUP).to(tl.int64) * v_head
    table = tables + at.to(tl.int64) * table_width
    n, columns = tl.arange(0, M), tl.arange(0, D)
    rows, valid = (first + n).to(tl.int64), n < count
    positions, last = position + n, position + count - 1
    q_MD = tl.load(q + rows[:, None] * q_token + head * q_head + columns[None, :], mask=valid[:, None], other=0.0)
    m = tl.full((M,), float("-inf"), tl.float32)
    l, mu, o = tl.zeros((M,), tl.float32), m, tl.zeros((M, D), tl.float32)
    l_all, mu_all, o_all = l, mu, o
    whole, blocks = (position + 1) // BLOCK, last // BLOCK + 1
    for block in tl.range(0, whole, num_stages=STAGES):
        if block % SPLIT_BLOCKS == 0 and block > 0:
            l_all, mu_all, o_all = merge_states(l_all, mu_all, o_all, l, mu, o)
            m = tl.full((M,), float("-inf"), tl.float32)
            l, mu, o = tl.zeros((M,), tl.float32), m, tl.zeros((M, D), tl.float32)
        key = block * BLOCK
        k_ND = load_keys(k, key, last, at, table, k_slot, k_page, 0, D, PAGE, True)
        v_ND = load_keys(v, key, last, at, table, v_slot, v_page, 0, D, PAGE, True)
        m, l, mu, o = block_step(q_MD, k_ND, v_ND, key, positions, m, l, mu, o, c, False)
    for block in tl.range(whole, blocks, num_stages=1):
        if block % SPLIT_BLOCKS == 0 and block > 0:
            l_all, mu_all, o_all = merge_states(l_all, mu_all, o_all, l, mu, o)
            m = tl.full((M,), float("-inf"), tl.float32)
            l, mu, o = tl.zeros((M,), tl.float32), m, tl.zeros((M, D), tl.float32)
        key = block * BLOCK
        k_ND = load_keys(k, key, last, at, table, k_slot, k_page, 0, D, PAGE, False)
        v_ND = load_keys(v, key, last, at, table, v_slot, v_page, 0, D, PAGE, False)
        m, l, mu, o = block_step(q_MD, k_ND, v_ND, key, positions, m, l, mu, o, c, True)
    l_all, mu_all, o_all = merge_states(l_all, mu_all, o_all, l, mu, o)
    y = tl.div_rn(o_all, tl.broadcast_to(l_all[:, None], (M, D))).to(tl.bfloat16)
    tl.store(out + rows[:, None] * out_token + head * out_head + columns[None, :], y, mask=valid[:, None])
    if WITH_LSE:
        tl.store(lse + head.to(tl.int64) * lse_head + rows, mu_all + log2(l_all), mask=valid)
