"""dW on Hopper with warps of their own for loads and for products: fold units folded in registers, one tile a program.

Why the order holds: each of three warp groups owns 64 rows of the gradient tile; for every fold unit it runs one chain
from +0 (the first step of a unit ignores the old accumulator), tokens ascending, 64 a step and 16 an instruction, then
adds the chain to the total that began as the gradient. Warp groups share only the loaded tiles and may drift apart,
which hides one's additions behind another's products.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS, COLUMNS, DEPTH = 192, 128, 64


@gluon.jit
def _place(tile, M, N, BM: gl.constexpr, BN: gl.constexpr, G: gl.constexpr):
    """(first row, first column) of a tile: G row tiles walk the columns together."""
    tiles_m = (M + BM - 1) // BM
    width = G * ((N + BN - 1) // BN)
    first = (tile // width) * G
    size = min(tiles_m - first, G)
    return (first + (tile % width) % size) * BM, ((tile % width) // size) * BN


@gluon.jit
def _load(
    dy, x, a0, a1, a2, b, full, empty, COUNT, M, N, tiles,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, M, N, BM, BN, G)
        for s in range(COUNT):
            slot = step % S
            mbarrier.wait(empty.index(slot), ((step // S) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(x, [s * BK, n], bar, b.index(slot))
            tma.async_copy_global_to_shared(dy, [s * BK, m], bar, a0.index(slot))
            tma.async_copy_global_to_shared(dy, [s * BK, m + 64], bar, a1.index(slot))
            tma.async_copy_global_to_shared(dy, [s * BK, m + 128], bar, a2.index(slot))
            step += 1


@gluon.jit
def _multiply(
    grad, steps, a, b, full, empty, COUNT, M, N, sg, tiles,
    OFFSET: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, S: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, M, N, BM, BN, G)
        row = m + OFFSET + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        column = n + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        inside = (row < M)[:, None] & (column < N)[None, :]
        at = grad + row.to(gl.int64)[:, None] * sg + column[None, :]
        total = gl.load(at, mask=inside, other=0.0)
        acc = gl.zeros((64, BN), gl.float32, layout=layout)
        going = False
        for s in range(COUNT):
            slot = step % S
            ends = gl.load(steps + 3 * s + 2) == 1
            mbarrier.wait(full.index(slot), (step // S) & 1)
            acc = warpgroup_mma(a.index(slot).permute((1, 0)), b.index(slot), acc, use_acc=going)
            mbarrier.arrive(empty.index(slot), count=1)
            if ends:
                total = total + acc
            going = ends == 0
            step += 1
        gl.store(at, total, mask=inside)


@gluon.jit(do_not_specialize=["COUNT"])
def fold_specialized_kernel(
    dy, x, grad, steps, COUNT, M, N, sg,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, G: gl.constexpr,
    AL: gl.constexpr, BL: gl.constexpr,
):  # fmt: skip
    """grad fp32 [M, N] += chains; dy and x are descriptors [T, M], [T, N] in tiles of [BK, 64] and [BK, BN]."""
    a0 = gl.allocate_shared_memory(gl.bfloat16, [S, BK, 64], AL)
    a1 = gl.allocate_shared_memory(gl.bfloat16, [S, BK, 64], AL)
    a2 = gl.allocate_shared_memory(gl.bfloat16, [S, BK, 64], AL)
    b = gl.allocate_shared_memory(gl.bfloat16, [S, BK, BN], BL)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    fence_async_shared()
    tiles = ((M + BM - 1) // BM) * ((N + BN - 1) // BN)
    gl.warp_specialize(
        [
            (_multiply, (grad, steps, a0, b, full, empty, COUNT, M, N, sg, tiles, 0, BM, BN, S, G)),
            (_multiply, (grad, steps, a1, b, full, empty, COUNT, M, N, sg, tiles, 64, BM, BN, S, G)),
            (_multiply, (grad, steps, a2, b, full, empty, COUNT, M, N, sg, tiles, 128, BM, BN, S, G)),
            (_load, (dy, x, a0, a1, a2, b, full, empty, COUNT, M, N, tiles, BM, BN, BK, S, G)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )


def fold(dy: Tensor, x: Tensor, grad: Tensor, steps: Tensor, *, stages: int, group: int, programs: int) -> None:
    """grad fp32 [N, K] += chains of units that are whole steps; ``steps`` as ``triton_gemm.fold_steps`` has them."""
    m, n = grad.shape
    al, bl = (gl.NVMMASharedLayout.get_default_for([DEPTH, width], gl.bfloat16) for width in (64, COLUMNS))
    tiles = triton.cdiv(m, ROWS) * triton.cdiv(n, COLUMNS)
    fold_specialized_kernel[(min(tiles, programs),)](
        TensorDescriptor.from_tensor(dy, [DEPTH, 64], al),
        TensorDescriptor.from_tensor(x, [DEPTH, COLUMNS], bl),
        *(grad, steps, steps.shape[0] - 1, m, n, grad.stride(0)),
        BM=ROWS, BN=COLUMNS, BK=DEPTH, S=stages, G=group, AL=al, BL=bl, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
