"""Tensor-level calls of the C chain GEMM (``csrc/gemm.c``)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rl_engine.ops.library import load
from rl_engine.ops.weight import Weight

OUT_F32, OUT_BF16, OUT_BF16_RESIDUAL, OUT_F32_ADD = 0, 1, 2, 3
PANEL = 32


def pack(weight: Weight, *, drop_value: bool = False) -> None:
    """Packs ``weight`` [N, K] into column panels, once per update: decoding reads it without a copy.

    With ``drop_value`` the panels alone are left; rows are then written into them and read out of them.
    """
    n, k = weight.shape
    if weight.packed is None:
        weight.packed = torch.empty(-(-n // PANEL), (k + 1) // 2, PANEL, dtype=torch.int32)
        weight.pack_rows = functools.partial(pack_rows, weight.packed, k)
        weight.read_rows = functools.partial(unpack_rows, weight.packed, k)
    load().rlk_pack(n, k, weight.value.data_ptr(), 1, k, weight.packed.data_ptr())
    weight.stale = False
    if drop_value:
        weight.value = weight.value.new_empty(0)


def pack_rows(panels: Tensor, depth: int, first: int, rows: Tensor) -> None:
    """Rows [first, first + n) of a packed weight become ``rows`` bf16 [n, depth]; whole panels by the C kernel."""
    last = first + rows.shape[0]
    assert rows.shape[1] == depth and rows.dtype == torch.bfloat16 and first >= 0 and last <= panels.shape[0] * PANEL
    rows = rows.contiguous()
    start, stop = -(-first // PANEL) * PANEL, last // PANEL * PANEL
    if start < stop:
        whole = rows[start - first : stop - first]
        load().rlk_pack(stop - start, depth, whole.data_ptr(), 1, depth, panels[start // PANEL :].data_ptr())
    edges = [(first, last)] if start >= stop else [(first, start), (stop, last)]
    for begin, end in edges:
        while begin < end:  # at most two panels an edge
            until = min(end, begin // PANEL * PANEL + PANEL)
            pairs = torch.nn.functional.pad(rows[begin - first : until - first], (0, depth % 2)).unflatten(1, (-1, 2))
            columns = slice(begin % PANEL, begin % PANEL + until - begin)
            _halves(panels)[begin // PANEL, :, columns].copy_(pairs.flip(2).transpose(0, 1))
            begin = until


def unpack_rows(panels: Tensor, depth: int, first: int, last: int) -> Tensor:
    """bf16 [last - first, depth]: rows of a packed weight, as they were packed."""
    begin = first // PANEL
    pairs = _halves(panels)[begin : -(-last // PANEL)].transpose(1, 2).flip(3)
    return pairs.flatten(2).flatten(0, 1)[first - begin * PANEL : last - begin * PANEL, :depth].contiguous()


def _halves(panels: Tensor) -> Tensor:
    """Words int32 [panels, pairs, 32] as bf16 [panels, pairs, 32, 2]: the later k of a pair stands first."""
    return panels.view(torch.bfloat16).unflatten(2, (PANEL, 2))


def times_weight(
    x: Tensor,
    weight: Weight,
    residual: Tensor | None = None,
    *,
    out_f32: bool = False,
    columns: tuple[int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x bf16 [T, K] times W[N, K]^T: bf16 [T, N], or fp32; ``columns`` (first, last) takes a slice of N.

    Written into ``out`` (contiguous columns) where it is given. With a packed weight a slice must start at a multiple
    of 32; one that changed since is packed again first.
    """
    n, k = weight.shape
    if weight.stale:
        pack(weight)
    first, last = columns or (0, n)
    x = x.contiguous()
    dtype = torch.float32 if out_f32 else torch.bfloat16
    out = torch.empty(x.shape[0], last - first, dtype=dtype) if out is None else out
    assert out.shape == (x.shape[0], last - first) and out.dtype == dtype and out.stride(1) == 1
    kind = OUT_F32 if out_f32 else OUT_BF16 if residual is None else OUT_BF16_RESIDUAL
    if weight.packed is not None:
        assert first % PANEL == 0
        b, b_k, b_column = weight.packed[first // PANEL :], 0, 0
    else:
        b, b_k, b_column = weight.value[first:last], 1, k
    if residual is not None:
        residual = residual.contiguous()
    load().rlk_gemm(
        *(x.shape[0], last - first, k, x.data_ptr(), k, 1, b.data_ptr(), b_k, b_column),
        *(kind, out.data_ptr(), out.stride(0), residual.data_ptr() if residual is not None else None, last - first),
    )
    return out


def times_rows(dy: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """dy bf16 [T, N] times rows bf16 [N, K]: bf16 [T, K]; with ``out`` fp32 [T, K], added into it instead."""
    t, n = dy.shape
    k = rows.shape[1]
    assert dy.stride(1) == 1 and rows.stride(1) == 1
    result = torch.empty(t, k, dtype=torch.bfloat16) if out is None else out
    assert result.is_contiguous() and (out is None or out.dtype == torch.float32)
    load().rlk_gemm(
        *(t, k, n, dy.data_ptr(), dy.stride(0), 1, rows.data_ptr(), rows.stride(0), 1),
        *(OUT_BF16 if out is None else OUT_F32_ADD, result.data_ptr(), k, None, 0),
    )
    return result


def add_outer(dy: Tensor, x: Tensor, grad: Tensor) -> None:
    """grad fp32 [N, K] += chain over tokens of dy bf16 [T, N] and x bf16 [T, K]."""
    t, n = dy.shape
    k = x.shape[1]
    assert dy.stride(1) == 1 and x.stride(1) == 1 and grad.stride(1) == 1
    load().rlk_gemm(
        *(n, k, t, dy.data_ptr(), 1, dy.stride(0), x.data_ptr(), x.stride(0), 1),
        *(OUT_F32_ADD, grad.data_ptr(), grad.stride(0), None, 0),
    )
