"""Paged decode for Hopper, in Gluon: the scores of a whole split first, then all its weights, then the chain over V.

Only o is a chain: the scores of different blocks do not see each other, and once the running maximum after every block
is known, so are p and the row sums of all blocks. A program does the three one after another, for one split or for all
splits of a sample, with blocks of K and V, also those of the next split, on their way all the time. ``hopper_paged``
chooses.

A program may start before the kernel ahead of it in the stream ends; it waits before it reads or writes anything.

Matrix products have keys, or columns of V, as rows and the few queries as columns; products commute, and the order of
every sum is the anchor's.

Letters: R query rows of one KV head (8 have room), D head_dim, DV columns of V of a program, B blocks of a split.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_engine.ops.attention.hopper_forward import BLOCK, SPLIT_BLOCKS, add

QUERY_ROWS = gl.constexpr(8)


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def bring(slot, base, page, key, last, slot_stride, page_stride, PAGE: gl.constexpr, WARPS: gl.constexpr):
    """Starts the copy of 64 rows from ``base`` (at its head and column) into ``slot``; +0 behind ``last``."""
    WIDTH: gl.constexpr = slot.shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, COPY))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    at = base + page.to(gl.int64) * page_stride + key % PAGE * slot_stride
    inside = (key + n <= last)[:, None] & (columns >= 0)[None, :]
    async_copy.async_copy_global_to_shared(slot, at + (n[:, None] * slot_stride + columns[None, :]), mask=inside)


@gluon.jit
def load_rows(q, first, count, kv_head, q_token, q_head, GROUP: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):
    """bf16 [8, D]: the queries of one KV head, +0 behind ``count``."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    r = gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, LOADED))
    row = (first + r // GROUP).to(gl.int64) * q_token + (kv_head * GROUP + r % GROUP) * q_head
    mask = (r // GROUP < count)[:, None] & (columns >= 0)[None, :]
    return gl.load(q + row[:, None] + columns[None, :], mask=mask, other=0.0)


@gluon.jit
def block_sums(p):
    """[B, R, 64] -> [B, R]: ``triton_functions.sum_block``'s order, column bits 0, 3, 4, 5, 1, 2."""
    x = p.reshape((p.shape[0], p.shape[1], 2, 2, 2, 2, 2, 2))  # B, R, bits 5 4 3 2 1 0
    x = gl.reduce(x, 7, add)
    x = gl.reduce(x, 4, add)
    x = gl.reduce(x, 3, add)
    x = gl.reduce(x, 2, add)
    x = gl.reduce(x, 3, add)
    return gl.reduce(x, 2, add)


@gluon.jit
def weights(d, start, position, count, c, p_s, mu_s, sum_s, GROUP: gl.constexpr, WARPS: gl.constexpr,
            SCORES: gl.constexpr):  # fmt: skip
    """From the scores [16, R, 64] of a split: bf16 p, and after every block mu and its row sum, in shared memory.

    R may be fewer rows than the 8 that have room: nothing reads the results of the others.
    """
    R: gl.constexpr = d.shape[1]
    PAIRS: gl.constexpr = gl.SliceLayout(2, SCORES)
    RUN: gl.constexpr = gl.BlockedLayout([SPLIT_BLOCKS, 1], [32 // R, R], [WARPS, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PACKED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, R, [2, 1, 0])
    b = gl.expand_dims(gl.arange(0, SPLIT_BLOCKS, layout=gl.SliceLayout(1, PAIRS))[:, None], 2)
    r = gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, PAIRS))[None, :], 2)
    n = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))
    n = gl.expand_dims(n[None, :], 1)
    exists = (start + b) * BLOCK + n <= position + gl.minimum(r // GROUP, count - 1)
    d = gl.where(exists, d, float("-inf"))
    top = gl.associative_scan(gl.convert_layout(gl.reduce(d, 2, larger), RUN), 0, larger)
    mu_all = mu_s._reinterpret(gl.float32, [SPLIT_BLOCKS, QUERY_ROWS], PLAIN).slice(0, R, 1)
    mu_all.store(top * c)
    mu = gl.expand_dims(mu_all.load(PAIRS), 2)
    p = gl.exp2(gl.fma(d, gl.zeros_like(d) + c, gl.zeros_like(d) - mu))
    p = gl.where(mu == float("-inf"), 0.0, p)  # a row that has no key yet: -inf against -inf
    sum_s._reinterpret(gl.float32, [SPLIT_BLOCKS, QUERY_ROWS], PLAIN).slice(0, R, 1).store(block_sums(p))
    packed = p_s._reinterpret(gl.bfloat16, [SPLIT_BLOCKS, QUERY_ROWS, BLOCK], PACKED).slice(0, R, 1)
    packed.store(p.to(gl.bfloat16))


@gluon.jit
def value_step(o, l, mu_old, v, p, mu_s, sum_s, OPERAND: gl.constexpr, WEIGHTS: gl.constexpr, ROW: gl.constexpr):
    """One block into the state: o [columns, R]."""
    mu = mu_s.load(ROW)
    alpha = gl.where(mu_old == float("-inf"), 0.0, gl.exp2(mu_old - mu))
    l = l * alpha + sum_s.load(ROW)
    o = o * alpha[None, :]
    o = mma_v2(v.permute((1, 0)).load(OPERAND), p.permute((1, 0)).load(WEIGHTS), o)
    return o, l, mu


@gluon.jit
def merge_split(l_all, mu_all, o_all, l, mu, o):
    """A finished split into the sum so far; an empty state is the identity on either side."""
    top = gl.maximum(mu_all, mu)
    a, b = gl.exp2(mu_all - top), gl.exp2(mu - top)
    fresh, none = mu_all == float("-inf"), mu == float("-inf")
    l_sum = gl.where(none, l_all, gl.where(fresh, l, l_all * a + l * b))
    both = o_all * a[None, :] + o * b[None, :]
    return l_sum, top, gl.where(none[None, :], o_all, gl.where(fresh[None, :], o, both))


@gluon.jit
def finish(o, l, mu, out, lse, part_o, part_l, part_mu, first, count, kv_head, column, split, splits, heads,
           out_token, out_head, lse_head, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, MMA: gl.constexpr,
           DIRECT: gl.constexpr, WITH_LSE: gl.constexpr):  # fmt: skip
    r = gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(0, MMA))
    columns = column + gl.arange(0, DV, layout=gl.SliceLayout(1, MMA))
    row, head, valid = (first + r // GROUP).to(gl.int64), kv_head * GROUP + r % GROUP, r // GROUP < count
    mask = valid[None, :] & (columns >= 0)[:, None]
    if DIRECT:
        y = gl.div_rn(o, gl.zeros_like(o) + l[None, :]).to(gl.bfloat16)
        gl.store(out + (row * out_token + head * out_head)[None, :] + columns[:, None], y, mask=mask)
        if WITH_LSE:
            gl.store(lse + head.to(gl.int64) * lse_head + row, mu + gl.log2(l), mask=valid)
    else:
        state = (row * heads + head) * splits + split
        gl.store(part_o + (state * D)[None, :] + columns[:, None], o, mask=mask)
        gl.store(part_l + state, l, mask=valid)
        gl.store(part_mu + state, mu, mask=valid)


@gluon.jit
def place_of(step, start, blocks, STEP: gl.constexpr):
    """(V instead of K, first block) of a step: STEP blocks of K till the end of their split, then the same of V."""
    HALF: gl.constexpr = SPLIT_BLOCKS // STEP
    split, i = step // (2 * HALF), step % (2 * HALF)
    half = gl.minimum((blocks - split * SPLIT_BLOCKS + STEP - 1) // STEP, HALF)
    return i >= half, start + split * SPLIT_BLOCKS + gl.where(i >= half, i - half, i) * STEP


@gluon.jit
def page_of(table, step, start, blocks, last, j: gl.constexpr, STEP: gl.constexpr, PAGE: gl.constexpr):
    """The page of a step's block ``j``; 0 where there is none."""
    _, block = place_of(step, start, blocks, STEP)
    key = (block + j) * BLOCK
    return gl.load(table + key // PAGE, mask=key <= last, other=0)


@gluon.jit
def guess_page(tables, sample, block, table_width, table_rows, PAGE: gl.constexpr):
    """The page of ``block`` if the sample's row of the tables is the one of its own number, as it most often is: read
    together with the sample's item, not after it. 0 where the tables have no such place."""
    place = block * BLOCK // PAGE
    there = (sample < table_rows) & (place < table_width)
    return gl.load(tables + sample.to(gl.int64) * table_width + place, mask=there, other=0)


@gluon.jit
def bring_step(ring, slot, k, v, step, steps, start, blocks, page_0, page_1, last, k_slot, k_page, v_slot, v_page,
               STEP: gl.constexpr, DV: gl.constexpr, PAGE: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Starts the copies of a step; one group of copies a step, empty behind the last one."""
    TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if step < steps:
        values, block = place_of(step, start, blocks, STEP)
        key = block * BLOCK
        if values:
            room = ring.index(slot * STEP)._reinterpret(gl.bfloat16, [BLOCK, DV], TILE)
            bring(room, v, page_0, key, last, v_slot, v_page, PAGE, WARPS)
        else:
            bring(ring.index(slot * STEP), k, page_0, key, last, k_slot, k_page, PAGE, WARPS)
        if STEP == 2:
            if values:
                room = ring.index(slot * STEP + 1)._reinterpret(gl.bfloat16, [BLOCK, DV], TILE)
                bring(room, v, page_1, key + BLOCK, last, v_slot, v_page, PAGE, WARPS)
            else:
                bring(ring.index(slot * STEP + 1), k, page_1, key + BLOCK, last, k_slot, k_page, PAGE, WARPS)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["table_width", "heads", "splits", "table_rows"])
def attention_units_kernel(
    q, k, v, out, lse, part_o, part_l, part_mu, items, tables, c,
    q_token, q_head, k_slot, k_head, k_page, v_slot, v_head, v_page, out_token, out_head,
    lse_head, table_width, heads, splits, table_rows,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, ALL: gl.constexpr,
    DIRECT: gl.constexpr, WITH_LSE: gl.constexpr, STEP: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """One split, or ALL, of one sample and KV head for DV columns of V. Grid: kv_heads x D / DV, splits or 1, samples.

    Arguments as ``attention_decode_kernel``; ALL splits are merged here, so their state is the result. STEP blocks
    (1 or 2) are computed at a time, RING times as many have room. SCORES: layout of the scores [16, R, 64] of a split.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BY_ROW: gl.constexpr = gl.SwizzledSharedLayout(4, 1, R, [1, 0])
    BY_BLOCK: gl.constexpr = gl.SwizzledSharedLayout(4, 1, R, [2, 1, 0])
    PACKED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, R, [1, 0])
    gdc_wait()
    gdc_launch_dependents()
    kv_head, column = gl.program_id(0) // (D // DV), gl.program_id(0) % (D // DV) * DV
    split, sample = gl.program_id(1), gl.program_id(2)
    item, start = items + sample * 4, split * SPLIT_BLOCKS
    guess_0 = guess_page(tables, sample, start, table_width, table_rows, PAGE)
    guess_1 = guess_page(tables, sample, start + STEP - 1, table_width, table_rows, PAGE)
    first, position, count, at = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
    last = position + count - 1
    blocks = last // BLOCK + 1 - start
    if not ALL:
        blocks = gl.minimum(blocks, SPLIT_BLOCKS)
    if blocks <= 0:
        return
    table = tables + at.to(gl.int64) * table_width
    k += kv_head.to(gl.int64) * k_head
    v += kv_head.to(gl.int64) * v_head + column
    HALF: gl.constexpr = SPLIT_BLOCKS // STEP
    steps = blocks // SPLIT_BLOCKS * (2 * HALF) + (blocks % SPLIT_BLOCKS + STEP - 1) // STEP * 2
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING * STEP, BLOCK, D], TILE)
    s_s = gl.allocate_shared_memory(gl.float32, [SPLIT_BLOCKS, QUERY_ROWS, BLOCK], BY_ROW)
    mu_s = gl.allocate_shared_memory(gl.float32, [SPLIT_BLOCKS, QUERY_ROWS], VECTOR)
    sum_s = gl.allocate_shared_memory(gl.float32, [SPLIT_BLOCKS, QUERY_ROWS], VECTOR)
    p_s = s_s._reinterpret(gl.bfloat16, [2 * SPLIT_BLOCKS, QUERY_ROWS, BLOCK], PACKED)
    rows = load_rows(q, first, count, kv_head, q_token, q_head, GROUP, D, WARPS)
    other = gl.where(at == sample, -1, last)
    page_0 = gl.where(at == sample, guess_0, page_of(table, 0, start, blocks, other, 0, STEP, PAGE))
    page_1 = gl.where(at == sample, guess_1, page_of(table, 0, start, blocks, other, STEP - 1, STEP, PAGE))
    for early in gl.static_range(RING - 1):
        bring_step(ring, early, k, v, early, steps, start, blocks, page_0, page_1, last, k_slot, k_page, v_slot, v_page,
                   STEP, DV, PAGE, WARPS)  # fmt: skip
        page_0 = page_of(table, early + 1, start, blocks, last, 0, STEP, PAGE)
        page_1 = page_of(table, early + 1, start, blocks, last, STEP - 1, STEP, PAGE)
    q_op = gl.convert_layout(rows.permute((1, 0)), RIGHT)
    zero = gl.zeros((BLOCK, QUERY_ROWS), gl.float32, layout=MMA)
    l_all = gl.zeros((QUERY_ROWS,), gl.float32, layout=ROW)
    mu_all = gl.full((QUERY_ROWS,), float("-inf"), gl.float32, layout=ROW)
    o_all = gl.zeros((DV, QUERY_ROWS), gl.float32, layout=MMA)
    for part in range(0, (blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS):
        here = gl.minimum(blocks - part * SPLIT_BLOCKS, SPLIT_BLOCKS)
        half, done = (here + STEP - 1) // STEP, part * (2 * HALF)
        for i in range(0, half):
            async_copy.wait_group(RING - 2)
            step = done + i + RING - 1
            bring_step(ring, step % RING, k, v, step, steps, start, blocks, page_0, page_1, last, k_slot, k_page,
                       v_slot, v_page, STEP, DV, PAGE, WARPS)  # fmt: skip
            page_0 = page_of(table, step + 1, start, blocks, last, 0, STEP, PAGE)
            page_1 = page_of(table, step + 1, start, blocks, last, STEP - 1, STEP, PAGE)
            for j in gl.static_range(STEP):
                s = mma_v2(ring.index((done + i) % RING * STEP + j).load(LEFT), q_op, zero)
                s_s.index(i * STEP + j).permute((1, 0)).store(s)
        d = s_s._reinterpret(gl.float32, [SPLIT_BLOCKS, QUERY_ROWS, BLOCK], BY_BLOCK).slice(0, R, 1).load(SCORES)
        weights(d, start + part * SPLIT_BLOCKS, position, count, c, p_s, mu_s, sum_s, GROUP, WARPS, SCORES)
        l = gl.zeros((QUERY_ROWS,), gl.float32, layout=ROW)
        mu = gl.full((QUERY_ROWS,), float("-inf"), gl.float32, layout=ROW)
        o = gl.zeros((DV, QUERY_ROWS), gl.float32, layout=MMA)
        for i in range(0, half):
            async_copy.wait_group(RING - 2)
            step = done + half + i + RING - 1
            bring_step(ring, step % RING, k, v, step, steps, start, blocks, page_0, page_1, last, k_slot, k_page,
                       v_slot, v_page, STEP, DV, PAGE, WARPS)  # fmt: skip
            page_0 = page_of(table, step + 1, start, blocks, last, 0, STEP, PAGE)
            page_1 = page_of(table, step + 1, start, blocks, last, STEP - 1, STEP, PAGE)
            for j in gl.static_range(STEP):
                block = i * STEP + j
                if block < here:
                    slot = ring.index((done + half + i) % RING * STEP + j)
                    slot = slot._reinterpret(gl.bfloat16, [BLOCK, DV], TILE)
                    o, l, mu = value_step(o, l, mu, slot, p_s.index(block), mu_s.index(block), sum_s.index(block),
                                          LEFT, RIGHT, ROW)  # fmt: skip
        if ALL:
            l_all, mu_all, o_all = merge_split(l_all, mu_all, o_all, l, mu, o)
        else:
            l_all, mu_all, o_all = l, mu, o
    finish(o_all, l_all, mu_all, out, lse, part_o, part_l, part_mu, first, count, kv_head, column, split, splits, heads,
           out_token, out_head, lse_head, GROUP, D, DV, MMA, DIRECT, WITH_LSE)  # fmt: skip
