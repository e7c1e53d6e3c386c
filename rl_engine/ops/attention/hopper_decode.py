"""Paged decode for Hopper, in Gluon: the scores of a whole split first, then all its weights, then the chain over V.

Only o is a chain: the scores of different blocks do not see each other, and once the running maximum after every block
is known, so are p and the row sums of all blocks. Four or eight warps do the three one after another, for one split or
for all splits of a sample. Another warp brings pairs of blocks, of K and then of V, into a ring with the bulk copy
engine; a slot waits for nothing but room, so memory is read all the time, also while weights are computed.
``hopper_paged`` chooses.

A program may start before the kernel ahead of it in the stream ends. Where the caller says that old keys are settled,
it fetches them at once, as many as the ring holds, and waits before it reads anything that kernel may write: the
queries, and blocks with a new key. Otherwise it waits first. When it lets the kernel behind it start is a matter of
speed alone: with few programs not before most of its own keys are on their way.

Matrix products have keys, or columns of V, as rows and the few queries as columns; products commute, and the order of
every sum is the anchor's.

Letters: R query rows of one KV head (8 have room), D head_dim, DV columns of V of a program, B blocks of a split.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_engine.ops.attention.hopper_forward import BLOCK, SPLIT_BLOCKS, add

QUERY_ROWS = gl.constexpr(8)
CHUNK = gl.constexpr(64)  # columns that the copy engine brings at a time
KEYS = gl.constexpr(2)  # blocks of keys of a slot of the ring


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


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
def bring(
    d, ring, ready, chunk, rows, column, n,
    BLOCKS: gl.constexpr, COLUMNS: gl.constexpr, BESIDE: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the first n of at most BLOCKS blocks, COLUMNS columns of each: into chunks of the ring from
    ``chunk`` on, those of one block APART, the same ones of two blocks BESIDE each other."""
    for m in gl.static_range(1, BLOCKS + 1):
        if n == m:
            mbarrier.expect(ready, m * BLOCK * COLUMNS * 2)
    for j in gl.static_range(BLOCKS):
        if j < n:
            for part in gl.static_range(COLUMNS // CHUNK):
                place = [rows[j], column + part * CHUNK]
                tma.async_copy_global_to_shared(d, place, ready, ring.index(chunk + j * BESIDE + part * APART))


@gluon.jit
def fetch(
    k_d, v_d, ring, full, empty, table, kv_head, kv_heads, column, start, blocks, position,
    D: gl.constexpr, DV: gl.constexpr, PAGE: gl.constexpr, RING: gl.constexpr,
    SETTLED: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Copies blocks in the order in which they are computed: the keys of a split, its values, the next split.

    A slot holds a pair of K, stored as one block of 128 rows, or as many columns of V, one block behind the other.
    """
    CHUNKS: gl.constexpr = KEYS * (D // CHUNK)
    VALUES: gl.constexpr = KEYS * (D // DV)
    step = 0
    for part in range(0, (blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS):
        here = gl.minimum(blocks - part * SPLIT_BLOCKS, SPLIT_BLOCKS)
        of_keys, of_values = (here + KEYS - 1) // KEYS, (here + VALUES - 1) // VALUES
        for i in range(0, of_keys + of_values):
            if LATE > 0 and (part + 1) * SPLIT_BLOCKS >= blocks and i == gl.maximum(of_keys + of_values - LATE, 0):
                gdc_launch_dependents()
            values = i >= of_keys
            of_split = gl.where(values, (i - of_keys) * VALUES, i * KEYS)
            n = gl.minimum(here - of_split, gl.where(values, VALUES, KEYS))
            first, rows = start + part * SPLIT_BLOCKS + of_split, ()
            for j in gl.static_range(VALUES):
                key = (first + gl.minimum(j, n - 1)) * BLOCK
                rows += ((gl.load(table + key // PAGE) * kv_heads + kv_head) * PAGE + key % PAGE,)
            slot = step % RING
            ready, chunk = full.index(slot), slot * CHUNKS
            mbarrier.wait(empty.index(slot), (step // RING & 1) ^ 1)
            if SETTLED and (first + n) * BLOCK > position:
                gdc_wait()
            if values:
                bring(v_d, ring, ready, chunk, rows, column, n, VALUES, DV, DV // CHUNK, 1)
            else:
                bring(k_d, ring, ready, chunk, rows, 0, n, KEYS, D, 1, KEYS)
            step += 1


@gluon.jit
def value(ring, singles, slot, j, WHOLE: gl.constexpr, CHUNKS: gl.constexpr):
    """Block j of the values of a slot."""
    if WHOLE:
        return singles.index(KEYS * slot + j)
    else:
        return ring.index(slot * CHUNKS + j)


@gluon.jit
def add_block(o, l, alpha, mu, more, v, p_s, mu_s, sum_s, at, ahead, ROW: gl.constexpr):
    """One step of the chain, and meanwhile the factors of block ``ahead``, which comes next: (o, l, alpha, mu, sum)."""
    l = l * alpha + more
    o = o * alpha[None, :]
    o = warpgroup_mma(v.permute((1, 0)), p_s.index(at).permute((1, 0)), o, is_async=True)
    mu_next, more = mu_s.index(ahead).load(ROW), sum_s.index(ahead).load(ROW)
    alpha = gl.where(mu == float("-inf"), 0.0, gl.exp2(mu - mu_next))
    o = warpgroup_mma_wait(0, deps=[o])
    return o, l, alpha, mu_next, more


@gluon.jit
def compute(
    q, out, lse, part_o, part_l, part_mu, ring, full, empty, q_s, s_s, mu_s, sum_s, c,
    first, position, count, start, blocks, kv_head, column, split, splits, heads,
    q_token, q_head, out_token, out_head, lse_head,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, R: gl.constexpr, ALL: gl.constexpr, DIRECT: gl.constexpr,
    WITH_LSE: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr, PAIR: gl.constexpr, ROWS: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 8, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    BY_BLOCK: gl.constexpr = gl.SwizzledSharedLayout(4, 1, R, [2, 1, 0])
    V_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [WARPS, 1], [1, 0])
    CHUNKS: gl.constexpr = KEYS * (D // CHUNK)
    VALUES: gl.constexpr = KEYS * (D // DV)
    last = position + count - 1
    pairs = ring._reinterpret(gl.bfloat16, [RING, KEYS * BLOCK, D], PAIR)
    singles = ring._reinterpret(gl.bfloat16, [KEYS * RING, BLOCK, D], ROWS)
    scores = s_s._reinterpret(gl.float32, [SPLIT_BLOCKS // KEYS, KEYS, QUERY_ROWS, BLOCK], BY_BLOCK)
    gdc_wait()
    q_s.store(load_rows(q, first, count, kv_head, q_token, q_head, GROUP, D, WARPS))
    fence_async_shared()
    queries = q_s.permute((1, 0))
    zero = gl.zeros((KEYS * BLOCK, QUERY_ROWS), gl.float32, layout=MMA)
    l_all = gl.zeros((QUERY_ROWS,), gl.float32, layout=ROW)
    mu_all = gl.full((QUERY_ROWS,), float("-inf"), gl.float32, layout=ROW)
    o_all = gl.zeros((DV, QUERY_ROWS), gl.float32, layout=MMA)
    step = 0
    for part in range(0, (blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS):
        here = gl.minimum(blocks - part * SPLIT_BLOCKS, SPLIT_BLOCKS)
        for i in range(0, (here + KEYS - 1) // KEYS):
            slot = step % RING
            mbarrier.wait(full.index(slot), step // RING & 1)
            s = warpgroup_mma(pairs.index(slot), queries, zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(empty.index(slot))
            scores.index(i).store(s.reshape((KEYS, BLOCK, QUERY_ROWS)).permute((0, 2, 1)))
            step += 1
        d = s_s._reinterpret(gl.float32, [SPLIT_BLOCKS, QUERY_ROWS, BLOCK], BY_BLOCK).slice(0, R, 1).load(SCORES)
        weights(d, start + part * SPLIT_BLOCKS, position, count, c, s_s, mu_s, sum_s, GROUP, WARPS, SCORES)
        fence_async_shared()
        l = gl.zeros((QUERY_ROWS,), gl.float32, layout=ROW)
        o = gl.zeros((DV, QUERY_ROWS), gl.float32, layout=MMA)
        mu, more = mu_s.index(0).load(ROW), sum_s.index(0).load(ROW)
        alpha = gl.zeros((QUERY_ROWS,), gl.float32, layout=ROW)
        before, end = (here - 1) // VALUES, (start + part * SPLIT_BLOCKS + here) * BLOCK
        for i in range(0, before):
            slot = step % RING
            mbarrier.wait(full.index(slot), step // RING & 1)
            for j in gl.static_range(VALUES):
                v = value(ring, singles, slot, j, DV == D, CHUNKS)
                at = i * VALUES + j
                o, l, alpha, mu, more = add_block(o, l, alpha, mu, more, v, s_s, mu_s, sum_s, at, at + 1, ROW)
            mbarrier.arrive(empty.index(slot))
            step += 1
        slot, rest = step % RING, here - before * VALUES
        mbarrier.wait(full.index(slot), step // RING & 1)
        if end > last + 1:  # behind the last key is nothing, or another's
            v = value(ring, singles, slot, rest - 1, DV == D, CHUNKS)
            held = v.load(V_ROWS)
            n = end - BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, V_ROWS))
            v.store(gl.where((n <= last)[:, None], held, gl.zeros_like(held)))
            fence_async_shared()
        for j in gl.static_range(VALUES):
            if j < rest:
                v = value(ring, singles, slot, j, DV == D, CHUNKS)
                at = before * VALUES + j
                ahead = gl.minimum(at + 1, here - 1)
                o, l, alpha, mu, more = add_block(o, l, alpha, mu, more, v, s_s, mu_s, sum_s, at, ahead, ROW)
        mbarrier.arrive(empty.index(slot))
        step += 1
        if ALL:
            l_all, mu_all, o_all = merge_split(l_all, mu_all, o_all, l, mu, o)
        else:
            l_all, mu_all, o_all = l, mu, o
    finish(o_all, l_all, mu_all, out, lse, part_o, part_l, part_mu, first, count, kv_head, column, split, splits, heads,
           out_token, out_head, lse_head, GROUP, D, DV, MMA, DIRECT, WITH_LSE)  # fmt: skip


@gluon.jit(do_not_specialize=["table_width", "heads", "splits", "kv_heads"])
def attention_units_kernel(
    k_d, v_d, q, out, lse, part_o, part_l, part_mu, items, tables, c,
    q_token, q_head, out_token, out_head, lse_head, table_width, heads, splits, kv_heads,
    CHUNKED: gl.constexpr, PAIR: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, WEIGHTS: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, ALL: gl.constexpr,
    DIRECT: gl.constexpr, WITH_LSE: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr, SETTLED: gl.constexpr,
    LATE: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """One split, or ALL, of one sample and KV head for DV columns of V. Grid: kv_heads x D / DV, splits or 1, samples.

    k_d and v_d describe the pages as rows of D values; other arguments as ``attention_decode_kernel``, ALL splits are
    merged here, so their state is the result. RING slots have room; WARPS (4, or 8 where DV is 128) compute. The kernel
    behind may start when LATE slots are left to be asked for, 0: at once. Layouts in shared memory: CHUNKED of 64 x 64
    values, PAIR and ROWS of two blocks and of one, QUERIES, WEIGHTS of p; SCORES: layout of the scores [16, R, 64] of a
    split.
    """
    if not SETTLED:
        gdc_wait()
    if LATE == 0:
        gdc_launch_dependents()
    kv_head, column = gl.program_id(0) // (D // DV), gl.program_id(0) % (D // DV) * DV
    split, sample = gl.program_id(1), gl.program_id(2)
    item, start = items + sample * 4, split * SPLIT_BLOCKS
    first, position, count, at = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
    blocks = (position + count - 1) // BLOCK + 1 - start
    if not ALL:
        blocks = gl.minimum(blocks, SPLIT_BLOCKS)
    blocks = gl.maximum(blocks, 0)
    count = gl.where(blocks > 0, count, 0)  # a split that the sample does not reach stores nothing
    table = tables + at.to(gl.int64) * table_width
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING * KEYS * (D // CHUNK), BLOCK, CHUNK], CHUNKED)
    s_s = gl.allocate_shared_memory(gl.bfloat16, [2 * SPLIT_BLOCKS, QUERY_ROWS, BLOCK], WEIGHTS)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [QUERY_ROWS, D], QUERIES)
    mu_s = gl.allocate_shared_memory(gl.float32, [SPLIT_BLOCKS, QUERY_ROWS], VECTOR)
    sum_s = gl.allocate_shared_memory(gl.float32, [SPLIT_BLOCKS, QUERY_ROWS], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute, (q, out, lse, part_o, part_l, part_mu, ring, full, empty, q_s, s_s, mu_s, sum_s, c, first,
                       position, count, start, blocks, kv_head, column, split, splits, heads, q_token, q_head,
                       out_token, out_head, lse_head, GROUP, D, DV, R, ALL, DIRECT, WITH_LSE, RING, WARPS, PAIR, ROWS,
                       SCORES)),
            (fetch, (k_d, v_d, ring, full, empty, table, kv_head, kv_heads, column, start, blocks, position, D, DV,
                     PAGE, RING, SETTLED, LATE)),
        ],
        [1],
        [24],
    )  # fmt: skip
