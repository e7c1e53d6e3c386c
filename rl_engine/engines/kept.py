"""Weights in a file, so that a later process can compute with them: bf16 bits as uint16, by first row and HF name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from rl_engine.engines.protocol import WeightSource
from rl_engine.engines.snapshot import JoinedWeights
from rl_engine.engines.types import SnapshotMismatch, TensorRows, WeightSnapshot
from rl_engine.records.private import open_own


def save_kept(source: WeightSource, path: Path) -> None:
    """Writes all weights as one safetensors file, tensor by tensor: memory does not grow.

    Raises:
        OSError: the disk is full or failing.
    """
    header: dict[str, object] = {"__metadata__": {"version": str(source.version)}}
    held, offset = source.held, 0
    for name, (first, last) in held.items():
        shape = [last - first, *source.rows(name, first, first + 1).shape[1:]]
        size = 2 * int(np.prod(shape))
        header[f"{first}/{name}"] = {"dtype": "U16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb", opener=open_own) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (first, last) in held.items():
            bits = source.rows(name, first, last).contiguous().view(torch.int16).cpu().numpy()
            file.write(memoryview(bits).cast("B"))


def read_kept(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> WeightSource:
    """The weights of :func:`save_kept`; ``shapes`` are the model's, by HF name.

    Raises:
        SnapshotMismatch: another model's weights, or a damaged file.
    """
    parts = []
    try:
        with safe_open(path, framework="numpy") as file:
            version = int((file.metadata() or {}).get("version", "-1"))
            for key in file.keys():  # noqa: SIM118 - a handle, no mapping
                first, _, name = key.partition("/")
                bits = file.get_tensor(key)
                if name not in shapes or bits.dtype != np.uint16 or bits.shape[1:] != tuple(shapes[name][1:]):
                    raise SnapshotMismatch(f"{key[:100]}: {bits.dtype} {bits.shape}, which is no rows of the model's")
                parts.append(WeightSnapshot(version, {name: TensorRows(int(first), bits)}, {}))
    except (SafetensorError, OSError, ValueError) as error:
        raise SnapshotMismatch(f"{path.name}: {error}") from error
    if not parts:
        raise SnapshotMismatch(f"{path.name} holds no tensor")
    return JoinedWeights(parts)
