"""cuBLASLt with an explicitly chosen algorithm, by ctypes on the library that torch has loaded.

Why the order holds: an algorithm here has one split, no reduction scheme and no workspace, so that an output tile is
one block's own accumulator over the whole of K; what a configuration cannot say (a split inside a cluster, stream-K) is
refuted on order-revealing data by ``qualify`` before the algorithm may run. ``beta = 1`` adds the old output in the
epilogue, after the chain. The default choice of cuBLAS is never used: it splits K at few rows.

An algorithm is 64 opaque bytes, valid for one library version. A call with a shape that its algorithm does not take is
refused; nothing else is tried.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

COMPUTE_F32 = 68
TYPES = {torch.float32: 0, torch.bfloat16: 14}
TRANSPOSED_A, TRANSPOSED_B = 3, 4  # attributes of a product
MAX_WORKSPACE, REDUCTIONS = 1, 3  # attributes of a search
CONFIG = {"id": 0, "tile": 1, "split": 2, "reduction": 3, "swizzle": 4, "custom": 5, "stages": 6, "cluster": 8}
WIDTHS = {"inner": 2, "cluster": 2}  # bytes of an attribute that is not 4 bytes wide
WORKSPACE = 32 << 20
SEARCHED = 8  # ranks that are asked for


class Refused(RuntimeError):
    """cuBLASLt is not there, or does not take this shape with this algorithm."""


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclasses.dataclass(frozen=True)
class Product:
    """``d[M, N] = a[M, K] b[N, K]^T + beta c``, d and c with contiguous rows.

    ``a_rows``: a lies as [M, K] with K contiguous, else as [K, M]; ``b_rows`` alike. Strides are those of the outer
    axis, in elements.
    """

    rows: int
    columns: int
    depth: int
    a_rows: bool
    b_rows: bool
    stride_a: int
    stride_b: int
    stride_c: int
    stride_d: int
    dtype: torch.dtype
    beta: float = 0.0


@functools.cache
def library() -> ctypes.CDLL:
    """The library of torch's own CUDA version.

    Raises:
        Refused: torch has no CUDA, or the library is not there.
    """
    if torch.version.cuda is None:
        raise Refused("this torch was built without CUDA")
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError as error:
        raise Refused(f"cuBLASLt cannot be loaded: {error}") from error


@functools.cache
def version() -> int:
    call = library().cublasLtGetVersion
    call.restype = ctypes.c_size_t
    return int(call())


def _check(status: int, what: str) -> None:
    if status:
        raise Refused(f"cuBLASLt {what} returned status {status}")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(handle)), "create")
    return handle


class Plan:
    """Descriptors of one product on one device; kept for the life of the process."""

    def __init__(self, product: Product, device: int) -> None:
        p, lt = product, library()
        self.product, self.handle = product, _handle(device)
        self.operation = ctypes.c_void_p()
        _check(lt.cublasLtMatmulDescCreate(ctypes.byref(self.operation), COMPUTE_F32, 0), "description")
        # Column-major: d^T[N, M] = b[N, K] a^T[K, M], so b is the library's first operand.
        for attribute, flag in ((TRANSPOSED_A, p.b_rows), (TRANSPOSED_B, not p.a_rows)):
            value = ctypes.c_int(int(flag))
            _check(
                lt.cublasLtMatmulDescSetAttribute(self.operation, attribute, ctypes.byref(value), 4), "transposition"
            )
        b_shape = (p.depth, p.columns) if p.b_rows else (p.columns, p.depth)
        a_shape = (p.depth, p.rows) if p.a_rows else (p.rows, p.depth)
        self.first = self._layout(torch.bfloat16, *b_shape, p.stride_b)
        self.second = self._layout(torch.bfloat16, *a_shape, p.stride_a)
        self.old = self._layout(p.dtype, p.columns, p.rows, p.stride_c)
        self.out = self._layout(p.dtype, p.columns, p.rows, p.stride_d)
        self.alpha, self.beta = ctypes.c_float(1.0), ctypes.c_float(p.beta)
        self.run = lt.cublasLtMatmul
        self.run.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]

    def close(self) -> None:
        """Gives the descriptors back; the plan runs no more."""
        lt = library()
        for layout in (self.first, self.second, self.old, self.out):
            lt.cublasLtMatrixLayoutDestroy(layout)
        lt.cublasLtMatmulDescDestroy(self.operation)

    @staticmethod
    def _layout(dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        created = library().cublasLtMatrixLayoutCreate(
            ctypes.byref(layout),
            TYPES[dtype],
            ctypes.c_uint64(rows),
            ctypes.c_uint64(columns),
            ctypes.c_int64(max(stride, rows)),
        )
        _check(created, "layout")
        return layout

    def search(self, count: int, *, split: bool = False) -> list[tuple[bytes, int]]:
        """(algorithm, workspace bytes) as the library's heuristic ranks them.

        Without ``split`` only those of one split, no reduction scheme and no workspace.
        """
        lt, preference = library(), ctypes.c_void_p()
        _check(lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "search")
        settings = [(MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE if split else 0), 8)]
        if not split:
            settings.append((REDUCTIONS, ctypes.c_uint32(0), 4))
        for attribute, value, width in settings:
            _check(lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(value), width), "search")
        results, returned = (_Found * count)(), ctypes.c_int()
        status = lt.cublasLtMatmulAlgoGetHeuristic(
            *(self.handle, self.operation, self.first, self.second, self.old, self.out, preference),
            *(count, results, ctypes.byref(returned)),
        )
        lt.cublasLtMatmulPreferenceDestroy(preference)
        if status:
            return []
        found = [(bytes(r.algorithm), int(r.workspace)) for r in results[: returned.value] if r.state == 0]
        return found if split else [(algorithm, size) for algorithm, size in found if plain(algorithm) and size == 0]

    def takes(self, algorithm: bytes) -> bool:
        """Whether the algorithm runs this product."""
        result, raw = _Found(), _Algorithm.from_buffer_copy(algorithm)
        status = library().cublasLtMatmulAlgoCheck(
            *(self.handle, self.operation, self.first, self.second, self.old, self.out),
            *(ctypes.byref(raw), ctypes.byref(result)),
        )
        return status == 0

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        algorithm: ctypes.Array | None,
        old: Tensor | None,
        space: Tensor | None,
    ) -> None:
        status = self.run(
            *(self.handle, self.operation, ctypes.addressof(self.alpha), b.data_ptr(), self.first),
            *(a.data_ptr(), self.second, ctypes.addressof(self.beta), (out if old is None else old).data_ptr()),
            *(self.old, out.data_ptr(), self.out, None if algorithm is None else ctypes.addressof(algorithm)),
            *(None if space is None else space.data_ptr(), 0 if space is None else space.numel()),
            torch._C._cuda_getCurrentRawStream(out.device.index),
        )
        _check(status, f"product {self.product}")


def config(algorithm: bytes) -> dict[str, int]:
    """What the algorithm says of itself: tile, split, reduction and so on."""
    raw, found = _Algorithm.from_buffer_copy(algorithm), {}
    for name, attribute in CONFIG.items():
        value, written = ctypes.c_uint32(0), ctypes.c_size_t()
        status = library().cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(raw), attribute, ctypes.byref(value), WIDTHS.get(name, 4), ctypes.byref(written)
        )
        if status == 0:
            found[name] = value.value
    return found


def plain(algorithm: bytes) -> bool:
    """One split and no reduction scheme, as far as the algorithm says."""
    found = config(algorithm)
    return found.get("split", 0) in (0, 1) and found.get("reduction", 0) == 0


@functools.cache
def plan(product: Product, device: int) -> Plan:
    return Plan(product, device)


@functools.cache
def _taken(product: Product, device: int, algorithm: bytes, proven: frozenset[bytes]) -> ctypes.Array:
    """What runs this shape: of the proven algorithms the one that the library ranks first, else the given one."""
    ranked = [found for found, _ in plan(product, device).search(SEARCHED)] if proven else []
    chosen = next((found for found in ranked if found in proven), algorithm)
    if not plan(product, device).takes(chosen):
        raise Refused(f"the chosen algorithm does not take {product}")
    return ctypes.create_string_buffer(chosen, 64)


def describe(a: Tensor, b: Tensor, out: Tensor, old: Tensor | None = None, *, add: bool = False) -> Product:
    """The product of a [M, K], b [N, K] (either may be the transposed view of a matrix) and out [M, N]."""
    assert out.stride(1) == 1 and (old is None or old.stride(1) == 1)
    a_rows, b_rows = a.stride(1) == 1, b.stride(1) == 1
    assert a_rows or a.stride(0) == 1, a.stride()
    assert b_rows or b.stride(0) == 1, b.stride()
    return Product(
        *(a.shape[0], b.shape[0], a.shape[1], a_rows, b_rows, a.stride(0 if a_rows else 1)),
        *(b.stride(0 if b_rows else 1), (out if old is None else old).stride(0), out.stride(0), out.dtype),
        float(add or old is not None),
    )


def product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    algorithm: bytes,
    old: Tensor | None = None,
    *,
    add: bool = False,
    proven: frozenset[bytes] = frozenset(),
) -> None:
    """``out = a b^T``, plus ``old`` (a residual) or, with ``add``, plus ``out`` itself (a fold).

    With ``proven`` the library's ranking for this very shape decides among these; ``algorithm`` stands in where it
    ranks none of them.

    Raises:
        Refused: the algorithm does not take this shape.
    """
    prepare(a, b, out, algorithm, old, add=add, proven=proven)(a, b, out, old)


def prepare(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    algorithm: bytes,
    old: Tensor | None = None,
    *,
    add: bool = False,
    proven: frozenset[bytes] = frozenset(),
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], None]:
    """:func:`product` for every call with these shapes, strides and types."""
    what, device = describe(a, b, out, old, add=add), out.device.index
    ready, raw = plan(what, device), _taken(what, device, algorithm, proven)
    return lambda a, b, out, old: ready(a, b, out, raw, old, None)
