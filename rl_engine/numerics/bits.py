"""Comparison of tensors as bits. numpy only; torch tensors are taken by their methods, torch is never imported."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]

_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclasses.dataclass(frozen=True)
class BitComparison:
    """What :func:`compare_bits` found.

    Attributes:
        equal: shape, dtype and every bit agree.
        count: number of differing elements (``total`` where shape or dtype already differ).
        total: number of elements compared, of the larger side where the shapes differ.
        first_index: index of the first difference in C order, None where there is none or no common index.
        a_hex, b_hex: both values' bits at ``first_index`` (``0x3f800000``), empty without one.
        max_abs: largest absolute difference in fp64; inf where a differing value is not finite.
        reason: one line for a message; empty when equal.
    """

    equal: bool
    count: int
    total: int
    first_index: tuple[int, ...] | None
    a_hex: str
    b_hex: str
    max_abs: float
    reason: str


def is_torch(x: object) -> bool:
    """Whether ``x`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_name(x: Any) -> str:
    """Name of the element type without its library's prefix: ``float32``, ``bfloat16``, ``int64``, ``bool``."""
    if is_torch(x):
        return str(x.dtype).removeprefix("torch.")
    return str(np.asarray(x).dtype.newbyteorder("=").name)


def raw_view(x: Any) -> AnyArray:
    """``x`` as a C-contiguous numpy array on the host, same shape and item size.

    Types that numpy has no name for (bf16, fp8) come back as the unsigned integers of their bits. A copy is made only
    where the memory is not contiguous, not on the host or not in native byte order.
    """
    if is_torch(x):
        tensor = x.detach().cpu().contiguous()
        name = dtype_name(tensor)
        if name.startswith("bfloat") or name.startswith("float8"):
            torch = sys.modules["torch"]
            signed = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
            array: AnyArray = tensor.view(signed).numpy()
            return array.view(_UNSIGNED[array.itemsize])
        return np.asarray(tensor.numpy(), order="C")
    array = np.asarray(x, order="C")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat", "float8")):
        array = array.view(_UNSIGNED[array.itemsize])
    return array


def int_view(x: Any) -> AnyArray:
    """Integers holding the bits of ``x``: fp32 as uint32, bf16 and fp16 as uint16, fp64 as uint64, bool as uint8.

    Integer arrays come back as they are. Same shape as ``x``.

    Raises:
        TypeError: for element types that are neither numbers nor booleans (objects, strings, complex).
    """
    array = raw_view(x)
    if array.dtype.kind in "iu":
        return array
    if array.dtype.kind in "fb" and array.itemsize in _UNSIGNED:
        return array.view(_UNSIGNED[array.itemsize])
    raise TypeError(f"no integer view of {array.dtype}")


def to_float64(x: Any) -> npt.NDArray[np.float64]:
    """``x`` as fp64, exact for every float of at most 64 bits; bf16 included."""
    name = dtype_name(x)
    array = raw_view(x)
    if name == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if is_torch(x) and name.startswith("float8"):
        return np.asarray(x.detach().cpu().double().numpy(), dtype=np.float64)
    return array.astype(np.float64)


def compare_bits(a: Any, b: Any) -> BitComparison:
    """Compare shape, dtype, then integer views; -0 differs from +0, a NaN equals a NaN of the same bits."""
    view_a, view_b = int_view(a), int_view(b)
    total = max(view_a.size, view_b.size)
    if view_a.shape != view_b.shape:
        reason = f"shape {view_a.shape} against {view_b.shape}"
        return BitComparison(False, total, total, None, "", "", float("inf"), reason)
    if dtype_name(a) != dtype_name(b):
        reason = f"dtype {dtype_name(a)} against {dtype_name(b)}"
        return BitComparison(False, total, total, None, "", "", float("inf"), reason)
    different = np.not_equal(view_a, view_b)
    count = int(np.count_nonzero(different))
    if count == 0:
        return BitComparison(True, 0, total, None, "", "", 0.0, "")
    first = tuple(int(i) for i in np.unravel_index(int(np.argmax(different)), different.shape))
    a_hex, b_hex = hex_bits(view_a[first], view_a.itemsize), hex_bits(view_b[first], view_b.itemsize)
    max_abs = _max_abs(to_float64(a)[different], to_float64(b)[different])
    reason = f"{count} of {total} differ, first at {first}: {a_hex} against {b_hex}, max |difference| {max_abs:.6g}"
    return BitComparison(False, count, total, first, a_hex, b_hex, max_abs, reason)


def hex_bits(value: Any, itemsize: int) -> str:
    """Bits of one integer as fixed-width hex (two's complement for signed types)."""
    return f"0x{int(value) & ((1 << (8 * itemsize)) - 1):0{2 * itemsize}x}"


def _max_abs(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.max(np.abs(a - b)))
