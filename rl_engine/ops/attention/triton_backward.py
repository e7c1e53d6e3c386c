"""Attention backward in Triton: one kernel for dQ, one for dK and dV, none of which shares an output.

Why the bits agree. Scores and P are recomputed from the saved LSE by the same chain; dQ is one chain over keys
ascending, dK and dV one chain over the group's query heads (outer) and queries ascending (inner), carried by the matrix
unit in steps of 16 that count from the sample's first token. Tiles only decide how much of a chain is in flight: a
row of zeros in front (behind the diagonal) or at the end adds +0.

Letters: M queries, N keys of a tile, D head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_engine.ops.triton_functions import exp2, tree_rows


@triton.jit
def attention_delta_kernel(dout, out, delta, rows, dout_token, dout_head, out_token, out_head, delta_head,
                           R: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """delta fp32 [heads, T]: tree(fl(dO O)) over D."""
    row, head = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.program_id(1)
    cols, valid = tl.arange(0, D)[None, :], row < rows
    a = tl.load(dout + row[:, None] * dout_token + head * dout_head + cols, mask=valid[:, None], other=0.0)
    b = tl.load(out + row[:, None] * out_token + head * out_head + cols, mask=valid[:, None], other=0.0)
    tl.store(delta + head.to(tl.int64) * delta_head + row, tree_rows(a.to(tl.float32) * b.to(tl.float32)), mask=valid)


@triton.jit
def _dq_block(q, do, k, v, lse, delta, dq, keys, positions, c, MASK: tl.constexpr):
    p = exp2(tl.fma(tl.dot(q, tl.trans(k)), c, -lse[:, None]))
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    if MASK:
        ds = tl.where(keys[None, :] <= positions[:, None], ds, 0.0)
    return tl.dot(ds.to(tl.bfloat16), k, dq)


@triton.jit
def attention_dq_kernel(
    q, k, v, dout, lse, delta, dq, items, c, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, dq_token, dq_head,
    lse_head, delta_head, heads,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of M queries of one head. items int32 [tiles, 4]: first row, its position, count, the sample's first row."""
    head = tl.program_id(0) % heads
    item = items + (tl.program_id(0) // heads) * 4
    first, position, count, start = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    n, cols = tl.arange(0, M), tl.arange(0, D)[None, :]
    rows, valid = (first + n).to(tl.int64), n < count
    positions, last = position + n, position + count - 1
    q_MD = tl.load(q + rows[:, None] * q_token + head * q_head + cols, mask=valid[:, None], other=0.0)
    do_MD = tl.load(dout + rows[:, None] * do_token + head * do_head + cols, mask=valid[:, None], other=0.0)
    lse_M = tl.load(lse + head.to(tl.int64) * lse_head + rows, mask=valid, other=0.0)
    delta_M = tl.load(delta + head.to(tl.int64) * delta_head + rows, mask=valid, other=0.0)
    k += (head // GROUP) * k_head + start.to(tl.int64) * k_token
    v += (head // GROUP) * v_head + start.to(tl.int64) * v_token
    dq_MD = tl.zeros((M, D), tl.float32)
    whole = (position + 1) // N * N
    for key in tl.range(0, whole, N, num_stages=STAGES):
        keys = key + tl.arange(0, N)
        k_ND = tl.load(k + keys.to(tl.int64)[:, None] * k_token + cols)
        v_ND = tl.load(v + keys.to(tl.int64)[:, None] * v_token + cols)
        dq_MD = _dq_block(q_MD, do_MD, k_ND, v_ND, lse_M, delta_M, dq_MD, keys, positions, c, False)
    for key in tl.range(whole, last + 1, N, num_stages=1):
        keys = key + tl.arange(0, N)
        k_ND = tl.load(k + keys.to(tl.int64)[:, None] * k_token + cols, mask=keys[:, None] <= last, other=0.0)
        v_ND = tl.load(v + keys.to(tl.int64)[:, None] * v_token + cols, mask=keys[:, None] <= last, other=0.0)
        dq_MD = _dq_block(q_MD, do_MD, k_ND, v_ND, lse_M, delta_M, dq_MD, keys, positions, c, True)
    y = (dq_MD * scale).to(dq.dtype.element_ty)
    tl.store(dq + rows[:, None] * dq_token + head * dq_head + cols, y, mask=valid[:, None])


@triton.jit
def attention_dkv_kernel(
    q, k, v, dout, lse, delta, dk, dv, items, c, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, dk_token, dk_head, dv_token, dv_head,
    lse_head, delta_head, kv_heads,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of N keys of one KV head. items int32 [tiles, 4]: first key's position, count, the sample's first row
    and length. Queries start at the tile of M that holds the first key."""
    kv_head = tl.program_id(0) % kv_heads
    item = items + (tl.program_id(0) // kv_heads) * 4
    first, count, start, length = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    n, m, cols = tl.arange(0, N), tl.arange(0, M), tl.arange(0, D)[None, :]
    keys, valid, rows = first + n, n < count, (start + first + n).to(tl.int64)
    k_ND = tl.load(k + rows[:, None] * k_token + kv_head * k_head + cols, mask=valid[:, None], other=0.0)
    v_ND = tl.load(v + rows[:, None] * v_token + kv_head * v_head + cols, mask=valid[:, None], other=0.0)
    dk_ND, dv_ND = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    diagonal = first // M * M
    blocks = tl.cdiv(length - diagonal, M)
    q_at, do_at = m[:, None] * q_token + cols, m[:, None] * do_token + cols
    for i in tl.range(0, blocks * GROUP, num_stages=STAGES):
        head, query = kv_head * GROUP + i // blocks, diagonal + (i % blocks) * M
        positions, at = query + m, (start + query).to(tl.int64)
        inside = positions < length
        q_MD = tl.load(q + at * q_token + head * q_head + q_at, mask=inside[:, None], other=0.0)
        do_MD = tl.load(dout + at * do_token + head * do_head + do_at, mask=inside[:, None], other=0.0)
        lse_M = tl.load(lse + at + head.to(tl.int64) * lse_head + m, mask=inside, other=0.0)
        delta_M = tl.load(delta + at + head.to(tl.int64) * delta_head + m, mask=inside, other=0.0)
        score = tl.fma(tl.dot(k_ND, tl.trans(q_MD)), c, -lse_M[None, :])
        p = exp2(tl.where(keys[:, None] <= positions[None, :], score, float("-inf")))
        dv_ND = tl.dot(p.to(tl.bfloat16), do_MD, dv_ND)
        ds = p * (tl.dot(v_ND, tl.trans(do_MD)) - delta_M[None, :])
        dk_ND = tl.dot(ds.to(tl.bfloat16), q_MD, dk_ND)
    dk_ND, dv_ND = (dk_ND * scale).to(dk.dtype.element_ty), dv_ND.to(dv.dtype.element_ty)
    tl.store(dk + rows[:, None] * dk_token + kv_head * dk_head + cols, dk_ND, mask=valid[:, None])
    tl.store(dv + rows[:, None] * dv_token + kv_head * dv_head + cols, dv_ND, mask=valid[:, None])
