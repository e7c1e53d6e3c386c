"""Selected logp on a GPU in Triton.

Why the order holds: a program owns whole rows of one vocabulary group and walks its tiles of 128 columns ascending; a
tile's sums are the written tree (``triton_functions.tree_rows``), so rows per program, warps and chunks of columns
change nothing. A chunk that ends inside a group hands the group's running state on in fp32; groups are merged ascending
by one program a row. Between hidden states and dz no logits of a whole group exist: the head writes chunks that stay in
the second-level cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.lm_head import HeadProvider
from rl_engine.ops.selected_logp import TILE, LogpProvider, LogpState, group_columns
from rl_engine.ops.triton_functions import exp, launch, log, tree_rows
from rl_engine.ops.weight import Weight

CHUNK_BYTES = 17 << 20  # fp32 logits alive at a time in ``score``; well inside the second-level cache
CHUNK_ROWS = 2048


@triton.jit
def merge_states(m, l, w, mt, lt, wt):
    """The state (m, l, w) with a later one (mt, lt, wt) merged behind it; -inf is the empty state."""
    top = tl.maximum(m, mt)
    a = exp(m - top)
    b = exp(mt - top)
    fresh = m == float("-inf")
    none = mt == float("-inf")
    lj = l * a + lt * b
    wj = w * a + wt * b
    return (
        tl.where(none, m, top),
        tl.where(none, l, tl.where(fresh, lt, lj)),
        tl.where(none, w, tl.where(fresh, wt, wj)),
    )


@triton.jit
def tile_state(zs, exists, N: tl.constexpr):
    """(m, l, w) of scaled logits zs [R, N] where ``exists``."""
    m = tl.max(tl.where(exists, zs, float("-inf")), 1) + 0.0
    e = tl.where(exists, exp(zs - m[:, None]), 0.0)
    ez = tl.where(exists & (zs != float("-inf")), e * zs, 0.0)
    none = m == float("-inf")
    return m, tl.where(none, 0.0, tree_rows(e)), tl.where(none, 0.0, tree_rows(ez))


@triton.jit
def existing(bits, row, column, inside, stride, HAS_MASK: tl.constexpr):
    """inside [R, N], and with a mask its bit of (row [R], column [N])."""
    if HAS_MASK:
        byte = tl.load(bits + row[:, None] * stride + (column // 8)[None, :], mask=inside, other=0)
        return inside & (((byte >> (column % 8)[None, :].to(tl.uint8)) & 1) != 0)
    return inside


@triton.jit(do_not_specialize=["T", "first", "n"])
def logp_tiles_kernel(
    z, bits, targets, ms, ls, ws, zt, T, first, n, width, sz, sbits, inv_t,
    R: tl.constexpr, N: tl.constexpr, HAS_MASK: tl.constexpr, RESUME: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """States ms, ls, ws [groups, T] of the groups in z [T, n], whose first column is ``first`` of the vocabulary.

    ``width`` columns a group. RESUME: z starts inside a group (the only one here), whose state so far is in ms, ls, ws.
    """
    group = tl.program_id(1)
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    live = row < T
    column = tl.arange(0, N)
    start = group * width
    stop = tl.minimum(start + width, n)
    y = tl.load(targets + row, mask=live, other=-1) - first
    here = live & (y >= start) & (y < stop)
    chosen = tl.load(z + row * sz + y, mask=here, other=0.0)
    tl.store(zt + row, chosen * inv_t, mask=here)
    out = group * T + row
    if RESUME:
        m = tl.load(ms + out, mask=live, other=float("-inf"))
        l = tl.load(ls + out, mask=live, other=0.0)
        w = tl.load(ws + out, mask=live, other=0.0)
    else:
        m = tl.full((R,), float("-inf"), tl.float32)
        l = tl.zeros((R,), tl.float32)
        w = tl.zeros((R,), tl.float32)
    for tile in tl.range(start, stop, N, num_stages=STAGES):
        inside = live[:, None] & (tile + column < stop)[None, :]
        zs = tl.load(z + row[:, None] * sz + (tile + column)[None, :], mask=inside, other=0.0) * inv_t
        exists = existing(bits, row, first + tile + column, inside, sbits, HAS_MASK)
        mt, lt, wt = tile_state(zs, exists, N)
        m, l, w = merge_states(m, l, w, mt, lt, wt)
    tl.store(ms + out, m, mask=live)
    tl.store(ls + out, l, mask=live)
    tl.store(ws + out, w, mask=live)


@triton.jit(do_not_specialize=["T", "groups"])
def logp_merge_kernel(ms, ls, ws, m_out, l_out, w_out, T, groups, R: tl.constexpr):
    """Merges states ms, ls, ws [groups, T], ascending, into m_out, l_out, w_out [T]."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < T
    m = tl.load(m_out + row, mask=live, other=float("-inf"))
    l = tl.load(l_out + row, mask=live, other=0.0)
    w = tl.load(w_out + row, mask=live, other=0.0)
    for group in range(0, groups):
        at = group * T + row
        mt = tl.load(ms + at, mask=live, other=float("-inf"))
        lt = tl.load(ls + at, mask=live, other=0.0)
        wt = tl.load(ws + at, mask=live, other=0.0)
        m, l, w = merge_states(m, l, w, mt, lt, wt)
    tl.store(m_out + row, m, mask=live)
    tl.store(l_out + row, l, mask=live)
    tl.store(w_out + row, w, mask=live)


@triton.jit(do_not_specialize=["T"])
def logp_finish_kernel(m, l, w, zt, logp, entropy, T, R: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < T
    mv = tl.load(m + row, mask=live, other=0.0)
    lv = tl.load(l + row, mask=live, other=1.0)
    wv = tl.load(w + row, mask=live, other=0.0)
    zv = tl.load(zt + row, mask=live, other=0.0)
    log_l = log(lv)
    tl.store(logp + row, (zv - mv) - log_l, mask=live)
    tl.store(entropy + row, (mv + log_l) - tl.div_rn(wv, lv), mask=live)


@triton.jit
def gradient_of(z, m, log_l, scale, hit, inv_t):
    """bf16 dz of logits z [R, N]; m, log_l and scale = fl(c inv_t) are [R], hit [R, N] marks the target."""
    p = exp((z * inv_t - m[:, None]) - log_l[:, None])
    return (scale[:, None] * (p - tl.where(hit, 1.0, 0.0))).to(tl.bfloat16)


@triton.jit(do_not_specialize=["T", "first", "n"])
def logits_gradient_kernel(
    z, bits, targets, m, l, c, dz, T, first, n, sz, sbits, sdz, inv_t,
    R: tl.constexpr, N: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """dz bf16 [T, n] of logits z fp32 [T, n], whose first column is ``first`` of the vocabulary."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    live = row < T
    column = tl.program_id(1) * N + tl.arange(0, N)
    mv = tl.load(m + row, mask=live, other=0.0)
    log_l = log(tl.load(l + row, mask=live, other=1.0))
    scale = tl.load(c + row, mask=live, other=0.0) * inv_t
    y = tl.load(targets + row, mask=live, other=-1) - first
    inside = live[:, None] & (column < n)[None, :]
    zv = tl.load(z + row[:, None] * sz + column[None, :], mask=inside, other=0.0)
    found = gradient_of(zv, mv, log_l, scale, column[None, :] == y[:, None], inv_t)
    exists = existing(bits, row, first + column, inside, sbits, HAS_MASK)
    tl.store(dz + row[:, None] * sdz + column[None, :], tl.where(exists, found, 0.0), mask=inside)


def _mask(mask: Tensor | None, z: Tensor) -> tuple[Tensor, int, bool]:
    if mask is None:
        return z, 0, False
    assert mask.dtype == torch.uint8 and mask.stride(1) == 1
    return mask, mask.stride(0), True


class TritonLogp(LogpProvider):
    rows, warps, stages = 8, 4, 3  # rows of a program; any choice has the same bits

    def _tiles(
        self,
        z: Tensor,
        first: int,
        width: int,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        partial: tuple[Tensor, Tensor, Tensor],
        zs_target: Tensor,
        resume: bool,
    ) -> None:
        (t, n), (bits, stride, has_mask) = z.shape, _mask(mask, z)
        assert z.stride(1) == 1 and z.dtype == torch.float32
        launch(
            logp_tiles_kernel,
            (triton.cdiv(t, self.rows), triton.cdiv(n, width)),
            *(z, bits, targets.contiguous(), *partial, zs_target, t, first, n, width, z.stride(0), stride, inv_t),
            warps=self.warps, R=self.rows, N=TILE, HAS_MASK=has_mask, RESUME=resume, STAGES=self.stages,
        )  # fmt: skip

    def merge_columns(
        self,
        z: Tensor,
        first: int,
        vocabulary: int,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        state: LogpState,
    ) -> None:
        width = group_columns(vocabulary)
        shape = (triton.cdiv(z.shape[1], width), z.shape[0])
        partial = tuple(torch.empty(shape, dtype=torch.float32, device=z.device) for _ in range(3))
        self._tiles(z, first, width, inv_t, mask, targets, partial, state.zs_target, False)  # type: ignore[arg-type]
        self.merge_groups(*partial, state)

    def merge_groups(self, m: Tensor, l: Tensor, w: Tensor, state: LogpState) -> None:
        m, l, w = m.contiguous(), l.contiguous(), w.contiguous()
        groups, t = m.shape
        launch(logp_merge_kernel, (triton.cdiv(t, 128),), m, l, w, state.m, state.l, state.w, t, groups, warps=4, R=128)

    def finish(self, state: LogpState) -> tuple[Tensor, Tensor]:
        logp, entropy = torch.empty_like(state.m), torch.empty_like(state.m)
        t = state.m.numel()
        launch(
            logp_finish_kernel, (triton.cdiv(t, 128),),
            *(state.m, state.l, state.w, state.zs_target, logp, entropy, t), warps=4, R=128,
        )  # fmt: skip
        return logp, entropy

    def logits_gradient(
        self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, targets: Tensor, state: LogpState, c: Tensor
    ) -> Tensor:
        dz = torch.empty(z.shape, dtype=torch.bfloat16, device=z.device)
        self._gradient(z, first, inv_t, mask, targets, state, c, dz)
        return dz

    def _gradient(
        self,
        z: Tensor,
        first: int,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        state: LogpState,
        c: Tensor,
        dz: Tensor,
    ) -> None:
        (t, n), (bits, stride, has_mask) = z.shape, _mask(mask, z)
        assert z.stride(1) == 1 and dz.stride(1) == 1
        launch(
            logits_gradient_kernel,
            (triton.cdiv(t, 4), triton.cdiv(n, 1024)),
            *(z, bits, targets.contiguous(), state.m, state.l, c, dz),
            *(t, first, n, z.stride(0), stride, dz.stride(0), inv_t),
            warps=8, R=4, N=1024, HAS_MASK=has_mask,
        )  # fmt: skip

    def merge_group(
        self,
        hidden: Tensor,
        weight: Weight,
        columns: tuple[int, int],
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        state: LogpState,
        head: HeadProvider,
    ) -> None:
        t, width = hidden.shape[0], columns[1] - columns[0]
        partial = tuple(torch.empty((1, t), dtype=torch.float32, device=hidden.device) for _ in range(3))
        for rows, first, last in chunks(t, *columns):
            z = head.logits(hidden[rows], weight, (first, last))
            self._tiles(
                *(z, first, width, inv_t, None if mask is None else mask[rows], targets[rows]),
                *((partial[0][:, rows], partial[1][:, rows], partial[2][:, rows]), state.zs_target[rows]),
                first > columns[0],
            )
        self.merge_groups(*partial, state)

    def group_gradient(
        self,
        hidden: Tensor,
        weight: Weight,
        columns: tuple[int, int],
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        state: LogpState,
        c: Tensor,
        head: HeadProvider,
    ) -> Tensor:
        dz = torch.empty((hidden.shape[0], columns[1] - columns[0]), dtype=torch.bfloat16, device=hidden.device)
        for rows, first, last in chunks(hidden.shape[0], *columns):
            z = head.logits(hidden[rows], weight, (first, last))
            part = LogpState(state.m[rows], state.l[rows], state.w[rows], state.zs_target[rows])
            bits = None if mask is None else mask[rows]
            out = dz[rows, first - columns[0] : last - columns[0]]
            self._gradient(z, first, inv_t, bits, targets[rows], part, c[rows], out)
        return dz


def chunks(tokens: int, first: int, last: int) -> list[tuple[slice, int, int]]:
    """(rows, first column, last column + 1): equal pieces of whole tiles, whose fp32 logits fit ``CHUNK_BYTES``."""
    rows = min(tokens, CHUNK_ROWS)
    tiles = -(-(last - first) // TILE)
    most = max(1, CHUNK_BYTES // (4 * TILE * max(rows, 1)))
    pieces = -(-tiles // most)
    width = -(-tiles // pieces) * TILE
    return [
        (slice(row, min(row + rows, tokens)), column, min(column + width, last))
        for row in range(0, tokens, rows or 1)
        for column in range(first, last, width)
    ]
