"""dQ of attention for Hopper: the block step of ``triton_backward``, warp-specialized by hand in Gluon.

One warp brings blocks of K and V into shared memory with the bulk copy engine; two groups of four warps take 64 queries
each. Only what is in flight differs: every row sees the same operations in the same order, so the bits are the
anchor's.
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
    """dq bf16 [T, heads, D] of query tiles; blocks of ``keys`` (64 or 128) keys, ``stages`` of them in flight."""
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
