"""Attention backward for Hopper: the blocks of ``triton_backward``, warp-specialized by hand in Gluon.

One warp brings blocks into shared memory with the bulk copy engine; two groups of four warps take 64 rows of the result
each. Scores are computed transposed for dK and dV, so that P and dS are the matrix unit's register operand as they are.
Only what is in flight differs: every row sees the same operations in the same order, so the bits are the anchor's.
"""

from __future__ import annotations

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

from rl_engine.ops.attention.hopper_forward import descriptor, shared_rows

QUERIES = 128  # of one program of dQ
KEYS = 128  # of one program of dK and dV
STEP = gl.constexpr(64)  # rows of a block in shared memory
REGISTERS = 240  # of a thread that computes


@gluon.jit
def place(heads, TOGETHER: gl.constexpr):
    """(head, tile) of this program: TOGETHER heads side by side, then the next tile, then other heads, so that programs
    that run at once read the same rows."""
    span = gl.num_programs(0) // heads * TOGETHER
    rest = gl.program_id(0) % span
    return gl.program_id(0) // span * TOGETHER + rest % TOGETHER, rest // TOGETHER


@gluon.jit
def clear_behind(block, last, N: gl.constexpr, ROWS: gl.constexpr):
    """Rows of a block of N in shared memory behind ``last`` become +0: they are another sample's."""
    held = block.load(ROWS)
    n = gl.arange(0, N, layout=gl.SliceLayout(1, ROWS))
    block.store(gl.where((n <= last)[:, None], held, gl.zeros_like(held)))


@gluon.jit
def fold_queries(
    part: gl.constexpr, k_s, v_s, q_s, do_s, full_k, full_v, full_q, empty_q, full_do, empty_do, lse_s, delta_s, dk, dv,
    c, scale, first, count, start, length, kv_head, dk_token, dk_head, dv_token, dv_head,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 of the program's 128 keys, by four warps."""
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLS: gl.constexpr = gl.SliceLayout(0, S_MMA)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_MMA, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    mine, diagonal = first + STEP * part, first // STEP * STEP
    blocks = (length - diagonal + STEP - 1) // STEP
    keys = mine + gl.arange(0, STEP, layout=gl.SliceLayout(1, S_MMA))
    n = gl.arange(0, STEP, layout=COLS)
    zero = gl.zeros((STEP, STEP), gl.float32, layout=S_MMA)
    dk_acc = gl.zeros((STEP, D), gl.float32, layout=O_MMA)
    dv_acc = gl.zeros((STEP, D), gl.float32, layout=O_MMA)
    k, v = k_s.index(part), v_s.index(part)
    mbarrier.wait(full_k, 0)
    mbarrier.wait(full_v, 0)
    for member in range(0, GROUP):
        if part == 1:  # the first block's queries are in front of all these keys
            turn = member * blocks
            slot, phase = turn % STAGES, turn // STAGES & 1
            mbarrier.wait(full_q.index(slot), phase)
            mbarrier.wait(full_do.index(slot), phase)
            mbarrier.arrive(empty_q.index(slot))
            mbarrier.arrive(empty_do.index(slot))
        for block in range(part, blocks):
            turn = member * blocks + block
            slot, phase = turn % STAGES, turn // STAGES & 1
            query = diagonal + block * STEP
            q, do = q_s.index(slot), do_s.index(slot)
            mbarrier.wait(full_q.index(slot), phase)
            if query + STEP > length:  # both groups write the same zeros
                mbarrier.wait(full_do.index(slot), phase)
                clear_behind(q, length - query - 1, STEP, ROWS)
                clear_behind(do, length - query - 1, STEP, ROWS)
                fence_async_shared()
                gl.thread_barrier()
            lse_M = lse_s.index(slot).load(COLS)
            s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(full_do.index(slot), phase)
            dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            delta_M = delta_s.index(slot).load(COLS)
            s = warpgroup_mma_wait(1, deps=[s])
            p = gl.exp2(gl.fma(s, zero + c, zero - lse_M[None, :]))
            if query < mine + STEP - 1:
                p = gl.where(keys[:, None] <= (query + n)[None, :], p, 0.0)
            p_op = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
            dv_acc = warpgroup_mma(p_op, do, dv_acc, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds_op = gl.convert_layout((p * (dp - delta_M[None, :])).to(gl.bfloat16), OPERAND)
            dk_acc = warpgroup_mma(ds_op, q, dk_acc, is_async=True)
            dv_acc, p_op = warpgroup_mma_wait(1, deps=[dv_acc, p_op])
            mbarrier.arrive(empty_do.index(slot))
            dk_acc, ds_op = warpgroup_mma_wait(0, deps=[dk_acc, ds_op])
            mbarrier.arrive(empty_q.index(slot))
    n = STEP * part + gl.arange(0, STEP, layout=gl.SliceLayout(1, O_MMA))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_MMA))
    rows, valid = (start + first + n).to(gl.int64)[:, None], (n < count)[:, None]
    gl.store(
        dk + rows * dk_token + kv_head * dk_head + cols[None, :], (dk_acc * scale).to(dk.dtype.element_ty), mask=valid
    )
    gl.store(dv + rows * dv_token + kv_head * dv_head + cols[None, :], dv_acc.to(dv.dtype.element_ty), mask=valid)


@gluon.jit
def fold_first(
    k_s, v_s, q_s, do_s, full_k, full_v, full_q, empty_q, full_do, empty_do, lse_s, delta_s, dk, dv,
    c, scale, first, count, start, length, kv_head, dk_token, dk_head, dv_token, dv_head,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    fold_queries(0, k_s, v_s, q_s, do_s, full_k, full_v, full_q, empty_q, full_do, empty_do, lse_s, delta_s, dk, dv,
                 c, scale, first, count, start, length, kv_head, dk_token, dk_head, dv_token, dv_head,
                 GROUP, D, STAGES)  # fmt: skip


@gluon.jit
def fold_second(
    k_s, v_s, q_s, do_s, full_k, full_v, full_q, empty_q, full_do, empty_do, lse_s, delta_s, dk, dv,
    c, scale, first, count, start, length, kv_head, dk_token, dk_head, dv_token, dv_head,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    fold_queries(1, k_s, v_s, q_s, do_s, full_k, full_v, full_q, empty_q, full_do, empty_do, lse_s, delta_s, dk, dv,
                 c, scale, first, count, start, length, kv_head, dk_token, dk_head, dv_token, dv_head,
                 GROUP, D, STAGES)  # fmt: skip


@gluon.jit
def bring_queries(
    q_d, k_d, v_d, do_d, lse, delta, k_s, v_s, q_s, do_s, lse_s, delta_s,
    full_k, full_v, full_q, empty_q, full_do, empty_do, first, start, length, kv_head, lse_head, delta_head,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies K and V, then Q with LSE and dO with delta block by block, head by head, into slots that both groups have
    given back. LSE and delta go through registers: their rows start anywhere, the copy engine reads from multiples of
    16 bytes. Behind the sample they are 0."""
    n = gl.arange(0, STEP, layout=gl.BlockedLayout([2], [32], [1], [0]))
    diagonal = first // STEP * STEP
    blocks = (length - diagonal + STEP - 1) // STEP
    mbarrier.expect(full_k, 2 * k_d.block_type.nbytes)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(k_d, [start + first + STEP * part, kv_head * D], full_k, k_s.index(part))
    mbarrier.expect(full_v, 2 * v_d.block_type.nbytes)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(v_d, [start + first + STEP * part, kv_head * D], full_v, v_s.index(part))
    for turn in range(0, GROUP * blocks):
        slot, phase = turn % STAGES, (turn // STAGES & 1) ^ 1
        head, query = kv_head * GROUP + turn // blocks, diagonal + turn % blocks * STEP
        row, inside = start + query, n < length - query
        lse_M = gl.load(lse + head.to(gl.int64) * lse_head + row + n, mask=inside, other=0.0)
        delta_M = gl.load(delta + head.to(gl.int64) * delta_head + row + n, mask=inside, other=0.0)
        mbarrier.wait(empty_q.index(slot), phase)
        lse_s.index(slot).store(lse_M)
        gl.thread_barrier()
        mbarrier.expect(full_q.index(slot), q_d.block_type.nbytes)
        tma.async_copy_global_to_shared(q_d, [row, head * D], full_q.index(slot), q_s.index(slot))
        mbarrier.wait(empty_do.index(slot), phase)
        delta_s.index(slot).store(delta_M)
        gl.thread_barrier()
        mbarrier.expect(full_do.index(slot), do_d.block_type.nbytes)
        tma.async_copy_global_to_shared(do_d, [row, head * D], full_do.index(slot), do_s.index(slot))


@gluon.jit
def attention_hopper_dkv_kernel(
    q_d, k_d, v_d, do_d, lse, delta, dk, dv, items, c, scale,
    dk_token, dk_head, dv_token, dv_head, lse_head, delta_head, kv_heads,
    ROWS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    TOGETHER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV of 128 keys of one KV head. items int32 [tiles, 4]: first key's position, count, the sample's first row
    and length. ROWS: layout of 64 rows in shared memory."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kv_head, tile = place(kv_heads, TOGETHER)
    item = items + tile * 4
    first, count, start, length = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, STEP, D], ROWS)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [2, STEP, D], ROWS)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, STEP, D], ROWS)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, STEP, D], ROWS)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], LINE)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEP], LINE)
    full_k = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full_q = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_q = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_do = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_do = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full_k, count=1)
    mbarrier.init(full_v, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full_q.index(i), count=1)
        mbarrier.init(full_do.index(i), count=1)
        mbarrier.init(empty_q.index(i), count=2)
        mbarrier.init(empty_do.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (fold_first, (k_s, v_s, q_s, do_s, full_k, full_v, full_q, empty_q, full_do, empty_do, lse_s, delta_s,
                          dk, dv, c, scale, first, count, start, length, kv_head, dk_token, dk_head, dv_token,
                          dv_head, GROUP, D, STAGES)),
            (fold_second, (k_s, v_s, q_s, do_s, full_k, full_v, full_q, empty_q, full_do, empty_do, lse_s, delta_s,
                           dk, dv, c, scale, first, count, start, length, kv_head, dk_token, dk_head, dv_token,
                           dv_head, GROUP, D, STAGES)),
            (bring_queries, (q_d, k_d, v_d, do_d, lse, delta, k_s, v_s, q_s, do_s, lse_s, delta_s,
                             full_k, full_v, full_q, empty_q, full_do, empty_do, first, start, length, kv_head,
                             lse_head, delta_head, GROUP, D, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def follow_keys(
    part: gl.constexpr, q_s, do_s, k_s, v_s, full_q, full_do, full_k, empty_k, full_v, empty_v, lse, delta, dq,
    c, scale, first, position, count, head, dq_token, dq_head, lse_head, delta_head,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dQ of 64 of the program's 128 queries, by four warps."""
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_MMA, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    last, mine = position + count - 1, position + STEP * part
    blocks = gl.minimum((mine + STEP - 1) // N, last // N) + 1
    whole = (mine + 1) // N
    n = STEP * part + gl.arange(0, STEP, layout=gl.SliceLayout(1, S_MMA))
    keys = gl.arange(0, N, layout=gl.SliceLayout(0, S_MMA))
    at = head.to(gl.int64)
    lse_M = gl.load(lse + at * lse_head + first + n, mask=n < count, other=0.0)
    delta_M = gl.load(delta + at * delta_head + first + n, mask=n < count, other=0.0)
    zero = gl.zeros((STEP, N), gl.float32, layout=S_MMA)
    acc = gl.zeros((STEP, D), gl.float32, layout=O_MMA)
    q, do = q_s.index(part), do_s.index(part)
    mbarrier.wait(full_q.index(part), 0)
    mbarrier.wait(full_do.index(part), 0)
    for block in range(0, blocks):
        slot, phase = block % STAGES, block // STAGES & 1
        k, v = k_s.index(slot), v_s.index(slot)
        mbarrier.wait(full_k.index(slot), phase)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(full_v.index(slot), phase)
        dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(gl.fma(s, zero + c, zero - lse_M[:, None]))
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(empty_v.index(slot))
        ds = p * (dp - delta_M[:, None])
        if block >= whole:
            ds = gl.where((block * N + keys)[None, :] <= (position + n)[:, None], ds, 0.0)
            if block * N + N - 1 > last:  # both groups write the same zeros
                clear_behind(k, last - block * N, N, ROWS)
                fence_async_shared()
                gl.thread_barrier()
        ds_op = gl.convert_layout(ds.to(gl.bfloat16), OPERAND)
        acc = warpgroup_mma(ds_op, k, acc, is_async=True)
        acc, ds_op = warpgroup_mma_wait(0, deps=[acc, ds_op])
        mbarrier.arrive(empty_k.index(slot))
    n = STEP * part + gl.arange(0, STEP, layout=gl.SliceLayout(1, O_MMA))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_MMA))
    to = dq + (first + n).to(gl.int64)[:, None] * dq_token + head * dq_head + cols[None, :]
    gl.store(to, (acc * scale).to(dq.dtype.element_ty), mask=(n < count)[:, None])


@gluon.jit
def follow_first(
    q_s, do_s, k_s, v_s, full_q, full_do, full_k, empty_k, full_v, empty_v, lse, delta, dq,
    c, scale, first, position, count, head, dq_token, dq_head, lse_head, delta_head,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    follow_keys(0, q_s, do_s, k_s, v_s, full_q, full_do, full_k, empty_k, full_v, empty_v, lse, delta, dq,
                c, scale, first, position, count, head, dq_token, dq_head, lse_head, delta_head,
                D, N, STAGES)  # fmt: skip


@gluon.jit
def follow_second(
    q_s, do_s, k_s, v_s, full_q, full_do, full_k, empty_k, full_v, empty_v, lse, delta, dq,
    c, scale, first, position, count, head, dq_token, dq_head, lse_head, delta_head,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    follow_keys(1, q_s, do_s, k_s, v_s, full_q, full_do, full_k, empty_k, full_v, empty_v, lse, delta, dq,
                c, scale, first, position, count, head, dq_token, dq_head, lse_head, delta_head,
                D, N, STAGES)  # fmt: skip


@gluon.jit
def bring_keys(
    q_d, do_d, k_d, v_d, q_s, do_s, k_s, v_s, full_q, full_do, full_k, empty_k, full_v, empty_v,
    first, start, blocks, q_column, k_column, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies Q and dO, then K and V block by block, into slots that both groups have given back."""
    for part in gl.static_range(2):
        at = [first + STEP * part, q_column]
        mbarrier.expect(full_q.index(part), q_d.block_type.nbytes)
        tma.async_copy_global_to_shared(q_d, at, full_q.index(part), q_s.index(part))
        mbarrier.expect(full_do.index(part), do_d.block_type.nbytes)
        tma.async_copy_global_to_shared(do_d, at, full_do.index(part), do_s.index(part))
    for block in range(0, blocks):
        slot, phase = block % STAGES, (block // STAGES & 1) ^ 1
        at = [start + block * N, k_column]
        mbarrier.wait(empty_k.index(slot), phase)
        mbarrier.expect(full_k.index(slot), k_d.block_type.nbytes)
        tma.async_copy_global_to_shared(k_d, at, full_k.index(slot), k_s.index(slot))
        mbarrier.wait(empty_v.index(slot), phase)
        mbarrier.expect(full_v.index(slot), v_d.block_type.nbytes)
        tma.async_copy_global_to_shared(v_d, at, full_v.index(slot), v_s.index(slot))


@gluon.jit
def attention_hopper_dq_kernel(
    q_d, do_d, k_d, v_d, lse, delta, dq, items, c, scale, dq_token, dq_head, lse_head, delta_head, heads,
    ROWS: gl.constexpr, BLOCK_ROWS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, TOGETHER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ of 128 queries of one head. items int32 [tiles, 4]: first row, its position, count, the sample's first row.
    ROWS, BLOCK_ROWS: layouts of 64 and of N rows in shared memory."""
    head, tile = place(heads, TOGETHER)
    item = items + tile * 4
    first, position, count, start = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, STEP, D], ROWS)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [2, STEP, D], ROWS)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], BLOCK_ROWS)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], BLOCK_ROWS)
    full_q = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full_do = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full_q.index(i), count=1)
        mbarrier.init(full_do.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
        mbarrier.init(empty_k.index(i), count=2)
        mbarrier.init(empty_v.index(i), count=2)
    fence_async_shared()
    blocks = (position + count - 1) // N + 1
    gl.warp_specialize(
        [
            (follow_first, (q_s, do_s, k_s, v_s, full_q, full_do, full_k, empty_k, full_v, empty_v, lse, delta, dq,
                            c, scale, first, position, count, head, dq_token, dq_head, lse_head, delta_head,
                            D, N, STAGES)),
            (follow_second, (q_s, do_s, k_s, v_s, full_q, full_do, full_k, empty_k, full_v, empty_v, lse, delta, dq,
                             c, scale, first, position, count, head, dq_token, dq_head, lse_head, delta_head,
                             D, N, STAGES)),
            (bring_keys, (q_d, do_d, k_d, v_d, q_s, do_s, k_s, v_s, full_q, full_do, full_k, empty_k, full_v, empty_v,
                          first, start, blocks, head * D, head // GROUP * D, N, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def gradients_of_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    items: Tensor,
    numbers: tuple[float, float],
    stages: int,
) -> None:
    """dk, dv [T, kv_heads, D] (bf16; fp32 for a proof) of key tiles, from bf16 q, dout [T, heads, D], k, v and fp32
    lse, delta [T, heads] with neighbouring rows; ``stages`` blocks of Q and dO in flight."""
    heads, width, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    if not items.shape[0]:
        return
    layout = shared_rows(width)
    attention_hopper_dkv_kernel[(kv_heads * items.shape[0],)](
        *(*(descriptor(x, layout) for x in (q, k, v, dout)), lse, delta, dk, dv, items, *numbers),
        *(*dk.stride()[:2], *dv.stride()[:2], lse.stride(1), delta.stride(1), kv_heads),
        ROWS=layout,
        GROUP=heads // kv_heads,
        D=width,
        STAGES=stages,
        TOGETHER=kv_heads,
        REGISTERS=REGISTERS,
        num_warps=4,
        enable_fp_fusion=False,
    )


def gradients_of_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    items: Tensor,
    numbers: tuple[float, float],
    keys: int,
    stages: int,
) -> None:
    """dq [T, heads, D] (bf16; fp32 for a proof) of query tiles; blocks of ``keys`` (64 or 128) keys, ``stages`` of them
    in flight."""
    heads, width, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    if not items.shape[0]:
        return
    rows, block = shared_rows(width), shared_rows(width, keys)
    attention_hopper_dq_kernel[(heads * items.shape[0],)](
        *(descriptor(x, rows) for x in (q, dout)),
        *(descriptor(x, block, keys) for x in (k, v)),
        *(lse, delta, dq, items, *numbers, *dq.stride()[:2], lse.stride(1), delta.stride(1), heads),
        ROWS=rows,
        BLOCK_ROWS=block,
        GROUP=heads // kv_heads,
        D=width,
        N=keys,
        STAGES=stages,
        TOGETHER=heads // kv_heads,
        REGISTERS=REGISTERS,
        num_warps=4,
        enable_fp_fusion=False,
    )
