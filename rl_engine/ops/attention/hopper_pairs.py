"""Launch of ``csrc/decode_pairs.cu``: paged decode by two programs of a cluster for every split.

It serves few samples best: every multiprocessor has a program, and no byte of K or V is read twice. Two programs, of
one call or of two in a row, share a multiprocessor, so the next call's keys are on their way while this one ends.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from rl_engine.numerics.contract import Contract
from rl_engine.ops import cuda_source

SOURCE = cuda_source.Source(
    cuda_source.SOURCES / "decode_pairs.cu", "c2be2dfa9fb781551b73bf6f431441cbc6543ee2e0470a70344892e62729a1c1"
)
BLOCK, BLOCKS = Contract().kv_block, Contract().kv_split // Contract().kv_block
WIDTH = 128  # the only head_dim
UNIT = BLOCK * 64 * 2  # bytes of a unit of the ring
THREADS = 416
ROOM = (228 << 10) // 2 - 1024  # bytes of shared memory of a program where two share a multiprocessor


class Arguments(ctypes.Structure):
    """``struct Arguments`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "part_o", "part_l", "part_mu", "items", "tables")),
        *((name, ctypes.c_longlong) for name in ("table_width", "q_token", "q_head", "out_token", "out_head")),
        ("c", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("group", "page", "heads", "splits", "kv_heads")),
        *((name, ctypes.c_int) for name in ("direct", "settled", "late", "zero")),
    )


def beside(rows: int) -> int:
    """Bytes of shared memory behind the ring, without the ring's own barriers, for ``rows`` query rows."""
    return BLOCKS * rows * BLOCK * 4 + (BLOCKS + 2) * 8 * 4 + (BLOCKS + 1) * 8


def ring(rows: int) -> int:
    """Units that have room; with each its two barriers."""
    return (ROOM - beside(rows)) // (UNIT + 16)


def macros(rows: int) -> dict[str, int]:
    """What the source is compiled with."""
    return {"ROWS": rows, "RING": ring(rows), "BYTES": beside(rows) + ring(rows) * (UNIT + 16)}


@functools.cache
def kernel(rows: int, device: torch.device, source: cuda_source.Source = SOURCE) -> cuda_source.Function:
    names = macros(rows)
    return cuda_source.function(source, "decode_pairs", names, names["BYTES"], device)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    states: tuple[Tensor, Tensor, Tensor] | None,
    items: Tensor,
    tables: Tensor,
    splits: int,
    rows: int,
    c: float,
    settled: bool,
    late: int,
    source: cuda_source.Source = SOURCE,
) -> None:
    """The result into ``out`` where there is one split and no ``states``, else every split's state into ``states``: o
    fp32 [Q, heads, splits, 128], l and mu fp32 [Q, heads, splits].

    Tensors are as ``hopper_paged.fits`` wants them, head_dim 128; a KV head has at most ``rows`` (4 or 8) query rows.
    """
    heads, kv_heads, page = q.shape[1], k.shape[1], k.shape[2]
    o, l, mu = (out, out, out) if states is None else states
    places = (x.data_ptr() for x in (q, out, o, l, mu, items, tables))
    strides = (tables.stride(0), q.stride(0), q.stride(1), out.stride(0), out.stride(1))
    sizes = (heads // kv_heads, page, heads, splits, kv_heads)
    arguments = Arguments(*places, *strides, c, *sizes, states is None, settled, late, 0)
    maps = (cuda_source.rows_map(x, WIDTH, (BLOCK, 64)) for x in (k, v))
    grid = (2 * kv_heads, splits, items.shape[0])
    kernel(rows, q.device, source).launch(grid, THREADS, [*maps, arguments], early=True)
