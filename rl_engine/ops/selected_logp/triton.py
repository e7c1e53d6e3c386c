"""Selected logp on a GPU in Triton.

Why the order holds: a tile of 128 columns is one row of a program's block, summed by the written tree
(``triton_functions.tree_rows``), so its state depends on nothing else; one thread merges a group's tiles ascending from
the empty state, another the groups. Rows and tiles per program, warps and chunks of columns change nothing. Where a
group's logits are not kept from forward to backward, they exist in chunks that live for one kernel, and
dz is made in the epilogue of the product that recomputes its logits, the same chain.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.lm_head import HeadProvider
from rl_engine.ops.selected_logp import LogpProvider, LogpState
from rl_engine.ops.selected_logp.vocabulary import TILE, group_columns, groups
from rl_engine.ops.triton_functions import exp, launch, log, tree_rows
from rl_engine.ops.triton_gemm import Tile, copyable, descriptor, tile_of
from rl_engine.ops.weight import Weight

CHUNK_BYTES = 52 << 20  # fp32 logits alive at a time in ``score``
CHUNK_ROWS = 4096
PROCESSORS = 132  # multiprocessors that a chunk's width is made for; any width has the same bits


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
def tile_state(zs, exists):
    """(m, l, w) of scaled logits zs [R, 128], a tile a row, where ``exists``."""
    m = tl.max(tl.where(exists, zs, float("-inf")), 1) + 0.0
    e = tl.where(exists, exp(zs - m[:, None]), 0.0)
    ez = tl.where(exists & (zs != float("-inf")), e * zs, 0.0)
    none = m == float("-inf")
    return m, tl.where(none, 0.0, tree_rows(e)), tl.where(none, 0.0, tree_rows(ez))


@triton.jit
def existing(bits, row, column, inside, stride, HAS_MASK: tl.constexpr):
    """inside [R, N], and with a mask its bit; row and column broadcast to [R, N]."""
    if HAS_MASK:
        byte = tl.load(bits + row * stride + column // 8, mask=inside, other=0)
        return inside & (((byte >> (column % 8).to(tl.uint8)) & 1) != 0)
    return inside


@triton.jit(do_not_specialize=["T", "first", "at"])
def logp_tiles_kernel(
    z, bits, targets, ms, ls, ws, zt, T, first, n, at, sz, sbits, inv_t,
    R: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """States ms, ls, ws [tiles, T] of the tiles in z [T, n], whose first column is ``first`` of the vocabulary.

    They are written from tile ``at``. The scaled logit of a target inside z goes to zt [T].
    """
    part = tl.arange(0, R * TILES)
    row = (tl.program_id(0) * R + part // TILES).to(tl.int64)
    tile = tl.program_id(1) * TILES + part % TILES
    column = tile[:, None] * N + tl.arange(0, N)[None, :]
    inside = (row < T)[:, None] & (column < n)
    zs = tl.load(z + row[:, None] * sz + column, mask=inside, other=0.0) * inv_t
    m, l, w = tile_state(zs, existing(bits, row[:, None], first + column, inside, sbits, HAS_MASK))
    live = (row < T) & (tile * N < n)
    out = (at + tile) * T.to(tl.int64) + row
    tl.store(ms + out, m, mask=live)
    tl.store(ls + out, l, mask=live)
    tl.store(ws + out, w, mask=live)
    y = tl.load(targets + row, mask=live, other=-1) - first
    here = live & (y >= tile * N) & (y < tl.minimum(tile * N + N, n))
    tl.store(zt + row, tl.load(z + row * sz + y, mask=here, other=0.0) * inv_t, mask=here)


@triton.jit(do_not_specialize=["T", "tiles"])
def logp_groups_kernel(
    ms, ls, ws, mg, lg, wg, T, tiles, GROUP: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """States mg, lg, wg [groups, T]: the tiles ms, ls, ws [tiles, T] of each group of GROUP, ascending from the empty
    state."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    live = row < T
    m = tl.full((R,), float("-inf"), tl.float32)
    l = tl.zeros((R,), tl.float32)
    w = tl.zeros((R,), tl.float32)
    start = tl.program_id(1) * GROUP
    for tile in tl.range(start, tl.minimum(start + GROUP, tiles), num_stages=STAGES):
        at = tile * T.to(tl.int64) + row
        mt = tl.load(ms + at, mask=live, other=float("-inf"))
        lt = tl.load(ls + at, mask=live, other=0.0)
        wt = tl.load(ws + at, mask=live, other=0.0)
        m, l, w = merge_states(m, l, w, mt, lt, wt)
    out = tl.program_id(1) * T.to(tl.int64) + row
    tl.store(mg + out, m, mask=live)
    tl.store(lg + out, l, mask=live)
    tl.store(wg + out, w, mask=live)


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


@triton.jit(do_not_specialize=["T", "first"])
def logits_gradient_kernel(
    z, bits, targets, m, l, c, dz, T, first, n, sz, sbits, sdz, inv_t,
    R: tl.constexpr, N: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """dz bf16 [T, n] of logits z fp32 [T, n], whose first column is ``first`` of the vocabulary."""
    row = (tl.program_id(1) * R + tl.arange(0, R)).to(tl.int64)
    live = row < T
    column = tl.program_id(0) * N + tl.arange(0, N)
    mv = tl.load(m + row, mask=live, other=0.0)
    log_l = log(tl.load(l + row, mask=live, other=1.0))
    scale = tl.load(c + row, mask=live, other=0.0) * inv_t
    y = tl.load(targets + row, mask=live, other=-1) - first
    inside = live[:, None] & (column < n)[None, :]
    zv = tl.load(z + row[:, None] * sz + column[None, :], mask=inside, other=0.0)
    found = gradient_of(zv, mv, log_l, scale, column[None, :] == y[:, None], inv_t)
    exists = existing(bits, row[:, None], first + column[None, :], inside, sbits, HAS_MASK)
    tl.store(dz + row[:, None] * sdz + column[None, :], tl.where(exists, found, 0.0), mask=inside)


@triton.jit(do_not_specialize=["T", "first"])
def dz_product_kernel(
    h, weight, bits, targets, m, l, c, dz, T, first, n, K, sbits, sdz, inv_t,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """As logits_gradient_kernel, with z = h[T, K] weight[n, K]^T recomputed in place: h and weight are descriptors."""
    pid_m, pid_n = tile_of(tl.program_id(0), T, n, BM, BN, GROUP)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(h.load([pid_m * BM, k]), weight.load([pid_n * BN, k]).T, acc)
    row = (pid_m * BM + tl.arange(0, BM)).to(tl.int64)
    live = row < T
    column = pid_n * BN + tl.arange(0, BN)
    mv = tl.load(m + row, mask=live, other=0.0)
    log_l = log(tl.load(l + row, mask=live, other=1.0))
    scale = tl.load(c + row, mask=live, other=0.0) * inv_t
    y = tl.load(targets + row, mask=live, other=-1) - first
    inside = live[:, None] & (column < n)[None, :]
    found = gradient_of(acc, mv, log_l, scale, column[None, :] == y[:, None], inv_t)
    exists = existing(bits, row[:, None], first + column[None, :], inside, sbits, HAS_MASK)
    tl.store(dz + row[:, None] * sdz + column[None, :], tl.where(exists, found, 0.0), mask=inside)


def _mask(mask: Tensor | None, z: Tensor) -> tuple[Tensor, int, bool]:
    if mask is None:
        return z, 0, False
    assert mask.dtype == torch.uint8 and mask.stride(1) == 1
    return mask, mask.stride(0), True


States = tuple[Tensor, Tensor, Tensor]  # m, l, w


def _states(rows: int, tokens: int, device: torch.device) -> States:
    m, l, w = (torch.empty((rows, tokens), dtype=torch.float32, device=device) for _ in range(3))
    return m, l, w


class TritonLogp(LogpProvider):
    keeps_logits = True
    rows, tiles, warps = 2, 8, 4  # of a program; any choice has the same bits
    dz_tile = Tile(128, 256, 64, 8, 3, tma=True, group=16)

    def _tiles(
        self,
        z: Tensor,
        first: int,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        states: States,
        at: int,
        zs_target: Tensor,
    ) -> None:
        """Writes the states of the tiles of z from row ``at`` of ``states`` [tiles, T]."""
        (t, n), (bits, stride, has_mask) = z.shape, _mask(mask, z)
        assert z.stride(1) == 1 and z.dtype == torch.float32
        launch(
            logp_tiles_kernel,
            (triton.cdiv(t, self.rows), triton.cdiv(n, TILE * self.tiles)),
            *(z, bits, targets.contiguous(), *states, zs_target, t, first, n, at, z.stride(0), stride, inv_t),
            warps=self.warps, R=self.rows, TILES=self.tiles, N=TILE, HAS_MASK=has_mask,
        )  # fmt: skip

    def _merge_tiles(self, states: States, vocabulary: int, state: LogpState) -> None:
        """Merges the tiles ``states`` [tiles, T] of whole groups into ``state``."""
        (tiles, t), group = states[0].shape, group_columns(vocabulary) // TILE
        merged = _states(triton.cdiv(tiles, group), t, states[0].device)
        launch(
            logp_groups_kernel,
            (triton.cdiv(t, 64), merged[0].shape[0]),
            *(*states, *merged, t, tiles),
            warps=2, GROUP=group, R=64, STAGES=4,
        )  # fmt: skip
        self.merge_groups(*merged, state)

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
        states = _states(triton.cdiv(z.shape[1], TILE), z.shape[0], z.device)
        self._tiles(z, first, inv_t, mask, targets, states, 0, state.zs_target)
        self._merge_tiles(states, vocabulary, state)

    def scan(
        self,
        hidden: Tensor,
        weight: Weight,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        head: HeadProvider,
        kept: Sequence[Tensor] = (),
    ) -> LogpState:
        t, vocabulary = hidden.shape[0], weight.shape[0]
        state = LogpState.empty(t, hidden.device)
        for rows in row_blocks(t):
            part = LogpState(state.m[rows], state.l[rows], state.w[rows], state.zs_target[rows])
            bits = None if mask is None else mask[rows]
            states = _states(triton.cdiv(vocabulary, TILE), part.m.numel(), hidden.device)
            whole = groups(vocabulary)[: len(kept)]
            for columns, out in zip(whole, kept, strict=True):
                z = head.logits(hidden[rows], weight, columns, out[rows])
                self._tiles(z, columns[0], inv_t, bits, targets[rows], states, columns[0] // TILE, part.zs_target)
            for columns in column_chunks(part.m.numel(), whole[-1][1] if whole else 0, vocabulary):
                z = head.logits(hidden[rows], weight, columns)
                self._tiles(z, columns[0], inv_t, bits, targets[rows], states, columns[0] // TILE, part.zs_target)
                del z
            self._merge_tiles(states, vocabulary, part)
        return state

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
            (triton.cdiv(n, 1024), triton.cdiv(t, 4)),
            *(z, bits, targets.contiguous(), state.m, state.l, c, dz),
            *(t, first, n, z.stride(0), stride, dz.stride(0), inv_t),
            warps=8, R=4, N=1024, HAS_MASK=has_mask,
        )  # fmt: skip

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
        z: Tensor | None = None,
    ) -> Tensor:
        if z is not None:
            return self.logits_gradient(z, columns[0], inv_t, mask, targets, state, c)
        values = weight.value[columns[0] : columns[1]]
        dz = torch.empty((hidden.shape[0], values.shape[0]), dtype=torch.bfloat16, device=hidden.device)
        if not dz.numel():  # a context-parallel rank may have no loss token; the copy engine takes no empty tensor
            return dz
        if torch.version.hip is None and copyable(hidden) and copyable(values):
            self._dz_product(hidden, values, columns[0], inv_t, mask, targets, state, c, dz)
            return dz
        for rows in row_blocks(hidden.shape[0]):
            part = LogpState(state.m[rows], state.l[rows], state.w[rows], state.zs_target[rows])
            bits = None if mask is None else mask[rows]
            for first, last in column_chunks(part.m.numel(), *columns):
                z = head.logits(hidden[rows], weight, (first, last))
                out = dz[rows, first - columns[0] : last - columns[0]]
                self._gradient(z, first, inv_t, bits, targets[rows], part, c[rows], out)
                del z
        return dz

    def _dz_product(
        self,
        hidden: Tensor,
        values: Tensor,
        first: int,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        state: LogpState,
        c: Tensor,
        dz: Tensor,
    ) -> None:
        """dz of the head's rows ``values``, without logits in memory."""
        tile, (t, n), (bits, stride, has_mask) = self.dz_tile, dz.shape, _mask(mask, hidden)
        launch(
            dz_product_kernel,
            (triton.cdiv(t, tile.rows) * triton.cdiv(n, tile.columns),),
            *(descriptor(hidden, tile.rows, tile.depth)[0], descriptor(values, tile.columns, tile.depth)[0]),
            *(bits, targets.contiguous(), state.m, state.l, c, dz, t, first, n, hidden.shape[1]),
            *(stride, dz.stride(0), inv_t),
            warps=tile.warps, stages=tile.stages,
            BM=tile.rows, BN=tile.columns, BK=tile.depth, GROUP=tile.group, HAS_MASK=has_mask,
        )  # fmt: skip


def row_blocks(tokens: int) -> list[slice]:
    """Blocks of rows whose logits are made together."""
    return [slice(first, min(first + CHUNK_ROWS, tokens)) for first in range(0, tokens, CHUNK_ROWS)]


def column_chunks(rows: int, first: int, last: int) -> list[tuple[int, int]]:
    """(first, last + 1): pieces of whole tiles whose fp32 logits of ``rows`` rows fit ``CHUNK_BYTES``.

    Of the widths that fit, the one whose product leaves the fewest multiprocessors idle in its last round.
    """
    width = _chunk_tiles(rows, max(1, CHUNK_BYTES // (4 * TILE * max(rows, 1)))) * TILE
    return [(column, min(column + width, last)) for column in range(first, last, width)]


@functools.lru_cache(maxsize=1024)
def _chunk_tiles(rows: int, most: int) -> int:
    def rounds(tiles: int) -> int:  # of a product in blocks of 128 x 256
        return -(-(-(-rows // 128) * -(-tiles // 2)) // PROCESSORS)

    return min(range(max(1, most // 8), most + 1), key=lambda tiles: (rounds(tiles) / tiles, -tiles))
