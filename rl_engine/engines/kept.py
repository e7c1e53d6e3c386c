"""Weight snapshots in a file, so that a later process can compute with them: bf16 bits as uint16, by first row and HF
name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from rl_engine.engines.snapshot import SnapshotMismatch, load_snapshots
from rl_engine.engines.types import TensorRows, WeightSnapshot
from rl_engine.models.weights import ModelWeights


def save_kept(snapshots: Sequence[WeightSnapshot], path: Path) -> None:
    """Writes the snapshots of all ranks as one safetensors file, tensor by tensor: memory does not grow.

    Raises:
        OSError: the disk is full or failing.
    """
    rows = [(f"{part.first}/{name}", part.bits) for s in snapshots for name, part in sorted(s.tensors.items())]
    tensors = dict(rows)  # a tensor that every rank exports whole is written once
    header: dict[str, object] = {"__metadata__": {"version": str(snapshots[0].version)}}
    offset = 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "U16", "shape": list(bits.shape), "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            file.write(memoryview(np.ascontiguousarray(bits)).cast("B"))


def load_kept(weights: ModelWeights, path: Path) -> None:
    """Replaces ``weights`` by those of :func:`save_kept`.

    Raises:
        SnapshotMismatch: another model's weights, or a damaged file.
    """
    shapes, snapshots = weights.config.tensor_shapes(), []
    try:
        with safe_open(path, framework="numpy") as file:
            version = int((file.metadata() or {}).get("version", "-1"))
            for key in file.keys():  # noqa: SIM118 - a handle, no mapping
                first, _, name = key.partition("/")
                bits = file.get_tensor(key)
                if name not in shapes or bits.dtype != np.uint16 or bits.shape[1:] != tuple(shapes[name][1:]):
                    raise SnapshotMismatch(f"{key[:100]}: {bits.dtype} {bits.shape}, which is no rows of the model's")
                snapshots.append(WeightSnapshot(version, {name: TensorRows(int(first), bits)}, {}))
    except (SafetensorError, OSError, ValueError) as error:
        raise SnapshotMismatch(f"{path.name}: {error}") from error
    if not snapshots:
        raise SnapshotMismatch(f"{path.name} holds no tensor")
    load_snapshots(weights, snapshots)
