"""Paged decode in Triton: every KV split of every sample in parallel, states merged ascending by a second kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_engine.ops.attention.triton_forward import BLOCK, SPLIT_BLOCKS, block_step, load_keys, merge_states
from rl_engine.ops.triton_functions import log2


@triton.jit
def kv_store_kernel(k, v, slots, k_pages, v_pages, tokens, k_token, k_head, v_token, v_head,
                    kp_page, kp_head, kp_slot, vp_page, vp_head, vp_slot, page,
                    R: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Copies K and V of R new tokens of one head into their slots (int64: page number * page + slot); a token of a
    negative slot nowhere.

    EARLY: the next kernel may start, if it is one that waits before it reads what is stored here.
    """
    if EARLY:
        gdc_launch_dependents()
    token, head = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.program_id(1)
    slot, columns = tl.load(slots + token, mask=token < tokens, other=-1)[:, None], tl.arange(0, D)[None, :]
    valid = slot >= 0
    key = tl.load(k + token[:, None] * k_token + head * k_head + columns, mask=valid)
    value = tl.load(v + token[:, None] * v_token + head * v_head + columns, mask=valid)
    tl.store(k_pages + slot // page * kp_page + head * kp_head + slot % page * kp_slot + columns, key, mask=valid)
    tl.store(v_pages + slot // page * vp_page + head * vp_head + slot % page * vp_slot + columns, value, mask=valid)


@triton.jit
def attention_decode_kernel(
    q, k, v, out, lse, part_o, part_l, part_mu, items, tables, c,
    q_token, q_head, k_slot, k_head, k_page, v_slot, v_head, v_page, out_token, out_head,
    lse_head, table_width, heads, splits,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr,
    DIRECT: tl.constexpr, WITH_LSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one sample and KV head: its few queries times the group's query heads are the M rows.

    items int32 [S, 4]: first row of q, its position, count (at most M / GROUP), row of ``tables``. DIRECT: there is
    one split only and its state is the result. Otherwise the state goes to part_o fp32 [Q, heads, splits, D], part_l
    and part_mu fp32 [Q, heads, splits]; splits without a key are not written. DV columns of V a program.
    """
    kv_head, split, item = tl.program_id(0) // (D // DV), tl.program_id(1), items + tl.program_id(2) * 4
    column = tl.program_id(0) % (D // DV) * DV
    first, position, count, at = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    last = position + count - 1
    start = split * SPLIT_BLOCKS
    if start * BLOCK <= last:
        k += kv_head.to(tl.int64) * k_head
        v += kv_head.to(tl.int64) * v_head
        table = tables + at.to(tl.int64) * table_width
        n, columns = tl.arange(0, M), tl.arange(0, D)
        query, head = n // GROUP, kv_head * GROUP + n % GROUP
        rows, valid = (first + query).to(tl.int64), query < count
        positions = position + query
        q_MD = tl.load(
            q + rows[:, None] * q_token + head[:, None] * q_head + columns[None, :], mask=valid[:, None], other=0.0
        )
        m = tl.full((M,), float("-inf"), tl.float32)
        l, mu, o = tl.zeros((M,), tl.float32), m, tl.zeros((M, DV), tl.float32)
        whole = tl.maximum(tl.minimum((position + 1) // BLOCK, start + SPLIT_BLOCKS), start)
        stop = tl.minimum(last // BLOCK + 1, start + SPLIT_BLOCKS)
        for block in tl.range(start, whole, num_stages=STAGES):
            key = block * BLOCK
            k_ND = load_keys(k, key, last, at, table, k_slot, k_page, 0, D, PAGE, True)
            v_ND = load_keys(v, key, last, at, table, v_slot, v_page, column, DV, PAGE, True)
            m, l, mu, o = block_step(q_MD, k_ND, v_ND, key, positions, m, l, mu, o, c, False)
        for block in tl.range(whole, stop, num_stages=1):
            key = block * BLOCK
            k_ND = load_keys(k, key, last, at, table, k_slot, k_page, 0, D, PAGE, False)
            v_ND = load_keys(v, key, last, at, table, v_slot, v_page, column, DV, PAGE, False)
            m, l, mu, o = block_step(q_MD, k_ND, v_ND, key, positions, m, l, mu, o, c, True)
        into = column + tl.arange(0, DV)[None, :]
        if DIRECT:
            y = tl.div_rn(o, tl.broadcast_to(l[:, None], (M, DV))).to(tl.bfloat16)
            tl.store(out + rows[:, None] * out_token + head[:, None] * out_head + into, y, mask=valid[:, None])
            if WITH_LSE:
                tl.store(lse + head.to(tl.int64) * lse_head + rows, mu + log2(l), mask=valid)
        else:
            state = (rows * heads + head) * splits + split
            tl.store(part_o + state[:, None] * D + into, o, mask=valid[:, None])
            tl.store(part_l + state, l, mask=valid)
            tl.store(part_mu + state, mu, mask=valid)


@triton.jit
def attention_merge_kernel(
    part_o, part_l, part_mu, out, lse, items, out_token, out_head, lse_head, heads, splits,
    D: tl.constexpr, WITH_LSE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one query and head, ascending, and finishes it. Grid: heads, queries, samples.

    EARLY: it may start before the kernel of the states ends, once that one has waited for everything before it.
    """
    head, query, item = tl.program_id(0), tl.program_id(1), items + tl.program_id(2) * 4
    first, position, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if query < count:
        row, one, cols = (first + query).to(tl.int64), tl.arange(0, 1), tl.arange(0, D)[None, :]
        l_all, mu_all = tl.zeros((1,), tl.float32), tl.full((1,), float("-inf"), tl.float32)
        o_all = tl.zeros((1, D), tl.float32)
        for split in tl.range(0, (position + query) // (BLOCK * SPLIT_BLOCKS) + 1, num_stages=STAGES):
            state = (row * heads + head) * splits + split
            l, mu = tl.load(part_l + state + one), tl.load(part_mu + state + one)
            o = tl.load(part_o + state * D + cols)
            l_all, mu_all, o_all = merge_states(l_all, mu_all, o_all, l, mu, o)
        y = tl.div_rn(o_all, tl.broadcast_to(l_all[:, None], (1, D))).to(tl.bfloat16)
        tl.store(out + row * out_token + head * out_head + cols, y)
        if WITH_LSE:
            tl.store(lse + head.to(tl.int64) * lse_head + row + one, mu_all + log2(l_all))
