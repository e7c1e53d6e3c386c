"""Deliberately wrong log-probabilities, never a provider: sums by the library's own reduction, contraction on."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.selected_logp import LogpState
from rl_engine.ops.selected_logp.triton import logp_merge_kernel
from rl_engine.ops.triton_functions import exp


@triton.jit
def _state_control(z, m_out, l_out, w_out, n, sz, inv_t, N: tl.constexpr):
    row = tl.program_id(0)
    m = float("-inf")
    l = 0.0
    w = 0.0
    for tile in range(0, n, N):
        column = tile + tl.arange(0, N)
        zs = tl.load(z + row * sz + column, mask=column < n, other=float("-inf")) * inv_t
        top = tl.maximum(m, tl.max(zs, 0))
        e = tl.where(column < n, exp(zs - top), 0.0)
        scale = exp(m - top) if tile > 0 else 0.0
        l = l * scale + tl.reduce(e, 0, _plus)
        w = w * scale + tl.reduce(tl.where(column < n, e * zs, 0.0), 0, _plus)
        m = top
    tl.store(m_out + row, m)
    tl.store(l_out + row, l)
    tl.store(w_out + row, w)


@triton.jit
def _plus(a, b):
    return a + b


def wrong_state(z: Tensor, m: Tensor, l: Tensor, w: Tensor, inv_t: float, *, warps: int, fusion: bool) -> None:
    """m, l, w fp32 [T] of logits z [T, n] in one run over the columns, summed by the library's own reduction."""
    _state_control[(z.shape[0],)](
        *(z, m, l, w, z.shape[1], z.stride(0), inv_t), N=128, num_warps=warps, enable_fp_fusion=fusion
    )


def fused_merge(m: Tensor, l: Tensor, w: Tensor, state: LogpState, *, fusion: bool) -> None:
    """The contract's own merge of states [groups, T], with contraction as ``fusion`` says."""
    groups, t = m.shape
    logp_merge_kernel[(triton.cdiv(t, 128),)](
        *(m, l, w, state.m, state.l, state.w, t, groups), R=128, num_warps=4, enable_fp_fusion=fusion
    )
