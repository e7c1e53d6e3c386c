"""Matrix products on a GPU in Triton: the contract's chain, one fp32 accumulator per output, K ascending from +0.

Why the order holds: a program owns its output tile alone and walks K from the axis' first element with one accumulator,
which ``tl.dot`` hands from step to step; the matrix unit adds 16 elements at a time, ascending, in every tile shape, so
tiles, warps, stages and programs change nothing. Nothing is split over K. A step that reaches past the axis loads +0.
FP fusion is off (``FUSION``), so that an epilogue's product and sum round separately.

``gemm_kernel`` takes any strides (forward, dX, swapped operands for few rows), ``gemm_tma_kernel`` reads its tiles with
the bulk tensor copy engine, and ``fold_kernel`` is dW: all fold units of a tile in one program, each unit a chain of
its own from +0, added into the gradient tile that the program holds; ``fold_tma_kernel`` is its form for the copy
engine.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.device import multiprocessors

FUSION = {"enable_fp_fusion": False}


@dataclasses.dataclass(frozen=True)
class Tile:
    """One way to run a product; every way has the same bits.

    Attributes:
        rows, columns, depth: output tile and K step; ``depth`` is a multiple of the matrix unit's 16.
        swap: the weight's columns lie along the tile's rows (wgmma needs 64 there, tokens may be 8).
        tma: tiles come through tensor descriptors.
        group: tiles of rows that walk the columns together, for the second-level cache.
        persistent: programs of a persistent grid per multiprocessor; 0 launches one program a tile.
        specialize: loads and products on warps of their own: with ``persistent`` in a product, alone in a fold
            (``gluon_fold``).
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    swap: bool = False
    tma: bool = False
    group: int = 8
    persistent: int = 0
    specialize: bool = False

    def __post_init__(self) -> None:
        assert self.depth % 16 == 0 and self.rows >= 16 and self.columns >= 8


@triton.jit
def tile_of(pid, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: GROUP row tiles walk the columns together."""
    tiles_m = tl.cdiv(M, BM)
    width = GROUP * tl.cdiv(N, BN)
    first = (pid // width) * GROUP
    size = min(tiles_m - first, GROUP)
    return first + (pid % width) % size, (pid % width) // size


def _gemm(
    a, b, c, r, M, N, K, sam, sak, sbn, sbk, scm, scn, srm, srn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """c[M, N] = a[M, K] b[N, K]^T (+ r), any strides; rows and columns outside are read as row or column 0."""
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    left_m = M - pid_m * BM
    left_n = N - pid_n * BN
    in_m = rm < left_m
    in_n = rn < left_n
    a += pid_m.to(tl.int64) * BM * sam
    b += pid_n.to(tl.int64) * BN * sbn
    pa = a + rm[:, None] * sam + rk[None, :] * sak
    pb = b + rn[None, :] * sbn + rk[:, None] * sbk
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if EVEN:
            x = tl.load(pa, mask=in_m[:, None], other=0.0)
            y = tl.load(pb, mask=in_n[None, :], other=0.0)
        else:
            x = tl.load(pa, mask=in_m[:, None] & (rk < K - k)[None, :], other=0.0)
            y = tl.load(pb, mask=in_n[None, :] & (rk < K - k)[:, None], other=0.0)
        acc = tl.dot(x, y, acc)
        pa += BK * sak
        pb += BK * sbk
    inside = in_m[:, None] & in_n[None, :]
    if RESIDUAL:
        r += pid_m.to(tl.int64) * BM * srm + pid_n.to(tl.int64) * BN * srn
        acc = tl.load(r + rm[:, None] * srm + rn[None, :] * srn, mask=inside, other=0.0).to(tl.float32) + acc
    c += pid_m.to(tl.int64) * BM * scm + pid_n.to(tl.int64) * BN * scn
    tl.store(c + rm[:, None] * scm + rn[None, :] * scn, acc.to(c.dtype.element_ty), mask=inside)


# The token axis is data: no kernel is compiled anew for a row count. ``swap`` puts it on N.
gemm_kernel = triton.jit(_gemm, do_not_specialize=["M"])
swapped_kernel = triton.jit(_gemm, do_not_specialize=["N"])


def _gemm_tma(
    a, b, c, r, M, N, K, scm, scn, srm, srn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    RESIDUAL: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """As gemm_kernel, with descriptors a and b: [M, K] where A_ROWS (K contiguous), [K, M] otherwise; b alike.

    The copy engine writes +0 where a tile leaves its tensor. PROGRAMS > 0: a persistent grid of that many programs.
    """
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    step = tiles if PROGRAMS == 0 else PROGRAMS
    for pid in tl.range(tl.program_id(0), tiles, step, flatten=SPECIALIZE, warp_specialize=SPECIALIZE):
        pid_m, pid_n = tile_of(pid, M, N, BM, BN, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            if A_ROWS:
                x = a.load([pid_m * BM, k])
            else:
                x = a.load([k, pid_m * BM]).T
            if B_ROWS:
                y = b.load([pid_n * BN, k]).T
            else:
                y = b.load([k, pid_n * BN])
            acc = tl.dot(x, y, acc)
        rm = tl.arange(0, BM)
        rn = tl.arange(0, BN)
        inside = (rm < M - pid_m * BM)[:, None] & (rn < N - pid_n * BN)[None, :]
        if RESIDUAL:
            rp = r + pid_m.to(tl.int64) * BM * srm + pid_n.to(tl.int64) * BN * srn
            acc = tl.load(rp + rm[:, None] * srm + rn[None, :] * srn, mask=inside, other=0.0).to(tl.float32) + acc
        cp = c + pid_m.to(tl.int64) * BM * scm + pid_n.to(tl.int64) * BN * scn
        tl.store(cp + rm[:, None] * scm + rn[None, :] * scn, acc.to(c.dtype.element_ty), mask=inside)


gemm_tma_kernel = triton.jit(_gemm_tma, do_not_specialize=["M"])
swapped_tma_kernel = triton.jit(_gemm_tma, do_not_specialize=["N"])


@triton.jit(do_not_specialize=["COUNT"])
def fold_kernel(
    dy, x, g, steps, COUNT, M, N, sdy, sx, sg,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """g[M, N] fp32 = fl(g + chain) unit by unit, chain = dy[tokens, M]^T x[tokens, N] of one fold unit.

    ``steps`` int32 [COUNT + 1, 3]: first token, tokens (at most BK), 1 where the unit ends; the next step is read while
    one computes.
    """
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    in_m = rm < M - pid_m * BM
    in_n = rn < N - pid_n * BN
    dy += pid_m * BM
    x += pid_n * BN
    inside = in_m[:, None] & in_n[None, :]
    pg = g + pid_m.to(tl.int64) * BM * sg + pid_n * BN + rm[:, None] * sg + rn[None, :]
    total = tl.load(pg, mask=inside, other=0.0)
    acc = tl.zeros((BM, BN), tl.float32)
    first = tl.load(steps)
    count = tl.load(steps + 1)
    ends = tl.load(steps + 2)
    for _ in range(0, COUNT):
        steps += 3
        next_first = tl.load(steps)
        next_count = tl.load(steps + 1)
        next_ends = tl.load(steps + 2)
        valid = rk < count
        t = first.to(tl.int64)
        p = tl.load(dy + t * sdy + rk[:, None] * sdy + rm[None, :], mask=valid[:, None] & in_m[None, :], other=0.0)
        q = tl.load(x + t * sx + rk[:, None] * sx + rn[None, :], mask=valid[:, None] & in_n[None, :], other=0.0)
        acc = tl.dot(p.T, q, acc)
        if ends == 1:
            total += acc
            acc = tl.zeros((BM, BN), tl.float32)
        first = next_first
        count = next_count
        ends = next_ends
    tl.store(pg, total, mask=inside)


@triton.jit(do_not_specialize=["COUNT"])
def fold_tma_kernel(
    dy, x, g, steps, COUNT, M, N, sg,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As fold_kernel where every unit is whole steps, so that step s reads the tokens from s BK.

    dy and x are descriptors in tiles of [BK, BM] and [BK, BN].
    """
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    inside = (rm < M - pid_m * BM)[:, None] & (rn < N - pid_n * BN)[None, :]
    pg = g + pid_m.to(tl.int64) * BM * sg + pid_n * BN + rm[:, None] * sg + rn[None, :]
    total = tl.load(pg, mask=inside, other=0.0)
    acc = tl.zeros((BM, BN), tl.float32)
    for s in range(0, COUNT):
        p = dy.load([s * BK, pid_m * BM])
        q = x.load([s * BK, pid_n * BN])
        acc = tl.dot(p.T, q, acc)
        if tl.load(steps + 3 * s + 2) == 1:
            total += acc
            acc = tl.zeros((BM, BN), tl.float32)
    tl.store(pg, total, mask=inside)


def descriptor(x: Tensor, outer: int, depth: int) -> tuple[Any, bool]:
    """(descriptor of x [outer, K] read in tiles, whether K is contiguous); x may be a transposed view."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if x.stride(1) == 1:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [outer, depth]), True
    return TensorDescriptor(x, list(x.shape[::-1]), list(x.stride()[::-1]), [depth, outer]), False


def copyable(x: Tensor) -> bool:
    """Whether the copy engine can read x: aligned to 16 bytes, every row too, one axis contiguous."""
    outer, inner = x.stride()
    wide = outer if inner == 1 else inner
    return x.data_ptr() % 16 == 0 and wide % 8 == 0 and 1 in (outer, inner)


def product(a: Tensor, b: Tensor, out: Tensor, tile: Tile, residual: Tensor | None = None) -> None:
    """``out = a b^T`` (+ residual), a bf16 [M, K], b bf16 [N, K], any strides; out bf16 or fp32 [M, N]."""
    assert a.shape[1] == b.shape[1] and out.shape == (a.shape[0], b.shape[0]), (a.shape, b.shape, out.shape)
    assert a.dtype == b.dtype == torch.bfloat16
    if not out.numel():
        return
    r = out if residual is None else residual
    if tile.swap:
        a, b, out, r = b, a, out.T, r.T
    (m, k), n = a.shape, b.shape[0]
    tiles = triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns)
    shape = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "GROUP": tile.group}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, **FUSION}
    if tile.tma:
        programs = tile.persistent * multiprocessors(out.device.index)  # a constant: nothing compiles for a tile count
        (da, a_rows), (db, b_rows) = descriptor(a, tile.rows, tile.depth), descriptor(b, tile.columns, tile.depth)
        kernel = swapped_tma_kernel if tile.swap else gemm_tma_kernel
        kernel[(min(tiles, programs or tiles),)](
            *(da, db, out, r, m, n, k, *out.stride(), *r.stride()),
            **shape, **options, RESIDUAL=residual is not None, A_ROWS=a_rows, B_ROWS=b_rows,
            PROGRAMS=programs, SPECIALIZE=tile.specialize,
        )  # fmt: skip
        return
    kernel = swapped_kernel if tile.swap else gemm_kernel
    kernel[(tiles,)](
        *(a, b, out, r, m, n, k, *a.stride(), *b.stride(), *out.stride(), *r.stride()),
        **shape, **options, RESIDUAL=residual is not None, EVEN=k % tile.depth == 0,
    )  # fmt: skip


Bounds = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=64)
def fold_steps(bounds: Bounds, depth: int, device: torch.device) -> Tensor:
    """int32 [steps + 1, 3] on the device: first token, tokens, 1 where the unit ends; one empty step behind the end."""
    steps = [
        (start, min(depth, last - start), int(start + depth >= last))
        for first, last in bounds
        for start in range(first, last, depth)
    ]
    return torch.tensor([*steps, (0, 0, 0)], dtype=torch.int32, device=device)


def whole_steps(bounds: Bounds, depth: int) -> bool:
    """Whether the units follow each other from token 0 and each is a multiple of ``depth`` long."""
    token = 0
    for first, last in bounds:
        if first != token or (last - first) % depth:
            return False
        token = last
    return True


@functools.lru_cache(maxsize=64)
def _spread(bounds: Bounds, depth: int, device: torch.device) -> tuple[Tensor, Tensor, Bounds]:
    """(token of every row behind padding, rows that are padding, the units' bounds there)."""
    tokens, empty, spread = [], [], []
    for first, last in bounds:
        start, missing = len(tokens), -(last - first) % depth
        tokens += [*range(first, last), *([first] * missing)]
        empty += range(len(tokens) - missing, len(tokens))
        spread.append((start, len(tokens)))
    rows = [torch.tensor(found, dtype=torch.int64, device=device) for found in (tokens, empty)]
    return rows[0], rows[1], tuple(spread)


def padded(x: Tensor, bounds: Bounds, depth: int) -> tuple[Tensor, Bounds]:
    """x with zero rows behind every unit, up to a multiple of ``depth``, and the units' new bounds."""
    tokens, empty, spread = _spread(bounds, depth, x.device)
    return x.index_select(0, tokens).index_fill_(0, empty, 0.0), spread


def fold(dy: Tensor, x: Tensor, grad: Tensor, bounds: Bounds, tile: Tile) -> None:
    """grad fp32 [N, K] += one chain per fold unit of dy bf16 [T, N] and x bf16 [T, K], units ascending.

    With ``tile.tma`` units that are no whole steps are first copied apart, zeros between them; a zero tail changes no
    bit of a chain that started at the unit's first token.
    """
    assert dy.stride(1) == x.stride(1) == grad.stride(1) == 1 and grad.dtype == torch.float32
    (m, n), count = grad.shape, triton.cdiv(grad.shape[0], tile.rows) * triton.cdiv(grad.shape[1], tile.columns)
    bounds = tuple((first, last) for first, last in bounds if last > first)
    if not bounds or not count:
        return
    shape = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "GROUP": tile.group}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, **FUSION}
    if tile.tma:
        if not whole_steps(bounds, tile.depth):
            x, _ = padded(x, bounds, tile.depth)
            dy, bounds = padded(dy, bounds, tile.depth)
        steps = fold_steps(bounds, tile.depth, dy.device)
        if tile.specialize:
            from rl_engine.ops import gluon_fold

            assert (tile.rows, tile.columns, tile.depth) == (gluon_fold.ROWS, gluon_fold.COLUMNS, gluon_fold.DEPTH)
            programs = multiprocessors(dy.device.index)
            gluon_fold.fold(dy, x, grad, steps, stages=tile.stages, group=tile.group, programs=programs)
            return
        tiles = [descriptor(t.T, width, tile.depth)[0] for t, width in ((dy, tile.rows), (x, tile.columns))]
        fold_tma_kernel[(count,)](*tiles, grad, steps, steps.shape[0] - 1, m, n, grad.stride(0), **shape, **options)
        return
    steps = fold_steps(bounds, tile.depth, dy.device)
    fold_kernel[(count,)](
        *(dy, x, grad, steps, steps.shape[0] - 1, m, n, dy.stride(0), x.stride(0), grad.stride(0)), **shape, **options
    )


def default_tile(rows: int, columns: int, *, tma: bool) -> Tile:
    """A good tile for ``rows`` tokens without any measurement; every choice has the same bits."""
    wide = columns >= 16384
    if not tma:
        if rows <= 16:
            return Tile(16, 64, 128, 4, 3) if wide else Tile(16, 32, 128, 4, 4)
        if rows <= 64:
            return Tile(64, 64, 64, 4, 3)
        return Tile(64, 64, 64, 4, 3) if rows <= 256 else Tile(128, 128, 64, 8, 3)
    if rows <= 16:
        return Tile(16, 64, 128, 4, 3) if wide else Tile(64, 16, 256, 4, 5, swap=True, tma=True)
    if rows <= 64:
        return Tile(64, 64, 64, 4, 4, tma=True) if wide else Tile(64, 64, 128, 4, 6, tma=True)
    if rows <= 128:
        return Tile(128, 64, 64, 4, 3, tma=True) if wide else Tile(64, 64, 128, 4, 5, tma=True)
    if rows <= 256:
        return Tile(128, 128, 64, 8, 5, tma=True, persistent=1) if wide else Tile(64, 128, 64, 4, 6, tma=True)
    if rows <= 512 and columns < 6144:
        return Tile(128, 128, 64, 4, 5, tma=True)
    return Tile(128, 256, 64, 8, 3, tma=True)


FOLD_TILE = Tile(128, 128, 64, 8, 4, tma=True)
FOLD_POINTERS = Tile(128, 64, 64, 8, 3)
FOLD_HOPPER = Tile(192, 128, 64, 4, 5, tma=True, group=4, specialize=True)
