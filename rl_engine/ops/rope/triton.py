"""Rotary embedding on a GPU, in Triton, alone and fused with QK norm.

The fused kernels round where the separate ones store: QK norm's result is rounded to bf16 before it is rotated, and the
rotated gradient before it enters the norm's backward. So both forms give the same bits, at half the traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.numerics.contract import Contract
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rms_norm.triton import TritonNorm, pieces_of, shape_of
from rl_engine.ops.rope import RopeProvider, RopeTable
from rl_engine.ops.triton_functions import inverse_root, launch, tree_columns, tree_rows
from rl_engine.ops.weight import Weight

GAIN_BLOCK = Contract().gain_block
EACH = 8  # heads of a program that share the angles; in the backward pass one was faster


@triton.jit
def load_half(at, rows, stride, cols, valid):
    """fp32 [R, D / 2]; +0 in rows that do not exist."""
    return tl.load(at + rows[:, None] * stride + cols[None, :], mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_angles(table, places, cols, valid, HALF: tl.constexpr):
    """fp32 [R, D / 2] of the tokens' positions."""
    return tl.load(table + places[:, None] * HALF + cols[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def rope_kernel(x, y, positions, cosine, sine, tokens, sign, x_token, heads,
                R: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """R tokens of one head of width 2 HALF; WIDTH is the power of two from HALF on."""
    token, head = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.program_id(1)
    cols = tl.arange(0, WIDTH)
    valid = token < tokens
    places = tl.load(positions + token, mask=valid, other=0)
    inside = valid[:, None] & (cols < HALF)[None, :]
    at = x + token[:, None] * x_token + head * (2 * HALF) + cols[None, :]
    x1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cosine + places[:, None] * HALF + cols[None, :], mask=inside, other=0.0)
    s = tl.load(sine + places[:, None] * HALF + cols[None, :], mask=inside, other=0.0) * sign
    to = y + (token * heads + head)[:, None] * (2 * HALF) + cols[None, :]
    tl.store(to, (x1 * c - x2 * s).to(tl.bfloat16), mask=inside)
    tl.store(to + HALF, (x2 * c + x1 * s).to(tl.bfloat16), mask=inside)


@triton.jit
def norm_rope_rows(x, w, y, c, s, token, valid, x_token, heads, first, eps,
                   R: tl.constexpr, HALF: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """QK norm, rounded to bf16, then the rotation, of R tokens of EACH heads."""
    cols = tl.arange(0, HALF)
    w1, w2 = tl.load(w + cols).to(tl.float32)[None, :], tl.load(w + HALF + cols).to(tl.float32)[None, :]
    for head in range(first, tl.minimum(first + EACH, heads)):
        at = x + head * (2 * HALF)
        x1, x2 = load_half(at, token, x_token, cols, valid), load_half(at + HALF, token, x_token, cols, valid)
        total = tree_rows(x1 * x1) + tree_rows(x2 * x2)
        r = inverse_root(tl.div_rn(total, tl.zeros((R,), tl.float32) + 2.0 * HALF) + eps)[:, None]
        n1, n2 = (x1 * r * w1).to(tl.bfloat16).to(tl.float32), (x2 * r * w2).to(tl.bfloat16).to(tl.float32)
        to = y + (token * heads + head)[:, None] * (2 * HALF) + cols[None, :]
        tl.store(to, (n1 * c - n2 * s).to(tl.bfloat16), mask=valid[:, None])
        tl.store(to + HALF, (n2 * c + n1 * s).to(tl.bfloat16), mask=valid[:, None])


@triton.jit
def qk_norm_rope_kernel(
    q, k, wq, wk, yq, yk, positions, cosine, sine, tokens, q_token, k_token, heads, kv_heads, eps,
    R: tl.constexpr, HALF: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """R tokens of EACH heads of q or k, which share the tokens' angles. Grid: tokens, groups of q's heads then k's."""
    token, cols = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, HALF)
    valid, first = token < tokens, tl.program_id(1) * EACH
    places = tl.load(positions + token, mask=valid, other=0)
    c, s = load_angles(cosine, places, cols, valid, HALF), load_angles(sine, places, cols, valid, HALF)
    if first < heads:
        norm_rope_rows(q, wq, yq, c, s, token, valid, q_token, heads, first, eps, R, HALF, EACH)
    else:
        first -= tl.cdiv(heads, EACH) * EACH
        norm_rope_rows(k, wk, yk, c, s, token, valid, k_token, kv_heads, first, eps, R, HALF, EACH)


@triton.jit
def norm_rope_bwd_rows(
    dy, x, w, dx, partial, c, s, block, token, valid, dy_token, x_token, heads, first, eps,
    R: tl.constexpr, HALF: tl.constexpr, GAIN: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The rotation back, rounded to bf16, then QK norm's backward, of a gain block of EACH heads."""
    cols, width = tl.arange(0, HALF), tl.zeros((R,), tl.float32) + 2.0 * HALF
    w1, w2 = tl.load(w + cols).to(tl.float32)[None, :], tl.load(w + HALF + cols).to(tl.float32)[None, :]
    for head in range(first, tl.minimum(first + EACH, heads)):
        at = dy + head * (2 * HALF)
        y1, y2 = load_half(at, token, dy_token, cols, valid), load_half(at + HALF, token, dy_token, cols, valid)
        d1, d2 = (y1 * c + y2 * s).to(tl.bfloat16).to(tl.float32), (y2 * c - y1 * s).to(tl.bfloat16).to(tl.float32)
        at = x + head * (2 * HALF)
        x1, x2 = load_half(at, token, x_token, cols, valid), load_half(at + HALF, token, x_token, cols, valid)
        r = inverse_root(tl.div_rn(tree_rows(x1 * x1) + tree_rows(x2 * x2), width) + eps)[:, None]
        n1, n2, g1, g2 = x1 * r, x2 * r, d1 * w1, d2 * w2
        mean = tl.div_rn(tree_rows(g1 * n1) + tree_rows(g2 * n2), width)[:, None]
        to = dx + (token * heads + head)[:, None] * (2 * HALF) + cols[None, :]
        tl.store(to, ((g1 - n1 * mean) * r).to(tl.bfloat16), mask=valid[:, None])
        tl.store(to + HALF, ((g2 - n2 * mean) * r).to(tl.bfloat16), mask=valid[:, None])
        if GAIN:
            at = partial + (block.to(tl.int64) * heads + head) * (2 * HALF) + cols
            tl.store(at, tree_columns(d1 * n1))
            tl.store(at + HALF, tree_columns(d2 * n2))


@triton.jit
def qk_norm_rope_bwd_kernel(
    dq, dk, q, k, wq, wk, xq, xk, part_q, part_k, positions, cosine, sine, pieces,
    dq_token, dk_token, q_token, k_token, heads, kv_heads, eps,
    R: tl.constexpr, HALF: tl.constexpr, GAIN: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Gradients xq, xk before QK norm from dq, dk behind the rotation, and the gain terms' pair tree, of a block of R
    tokens. pieces int32 [n, 2]: first token and count. Grid: blocks, groups of q's heads then k's."""
    block, group, index, cols = tl.program_id(0), tl.program_id(1) * EACH, tl.arange(0, R), tl.arange(0, HALF)
    start, count = tl.load(pieces + block * 2), tl.load(pieces + block * 2 + 1)
    token, valid = (start + index).to(tl.int64), index < count
    places = tl.load(positions + token, mask=valid, other=0)
    c, s = load_angles(cosine, places, cols, valid, HALF), load_angles(sine, places, cols, valid, HALF)
    if group < heads:
        norm_rope_bwd_rows(dq, q, wq, xq, part_q, c, s, block, token, valid,
                           dq_token, q_token, heads, group, eps, R, HALF, GAIN, EACH)  # fmt: skip
    else:
        group -= tl.cdiv(heads, EACH) * EACH
        norm_rope_bwd_rows(dk, k, wk, xk, part_k, c, s, block, token, valid,
                           dk_token, k_token, kv_heads, group, eps, R, HALF, GAIN, EACH)  # fmt: skip


class TritonRope(RopeProvider):
    def rotate(self, x: Tensor, positions: Tensor, table: RopeTable, sign: float) -> Tensor:
        tokens, heads, width = x.shape
        _, _, _, stride = shape_of(x)
        y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        size = 16
        launch(
            rope_kernel,
            (-(-tokens // size), heads),
            *(x, y, positions.contiguous(), table.cosine, table.sine, tokens, sign, stride, heads),
            warps=4,
            R=size,
            HALF=width // 2,
            WIDTH=triton.next_power_of_2(width // 2),
        )
        return y


def can_fuse(width: int) -> bool:
    """Whether the fused kernels take this head_dim: a power of two, at most the fold axis."""
    return width & (width - 1) == 0 and 32 <= width <= Contract().fold_axis


def qk_norm_rope(
    q: Tensor, k: Tensor, q_norm: Weight, k_norm: Weight, eps: float, positions: Tensor, table: RopeTable
) -> tuple[Tensor, Tensor]:
    """QK norm, then rotation, of q bf16 [T, heads, D] and k bf16 [T, kv_heads, D] (any token stride), in one launch."""
    tokens, heads, width = q.shape
    assert can_fuse(width), f"head_dim {width} is not fused"
    yq, yk = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for x in (q, k))
    size = 16
    launch(
        qk_norm_rope_kernel,
        (-(-tokens // size), -(-heads // EACH) - (-k.shape[1] // EACH)),
        *(q, k, q_norm.value, k_norm.value, yq, yk, positions, table.cosine, table.sine, tokens),
        *(shape_of(q)[3], shape_of(k)[3], heads, k.shape[1], eps),
        warps=4,
        R=size,
        HALF=width // 2,
        EACH=EACH,
    )
    return yq, yk


def qk_norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    q_norm: Weight,
    k_norm: Weight,
    eps: float,
    positions: Tensor,
    table: RopeTable,
    layout: PackedLayout,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k before QK norm from those behind the rotation; the gains' gradients are added into the
    weights that train (both or neither)."""
    _, heads, width = q.shape
    assert can_fuse(width), f"head_dim {width} is not fused"
    assert (q_norm.grad is None) == (k_norm.grad is None)
    gain = q_norm.grad is not None
    pieces, bounds = pieces_of(layout, GAIN_BLOCK, q.device)
    xq, xk = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for x in (q, k))
    shapes = ((pieces.shape[0], x.shape[1], width) if gain else (1, 1, 1) for x in (q, k))
    part_q, part_k = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    launch(
        qk_norm_rope_bwd_kernel,
        (pieces.shape[0], heads + k.shape[1]),
        *(dq, dk, q, k, q_norm.value, k_norm.value, xq, xk, part_q, part_k, positions, table.cosine, table.sine),
        *(pieces, shape_of(dq)[3], shape_of(dk)[3], shape_of(q)[3], shape_of(k)[3], heads, k.shape[1], eps),
        warps=8,
        R=GAIN_BLOCK,
        HALF=width // 2,
        GAIN=gain,
        EACH=1,
    )
    if gain:
        norm = TritonNorm()
        for weight, part in ((q_norm, part_q), (k_norm, part_k)):
            assert weight.grad is not None
            norm.add_gain(norm.fold_partials(part, bounds, 1), weight.grad)
    return xq, xk
