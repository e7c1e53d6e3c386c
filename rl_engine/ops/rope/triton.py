"""Rotary embedding on a GPU, in Triton, alone and fused with QK norm.

The fused kernels round where the separate ones store: QK norm's result is rounded to bf16 before it is rotated, and the
rotated gradient before it enters the norm's backward. So both forms give the same bits, at half the traffic.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.numerics.contract import Contract
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rms_norm.triton import TritonNorm, carries, pieces_of, shape_of
from rl_engine.ops.rope import FusedRope, RopeTable
from rl_engine.ops.triton_functions import inverse_root, launch, round_bf16, tree_columns, tree_rows, widen
from rl_engine.ops.weight import Weight

GAIN_BLOCK = Contract().gain_block


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a fused kernel is cut; every choice gives the same bits.

    Attributes:
        tokens: of a program; where the gains train an aligned subtree of a gain block.
        together: of those, the tokens of one step.
        heads: of a program, neighbours in memory.
    """

    tokens: int
    together: int
    heads: int
    warps: int

    def groups(self, *heads: int) -> int:
        return sum(-(-n // self.heads) for n in heads)


FORWARD = Cut(tokens=4, together=1, heads=8, warps=2)
FEW, FORWARD_OF_FEW = 256, Cut(tokens=1, together=1, heads=8, warps=4)  # up to so many tokens each has programs alone
BACKWARD = Cut(tokens=4, together=2, heads=8, warps=4)
BACKWARD_GAIN = Cut(tokens=8, together=1, heads=8, warps=2)


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
def load_rows(x, token, head, x_token, valid, HALF: tl.constexpr):
    """Both halves, bf16 [N, HALF], of the rows (token, head) of x; +0 in rows that do not exist."""
    at, cols = x + token * x_token + head * (2 * HALF), tl.arange(0, HALF)
    x1 = tl.load(at[:, None] + cols[None, :], mask=valid[:, None], other=0.0)
    x2 = tl.load(at[:, None] + HALF + cols[None, :], mask=valid[:, None], other=0.0)
    return x1, x2


@triton.jit
def load_angles(positions, cosine, sine, token, valid, HALF: tl.constexpr):
    """Cosine and sine, fp32 [N, HALF], of the rows' positions."""
    at = (tl.load(positions + token, mask=valid, other=0) * HALF)[:, None] + tl.arange(0, HALF)[None, :]
    return tl.load(cosine + at, mask=valid[:, None], other=0.0), tl.load(sine + at, mask=valid[:, None], other=0.0)


@triton.jit
def load_gains(w, HALF: tl.constexpr):
    """Both halves of a gain, fp32 [1, HALF]."""
    cols = tl.arange(0, HALF)
    return tl.load(w + cols).to(tl.float32)[None, :], tl.load(w + HALF + cols).to(tl.float32)[None, :]


@triton.jit
def store_rows(y, token, head, heads, y1, y2, valid, HALF: tl.constexpr):
    """Both halves, rounded to bf16, of rows of y [T, heads, 2 HALF]."""
    at, cols = y + (token * heads + head) * (2 * HALF), tl.arange(0, HALF)
    tl.store(at[:, None] + cols[None, :], y1.to(tl.bfloat16), mask=valid[:, None])
    tl.store(at[:, None] + HALF + cols[None, :], y2.to(tl.bfloat16), mask=valid[:, None])


@triton.jit
def halves_mean(p1, p2, HALF: tl.constexpr):
    """[N]: fl(tree / 2 HALF). Times the reciprocal of a power of two: the quotient's own bits."""
    return (tree_rows(p1) + tree_rows(p2)) * (0.5 / HALF)


@triton.jit
def norm_rope_rows(
    x, w, y, positions, cosine, sine, first, count, first_head, heads, x_token, eps,
    R: tl.constexpr, EACH: tl.constexpr, STEPS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """QK norm, rounded to bf16, then the rotation, of STEPS times R tokens of EACH heads."""
    n = tl.arange(0, R * EACH)
    head = first_head + n % EACH
    w1, w2 = load_gains(w, HALF)
    for step in tl.static_range(STEPS):
        index = step * R + n // EACH
        token, valid = (first + index).to(tl.int64), (index < count) & (head < heads)
        x1, x2 = load_rows(x, token, head, x_token, valid, HALF)
        c, s = load_angles(positions, cosine, sine, token, valid, HALF)
        x1, x2 = widen(x1), widen(x2)
        r = inverse_root(halves_mean(x1 * x1, x2 * x2, HALF) + eps)[:, None]
        n1, n2 = round_bf16(x1 * r * w1), round_bf16(x2 * r * w2)
        store_rows(y, token, head, heads, n1 * c - n2 * s, n2 * c + n1 * s, valid, HALF)


@triton.jit
def qk_norm_rope_kernel(
    q, k, wq, wk, yq, yk, positions, cosine, sine, tokens, q_token, k_token, heads, kv_heads, eps,
    R: tl.constexpr, EACH: tl.constexpr, STEPS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """STEPS times R tokens of EACH heads of q or k. Grid: groups of q's heads then k's, tokens outside."""
    groups = tl.cdiv(heads, EACH)
    all_groups = groups + tl.cdiv(kv_heads, EACH)
    group, first = tl.program_id(0) % all_groups, tl.program_id(0) // all_groups * (R * STEPS)
    if group < groups:
        norm_rope_rows(q, wq, yq, positions, cosine, sine, first, tokens - first, group * EACH, heads,
                       q_token, eps, R, EACH, STEPS, HALF)  # fmt: skip
    else:
        norm_rope_rows(k, wk, yk, positions, cosine, sine, first, tokens - first, (group - groups) * EACH, kv_heads,
                       k_token, eps, R, EACH, STEPS, HALF)  # fmt: skip


@triton.jit
def norm_rope_bwd_rows(
    dy, x, w, dx, partial, positions, cosine, sine, block, first, count, first_head, heads,
    dy_token, x_token, eps,
    R: tl.constexpr, EACH: tl.constexpr, STEPS: tl.constexpr, HALF: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """The rotation back, rounded to bf16, then QK norm's backward, of STEPS times R tokens of EACH heads. The gain's
    terms go R tokens at a time; sums of aligned runs wait on a stack, one place a level, as in a binary counter."""
    n = tl.arange(0, R * EACH)
    head = first_head + n % EACH
    w1, w2 = load_gains(w, HALF)
    waiting = ()
    for step in tl.static_range(STEPS):
        index = step * R + n // EACH
        token, valid = (first + index).to(tl.int64), (index < count) & (head < heads)
        y1, y2 = load_rows(dy, token, head, dy_token, valid, HALF)
        x1, x2 = load_rows(x, token, head, x_token, valid, HALF)
        c, s = load_angles(positions, cosine, sine, token, valid, HALF)
        y1, y2, x1, x2 = widen(y1), widen(y2), widen(x1), widen(x2)
        d1, d2 = round_bf16(y1 * c + y2 * s), round_bf16(y2 * c - y1 * s)
        r = inverse_root(halves_mean(x1 * x1, x2 * x2, HALF) + eps)[:, None]
        n1, n2, g1, g2 = x1 * r, x2 * r, d1 * w1, d2 * w2
        mean = halves_mean(g1 * n1, g2 * n2, HALF)[:, None]
        store_rows(dx, token, head, heads, (g1 - n1 * mean) * r, (g2 - n2 * mean) * r, valid, HALF)
        if GAIN:
            waiting = waiting + ((sum_tokens(d1 * n1, R, EACH), sum_tokens(d2 * n2, R, EACH)),)  # noqa: RUF005
            for _ in tl.static_range(carries(step)):
                joined = (waiting[-2][0] + waiting[-1][0], waiting[-2][1] + waiting[-1][1])
                waiting = waiting[:-2] + (joined,)  # noqa: RUF005
    if GAIN:
        each, cols = first_head + tl.arange(0, EACH), tl.arange(0, HALF)
        at = partial + ((block.to(tl.int64) * heads + each) * (2 * HALF))[:, None] + cols[None, :]
        tl.store(at, waiting[0][0], mask=(each < heads)[:, None])
        tl.store(at + HALF, waiting[0][1], mask=(each < heads)[:, None])


@triton.jit
def sum_tokens(terms, R: tl.constexpr, EACH: tl.constexpr):
    """[R EACH, N] -> [EACH, N]: the pair tree over R tokens."""
    if R > 1:
        width: tl.constexpr = EACH * terms.shape[1]
        terms = tree_columns(tl.reshape(terms, (R, width)))
        terms = tl.reshape(terms, (EACH, width // EACH))
    return terms


@triton.jit
def qk_norm_rope_bwd_kernel(
    dq, dk, q, k, wq, wk, xq, xk, part_q, part_k, positions, cosine, sine, pieces, tokens,
    dq_token, dk_token, q_token, k_token, heads, kv_heads, eps,
    R: tl.constexpr, EACH: tl.constexpr, STEPS: tl.constexpr, HALF: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Gradients xq, xk before QK norm from dq, dk behind the rotation, and the gain terms' pair tree, of a piece of
    STEPS R tokens; with GAIN pieces int32 [n, 2] holds their first tokens and counts. Grid: groups of q's heads then
    k's, pieces outside."""
    groups = tl.cdiv(heads, EACH)
    all_groups = groups + tl.cdiv(kv_heads, EACH)
    group, block = tl.program_id(0) % all_groups, tl.program_id(0) // all_groups
    first, count = block * (R * STEPS), tokens - block * (R * STEPS)
    if GAIN:
        first, count = tl.load(pieces + block * 2), tl.load(pieces + block * 2 + 1)
    if group < groups:
        norm_rope_bwd_rows(dq, q, wq, xq, part_q, positions, cosine, sine, block, first, count, group * EACH, heads,
                           dq_token, q_token, eps, R, EACH, STEPS, HALF, GAIN)  # fmt: skip
    else:
        norm_rope_bwd_rows(dk, k, wk, xk, part_k, positions, cosine, sine, block, first, count,
                           (group - groups) * EACH, kv_heads,
                           dk_token, k_token, eps, R, EACH, STEPS, HALF, GAIN)  # fmt: skip


class TritonRope(FusedRope):
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

    def fuses(self, norm: Any, width: int) -> bool:
        return type(norm) is TritonNorm and can_fuse(width)

    def norm_rotate(
        self, q: Tensor, k: Tensor, q_norm: Weight, k_norm: Weight, eps: float, positions: Tensor, table: RopeTable
    ) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(q, k, q_norm, k_norm, eps, positions, table)

    def norm_rotate_backward(
        self,
        dq: Tensor,
        dk: Tensor,
        q: Tensor,
        k: Tensor,
        q_norm: Weight,
        k_norm: Weight,
        eps: float,
        positions: Tensor,
        table: RopeTable,
        layout: PackedLayout | None,
    ) -> tuple[Tensor, Tensor]:
        return qk_norm_rope_backward(dq, dk, q, k, q_norm, k_norm, eps, positions, table, layout)


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
    cut = FORWARD if tokens > FEW else FORWARD_OF_FEW
    launch(
        qk_norm_rope_kernel,
        (-(-tokens // cut.tokens) * cut.groups(heads, k.shape[1]),),
        *(q, k, q_norm.value, k_norm.value, yq, yk, positions, table.cosine, table.sine, tokens),
        *(shape_of(q)[3], shape_of(k)[3], heads, k.shape[1], eps),
        warps=cut.warps,
        R=cut.together,
        EACH=cut.heads,
        STEPS=cut.tokens // cut.together,
        HALF=width // 2,
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
    layout: PackedLayout | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k before QK norm from those behind the rotation; the gains' gradients are added into the
    weights that train (both or neither)."""
    tokens, heads, width = q.shape
    assert can_fuse(width), f"head_dim {width} is not fused"
    assert (q_norm.grad is None) == (k_norm.grad is None)
    gain = q_norm.grad is not None
    cut = BACKWARD_GAIN if gain else BACKWARD
    xq, xk = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for x in (q, k))
    blocks, pieces, parts = -(-tokens // cut.tokens), positions, (xq, xk)
    if gain:
        assert layout is not None
        pieces, bounds = pieces_of(layout, cut.tokens, q.device)
        blocks = pieces.shape[0]
        parts = tuple(torch.empty(blocks, *x.shape[1:], dtype=torch.float32, device=x.device) for x in (q, k))
    launch(
        qk_norm_rope_bwd_kernel,
        (blocks * cut.groups(heads, k.shape[1]),),
        *(dq, dk, q, k, q_norm.value, k_norm.value, xq, xk, *parts, positions, table.cosine, table.sine),
        *(pieces, tokens, shape_of(dq)[3], shape_of(dk)[3], shape_of(q)[3], shape_of(k)[3], heads, k.shape[1], eps),
        warps=cut.warps,
        R=cut.together,
        EACH=cut.heads,
        STEPS=cut.tokens // cut.together,
        HALF=width // 2,
        GAIN=gain,
    )
    if gain:
        norm = TritonNorm()
        for weight, part in ((q_norm, parts[0]), (k_norm, parts[1])):
            assert weight.grad is not None
            norm.add_gain(norm.fold_partials(part, bounds, GAIN_BLOCK // cut.tokens), weight.grad)
    return xq, xk
