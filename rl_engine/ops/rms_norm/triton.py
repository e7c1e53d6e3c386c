"""RMSNorm on a GPU, in Triton.

Why the bits agree. A row's products are folded in chunks of 1,024 columns, then summed by the pair tree, whatever
number of warps or rows a program has. A gain's gradient is the pair tree over blocks of 64 tokens: a program sums an
aligned piece of 8 tokens, which is a subtree of the block's, and a second kernel joins pieces and adds blocks
ascending.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.numerics.contract import Contract
from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rms_norm import NormProvider
from rl_engine.ops.triton_functions import inverse_root, launch, tree_columns, tree_rows
from rl_engine.ops.weight import Weight

FOLD_AXIS, BLOCK = Contract().fold_axis, Contract().gain_block
PIECE = 8  # tokens whose gain terms one program sums: an aligned subtree of a block


@triton.jit
def load_chunk(at, cols, valid, H):
    """fp32 [R, W] of one chunk of columns; +0 behind the row's end and in rows that do not exist."""
    return tl.load(at + cols[None, :], mask=valid[:, None] & (cols < H)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_gain(w, cols, H):
    """fp32 [1, W]."""
    return tl.load(w + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_chunk(at, cols, y, valid, H):
    tl.store(at + cols[None, :], y, mask=valid[:, None] & (cols < H)[None, :])


@triton.jit
def row_mean(products, H):
    """fl(tree / H) of folded products [R, W]."""
    return tl.div_rn(tree_rows(products), tl.zeros((products.shape[0],), tl.float32) + H.to(tl.float32))


@triton.jit
def rms_norm_fwd_kernel(
    x, branch, w, y, stream, rows, heads, x_token, branch_token, H, eps,
    R: tl.constexpr, W: tl.constexpr, CHUNKS: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """R rows of width H; a row is one head of one token. BRANCH: the row is bf16(fl(x + branch)), branch fp32, and is
    stored to ``stream`` too."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid, n = row < rows, tl.arange(0, W)
    at, to = x + (row // heads * x_token + row % heads * H)[:, None], (row * H)[:, None]
    chunks = ()
    for i in tl.static_range(CHUNKS):
        chunk = load_chunk(at, i * W + n, valid, H)
        if BRANCH:
            added = load_chunk(branch + (row * branch_token)[:, None], i * W + n, valid, H)
            rounded = (chunk + added).to(tl.bfloat16)
            store_chunk(stream + to, i * W + n, rounded, valid, H)
            chunk = rounded.to(tl.float32)
        folded = chunk * chunk if i == 0 else folded + chunk * chunk  # noqa: F821
        chunks = chunks + (chunk,)  # noqa: RUF005
    r = inverse_root(row_mean(folded, H) + eps)[:, None]
    for i in tl.static_range(CHUNKS):
        gain = load_gain(w, i * W + n, H)
        store_chunk(y + to, i * W + n, (chunks[i] * r * gain).to(tl.bfloat16), valid, H)


@triton.jit
def backward_rows(
    x, dy, w, dx, terms, added, row, to, valid, H, eps,
    W: tl.constexpr, CHUNKS: tl.constexpr, TERMS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dx of R rows, stored; with ADD ``bf16(fl(added + bf16(dx)))``. Returns the gain's terms, fp32 [R, W] a chunk,
    stored too with TERMS. x and dy point at each row [R, 1]."""
    n = tl.arange(0, W)
    xs, dys = (), ()
    for i in tl.static_range(CHUNKS):
        chunk = load_chunk(x, i * W + n, valid, H)
        folded = chunk * chunk if i == 0 else folded + chunk * chunk  # noqa: F821
        xs = xs + (chunk,)  # noqa: RUF005
        dys = dys + (load_chunk(dy, i * W + n, valid, H),)  # noqa: RUF005
    r = inverse_root(row_mean(folded, H) + eps)[:, None]
    for i in tl.static_range(CHUNKS):
        product = dys[i] * load_gain(w, i * W + n, H) * (xs[i] * r)
        products = product if i == 0 else products + product  # noqa: F821
    s = row_mean(products, H)[:, None]
    found = ()
    for i in tl.static_range(CHUNKS):
        normed = xs[i] * r
        result = ((dys[i] * load_gain(w, i * W + n, H) - normed * s) * r).to(tl.bfloat16)
        if ADD:
            result = (load_chunk(added + to, i * W + n, valid, H) + result.to(tl.float32)).to(tl.bfloat16)
        store_chunk(dx + to, i * W + n, result, valid, H)
        term = dys[i] * normed
        if TERMS:
            store_chunk(terms + to, i * W + n, term, valid, H)
        found = found + (term,)  # noqa: RUF005
    return found


@triton.jit
def rms_norm_bwd_kernel(
    x, dy, w, dx, terms, added, rows, heads, x_token, dy_token, H, eps,
    R: tl.constexpr, W: tl.constexpr, CHUNKS: tl.constexpr, TERMS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dx of R rows, and with TERMS the gain's terms fp32 [rows, H]."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token, place = row // heads, row % heads * H
    x_at, dy_at = x + (token * x_token + place)[:, None], dy + (token * dy_token + place)[:, None]
    backward_rows(x_at, dy_at, w, dx, terms, added, row, (row * H)[:, None], row < rows, H, eps, W, CHUNKS, TERMS, ADD)


@triton.constexpr_function
def carries(step: int) -> int:
    """How many sums of equal extent meet when the step's own is finished: the trailing ones of ``step``."""
    count = 0
    while step >> count & 1:
        count += 1
    return count


@triton.jit
def rms_norm_bwd_gain_kernel(
    x, dy, w, dx, partial, added, pieces, x_token, dy_token, H, eps,
    R: tl.constexpr, TOKENS: tl.constexpr, W: tl.constexpr, CHUNKS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dx of a piece of TOKENS tokens [T, H], and the pair tree of its gain terms: partial fp32 [pieces, H].

    pieces int32 [n, 2]: first token and count. The piece goes R rows at a time; sums of aligned runs wait on a stack,
    one place a level, as in a binary counter.
    """
    piece = tl.program_id(0)
    first, count = tl.load(pieces + piece * 2), tl.load(pieces + piece * 2 + 1)
    n = tl.arange(0, W)
    waiting = ()
    for step in tl.static_range(TOKENS // R):
        index = step * R + tl.arange(0, R)
        row, valid = (first + index).to(tl.int64), index < count
        at, to = x + (row * x_token)[:, None], (row * H)[:, None]
        dy_at = dy + (row * dy_token)[:, None]
        terms = backward_rows(at, dy_at, w, dx, dx, added, row, to, valid, H, eps, W, CHUNKS, False, ADD)
        sums = ()
        for i in tl.static_range(CHUNKS):
            sums = sums + (tree_columns(terms[i]),)  # noqa: RUF005
        waiting = waiting + (sums,)  # noqa: RUF005
        for _ in tl.static_range(carries(step)):
            joined = ()
            for i in tl.static_range(CHUNKS):
                joined = joined + (waiting[-2][i] + waiting[-1][i],)  # noqa: RUF005
            waiting = waiting[:-2] + (joined,)  # noqa: RUF005
    for i in tl.static_range(CHUNKS):
        tl.store(partial + piece.to(tl.int64) * H + i * W + n, waiting[0][i], mask=i * W + n < H)


@triton.jit
def unit_sums_kernel(terms, bounds, sums, token_stride, width, heads,
                     TOKENS: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """sums fp32 [units, heads, width]: blocks of TOKENS rows of terms fp32 [rows, heads, width] by the pair tree, added
    ascending from +0. bounds int32 [units + 1]: first row of each unit. Grid: columns, heads, units."""
    cols, head, unit = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(bounds + unit), tl.load(bounds + unit + 1)
    n, total = tl.arange(0, TOKENS), tl.zeros((C,), tl.float32)
    for start in tl.range(first, last, TOKENS, num_stages=STAGES):
        rows, inside = (start + n).to(tl.int64)[:, None], (start + n < last)[:, None] & (cols < width)[None, :]
        block = tl.load(terms + rows * token_stride + head * width + cols[None, :], mask=inside, other=0.0)
        total = total + tree_columns(block)
    tl.store(sums + (unit * heads + head).to(tl.int64) * width + cols, total, mask=cols < width)


@triton.jit
def add_gain_kernel(sums, grad, units, heads, width, C: tl.constexpr, STAGES: tl.constexpr):
    """grad fp32 [width] += sums fp32 [units, heads, width]: heads folded ascending from +0, units ascending."""
    cols = tl.program_id(0) * C + tl.arange(0, C)
    total, unit_sum = tl.load(grad + cols, mask=cols < width, other=0.0), tl.zeros((C,), tl.float32)
    for i in tl.range(0, units * heads, num_stages=STAGES):
        unit_sum = unit_sum + tl.load(sums + i * width + cols, mask=cols < width, other=0.0)
        if i % heads == heads - 1:
            total = total + unit_sum
            unit_sum = tl.zeros((C,), tl.float32)
    tl.store(grad + cols, total, mask=cols < width)


def shape_of(x: Tensor) -> tuple[int, int, int, int]:
    """(rows, heads, width, token stride) of x [T, H] or [T, heads, D]."""
    heads = x.shape[1] if x.dim() == 3 else 1
    assert x.dtype == torch.bfloat16 and x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x.shape[0] * heads, heads, x.shape[-1], x.stride(0)


def chunks_of(width: int) -> tuple[int, int]:
    """(columns of a chunk, chunks) of the fold over an axis."""
    chunk = min(FOLD_AXIS, triton.next_power_of_2(width))
    return chunk, -(-width // chunk)


@functools.lru_cache(maxsize=32)
def unit_bounds(layout: PackedLayout, device: torch.device) -> Tensor:
    """int32 [units + 1] on the device."""
    return layout.unit_offsets.to(torch.int32).to(device)


@functools.lru_cache(maxsize=32)
def pieces_of(layout: PackedLayout, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(int32 [n, 2]: first token and count of every piece of ``size`` tokens, counted from its unit's start; int32
    [units + 1]: each unit's first piece)."""
    rows, bounds = [], [0]
    for first, last in layout.unit_bounds:
        rows += [(start, min(size, last - start)) for start in range(first, last, size)]
        bounds.append(len(rows))
    pieces = torch.tensor(rows, dtype=torch.int32).view(-1, 2)
    return pieces.to(device), torch.tensor(bounds, dtype=torch.int32).to(device)


class TritonNorm(NormProvider):
    def forward(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        rows, heads, width, stride = shape_of(x)
        y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        self._forward(x, x, 0, weight, y, y, rows, heads, width, stride, eps)
        return y

    def forward_residual(self, stream: Tensor, branch: Tensor, weight: Weight, eps: float) -> tuple[Tensor, Tensor]:
        """(bf16(fl(stream + branch)), its norm), both bf16 [T, H], of stream bf16 and branch fp32 [T, H]: what an
        epilogue without the residual leaves to do."""
        rows, heads, width, stride = shape_of(stream)
        assert branch.dtype == torch.float32 and branch.stride(1) == 1 and branch.shape == stream.shape
        added, y = (torch.empty(stream.shape, dtype=torch.bfloat16, device=stream.device) for _ in range(2))
        self._forward(stream, branch, branch.stride(0), weight, y, added, rows, heads, width, stride, eps)
        return added, y

    @staticmethod
    def _forward(
        x: Tensor,
        branch: Tensor,
        branch_stride: int,
        weight: Weight,
        y: Tensor,
        stream: Tensor,
        rows: int,
        heads: int,
        width: int,
        stride: int,
        eps: float,
    ) -> None:
        chunk, chunks = chunks_of(width)
        size, warps = forward_cut(width)
        launch(
            rms_norm_fwd_kernel,
            (-(-rows // size),),
            *(x, branch, weight.value, y, stream, rows, heads, stride, branch_stride, width, eps),
            warps=warps,
            R=size,
            W=chunk,
            CHUNKS=chunks,
            BRANCH=branch_stride > 0,
        )

    def backward(
        self, dy: Tensor, x: Tensor, weight: Weight, eps: float, want_terms: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows, heads, width, stride = shape_of(x)
        dx = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        terms = torch.empty(x.shape, dtype=torch.float32, device=x.device) if want_terms else None
        chunk, chunks = chunks_of(width)
        size, warps = backward_cut(width)
        launch(
            rms_norm_bwd_kernel,
            (-(-rows // size),),
            *(x, dy, weight.value, dx, dx if terms is None else terms, dx),
            *(rows, heads, stride, shape_of(dy)[3], width, eps),
            warps=warps,
            R=size,
            W=chunk,
            CHUNKS=chunks,
            TERMS=want_terms,
            ADD=False,
        )
        return dx, terms

    def unit_sums(self, terms: Tensor, layout: PackedLayout) -> Tensor:
        return self.fold_partials(terms.contiguous(), unit_bounds(layout, terms.device), BLOCK)

    @staticmethod
    def fold_partials(terms: Tensor, bounds: Tensor, tokens: int) -> Tensor:
        _, heads, width = terms.shape
        units, columns = bounds.numel() - 1, min(64, triton.next_power_of_2(width))
        stages = 4 if tokens > PIECE else 10
        sums = torch.empty(units, heads, width, dtype=torch.float32, device=terms.device)
        launch(
            unit_sums_kernel,
            (-(-width // columns), heads, units),
            *(terms, bounds, sums, heads * width, width, heads),
            warps=4 if tokens > 1 else 2,
            stages=stages,
            TOKENS=tokens,
            C=columns,
            STAGES=stages,
        )
        return sums

    def add_gain(self, sums: Tensor, grad: Tensor) -> None:
        units, heads, width = sums.shape
        grid = (-(-width // 64),)
        launch(add_gain_kernel, grid, sums, grad, units, heads, width, warps=2, stages=10, C=64, STAGES=10)

    def gradients(
        self, dy: Tensor, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None, exchange: Exchange = ALONE
    ) -> Tensor:
        if weight.grad is None or x.dim() == 3 or not exchange.alone:
            return super().gradients(dy, x, weight, eps, layout, exchange)
        assert layout is not None
        return self.backward_with_gain(dy, x, weight, eps, layout, None)

    def backward_with_gain(
        self, dy: Tensor, x: Tensor, weight: Weight, eps: float, layout: PackedLayout, added: Tensor | None
    ) -> Tensor:
        """dx bf16 [T, H] in one pass with the gain's gradient, which is added into ``weight.grad``; with ``added`` bf16
        [T, H] the residual's ``bf16(fl(added + dx))``."""
        rows, _, width, stride = shape_of(x)
        assert weight.grad is not None and layout.tokens == rows
        assert added is None or added.is_contiguous()
        dx = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        pieces, bounds = pieces_of(layout, PIECE, x.device)
        partial = torch.empty(pieces.shape[0], 1, width, dtype=torch.float32, device=x.device)
        chunk, chunks = chunks_of(width)
        size, warps = gain_cut(width)
        launch(
            rms_norm_bwd_gain_kernel,
            (pieces.shape[0],),
            *(x, dy, weight.value, dx, partial, dx if added is None else added, pieces),
            *(stride, shape_of(dy)[3], width, eps),
            warps=warps,
            R=size,
            TOKENS=PIECE,
            W=chunk,
            CHUNKS=chunks,
            ADD=added is not None,
        )
        self.add_gain(self.fold_partials(partial, bounds, BLOCK // PIECE), weight.grad)
        return dx


def forward_cut(width: int) -> tuple[int, int]:
    """(rows, warps) of a program; every choice gives the same bits."""
    if width > FOLD_AXIS:
        return 1, 4
    return max(1, 4096 // triton.next_power_of_2(width)), 4


def backward_cut(width: int) -> tuple[int, int]:
    if width > FOLD_AXIS:
        return 1, 2
    return max(1, 4096 // triton.next_power_of_2(width)), 4


def gain_cut(width: int) -> tuple[int, int]:
    return (2, 4) if width > FOLD_AXIS else (4, 4)
