"""Reads a GGUF file: metadata, the tensor table, and the tensors' values.

Only what the offline demo model needs: format versions 2 and 3 in little-endian order, and the tensor types F32, F16,
Q8_0 and Q4_1. Written here, with numpy alone, because opening the 49,152-entry vocabulary through a general reader
takes longer than the whole conversion does this way.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, key-value pairs, tensor
table, padding to the alignment, tensor data.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

# Tensor type id -> (name, values in a block, bytes of a block).
_TENSOR_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}


class GgufError(ValueError):
    """The file is not a GGUF file that this reader understands."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where a tensor's bytes lie. ``shape`` is in row-major order, outermost axis first; ``start`` in bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class _Cursor:
    """Reads values from the front of the file, and refuses to read beyond its end."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self.at = 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self._view):
            raise GgufError(f"the file ends at byte {len(self._view)}, a value needs byte {end}")
        data = self._view[self.at : end]
        self.at = end
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """One metadata value; an array of numbers comes as a numpy array, an array of strings as a list."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalar("<I"), self.scalar("<Q")
            if element in _SCALARS:
                code = np.dtype(_SCALARS[element])
                return np.frombuffer(self.take(count * code.itemsize), dtype=code)
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise GgufError(f"metadata value of unknown type {kind}")
        return self.scalar(_SCALARS[kind])


class GgufFile:
    """An open GGUF file; use as a context manager.

    Attributes:
        metadata: key to value, as stored.
        tensors: name to ``GgufTensor``, in file order.

    Raises:
        GgufError: not GGUF, cut short, or of a type this reader does not know.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            if path.stat().st_size == 0:
                raise GgufError("the file is empty")
            self._view = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_front()
        except (struct.error, UnicodeDecodeError) as error:
            self._view.close()
            raise GgufError(str(error)) from error
        except GgufError:
            self._view.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.close()

    def _read_front(self) -> None:
        cursor = _Cursor(self._view)
        if cursor.take(4) != _MAGIC:
            raise GgufError("the file does not begin with GGUF")
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise GgufError(f"GGUF version {version}; versions 2 and 3 are read")
        tensor_count, pair_count = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        table = [self._read_entry(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"alignment {alignment!r}")
        data_start = -(-cursor.at // alignment) * alignment
        self.tensors = {entry.name: dataclasses.replace(entry, start=data_start + entry.start) for entry in table}
        for entry in self.tensors.values():
            if entry.start + entry.nbytes > len(self._view):
                raise GgufError(f"the file ends inside tensor {entry.name}")

    @staticmethod
    def _read_entry(cursor: _Cursor) -> GgufTensor:
        name = cursor.string()
        axes = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))
        kind, offset = cursor.scalar("<I"), cursor.scalar("<Q")
        if kind not in _TENSOR_TYPES:
            raise GgufError(f"tensor {name} of unknown type {kind}")
        kind_name, block_values, block_bytes = _TENSOR_TYPES[kind]
        if not axes or axes[0] % block_values:
            raise GgufError(f"tensor {name}: its rows of {axes[:1]} values are not whole blocks of {block_values}")
        count = 1
        for axis in axes:
            count *= axis
        return GgufTensor(name, kind_name, tuple(reversed(axes)), offset, count // block_values * block_bytes)

    def read_fp32(self, name: str) -> np.ndarray:
        """The tensor's values as a new fp32 array of its shape; quantized values are scaled in fp32.

        Raises:
            GgufError: the file has no such tensor.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise GgufError(f"the file has no tensor {name}")
        raw = np.frombuffer(self._view[entry.start : entry.start + entry.nbytes], dtype=np.uint8)
        if entry.kind == "F32":
            return raw.view("<f4").astype(np.float32).reshape(entry.shape)
        if entry.kind == "F16":
            return raw.view("<f2").astype(np.float32).reshape(entry.shape)
        expand = expand_q8_0 if entry.kind == "Q8_0" else expand_q4_1
        return expand(raw).reshape(entry.shape)


def expand_q8_0(raw: np.ndarray) -> np.ndarray:
    """Q8_0 bytes (blocks of an fp16 scale and 32 int8) to fp32 values ``scale * q``, one rounding each.

    Args:
        raw: [34 * blocks] uint8.

    Returns:
        [32 * blocks] fp32.
    """
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, 0:2].copy().view("<f2").astype(np.float32)
    quants = blocks[:, 2:].view(np.int8).astype(np.float32)
    return (quants * scale).reshape(-1)


def expand_q4_1(raw: np.ndarray) -> np.ndarray:
    """Q4_1 bytes (blocks of an fp16 scale, an fp16 minimum, and 32 nibbles) to fp32 values ``scale * q + minimum``.

    The product and the sum are rounded separately, as in every reference reader of this format. A block's low nibbles
    hold its first 16 values, the high nibbles the rest.

    Args:
        raw: [20 * blocks] uint8.

    Returns:
        [32 * blocks] fp32.
    """
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, 0:2].copy().view("<f2").astype(np.float32)
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    packed = blocks[:, 4:]
    values = np.empty((blocks.shape[0], 32), dtype=np.float32)
    values[:, :16] = packed & 0x0F
    values[:, 16:] = packed >> 4
    values *= scale
    values += minimum
    return values.reshape(-1)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 values rounded to bf16, to nearest with ties to even; the bits as uint16 of the same shape.

    Raises:
        GgufError: a value is not finite, or rounds beyond bf16's range.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding half a unit, less one unless the kept part is odd, carries into the kept part exactly when the value
    # rounds up.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    if not np.isfinite(values).all() or ((rounded & 0x7F80) == 0x7F80).any():
        raise GgufError("a weight is not finite in bf16")
    return rounded
