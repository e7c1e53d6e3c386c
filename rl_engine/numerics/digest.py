"""SHA-256 digests of tensors and of maps of digests, equal on every machine for equal bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rl_engine.numerics.bits import dtype_name, raw_view


def tensor_digest(name: str, array: Any) -> str:
    """SHA-256 (hex) over name, dtype, shape and little-endian bytes of a numpy array or torch tensor of any dtype.

    The name is part of it, so that two tensors of equal content cannot stand in for each other.
    """
    raw = raw_view(array)
    header = json.dumps([name, dtype_name(array), list(raw.shape)], separators=(",", ":"))
    hasher = hashlib.sha256(header.encode())
    hasher.update(b"\0")
    if raw.size:
        little = raw.astype(raw.dtype.newbyteorder("<"), copy=False)
        hasher.update(little.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def map_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 (hex) over a map of names to digests, independent of insertion order."""
    body = json.dumps(sorted(digests.items()), separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()


def digest_tensors(tensors: Mapping[str, Any], threads: int) -> dict[str, str]:
    """Digest of every tensor of a map, by name; hashing releases the interpreter lock, so ``threads`` run at once."""
    names = sorted(tensors)
    with ThreadPoolExecutor(max_workers=threads) as pool:
        values = list(pool.map(lambda name: tensor_digest(name, tensors[name]), names))
    return dict(zip(names, values, strict=True))
