"""The trainer's state on disk: fp32 master weights and Adam moments by HF name, from any layout of ranks to any other.

Every rank writes one safetensors file with the rows it owns; together they hold each row once. bf16 weights are not
stored: they are the rounded master weights.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.ops.weight import Weight
from rl_engine.records.private import open_own

FORMAT = "rlkernel.train_state.v1"
KINDS = ("master", "m", "v")


class StateMismatch(RuntimeError):
    """A saved state that is not this model's: rows are missing or of another shape."""


def save_state(engine: TrainEngine, folder: Path) -> None:
    """Writes this rank's ``state-NNNN.safetensors`` into ``folder``; not synced, and memory does not grow.

    Raises:
        OSError: the disk is full or failing.
    """
    tensors: dict[str, Tensor] = {}
    for weight in engine.weights:
        # A weight that every TP rank holds is written once.
        if engine.mesh.tp.index and engine.weights.sharding.is_replicated(weight.name):
            continue
        state = engine.state[weight.name]
        for kind in KINDS:
            for name, first, rows in _pieces(weight, engine.own_rows(weight), getattr(state, kind)):
                tensors[f"{kind}/{first}/{name}"] = rows
    path = folder / f"state-{engine.mesh.world.index:04d}.safetensors"
    _write(path, tensors, {"format": FORMAT, "version": str(engine.version)})


def load_state(engine: TrainEngine, folder: Path) -> None:
    """Takes this rank's rows and the version from whatever ranks wrote ``folder``; all ranks of a mesh call it.

    Raises:
        StateMismatch: not a state of this model.
    """
    with _parts(folder) as (places, version):
        for weight in engine.weights:
            state = engine.state[weight.name]
            for kind in KINDS:
                for name, first, rows in _pieces(weight, engine.own_rows(weight), getattr(state, kind)):
                    _fill(rows, first, places.get((kind, name), []), f"{kind} of {name}")
    engine.version = version
    engine.weights_from_master()


Places = dict[tuple[str, str], list[tuple[int, Any]]]  # (kind, HF name) -> (first row, slice of a file)


def _pieces(weight: Weight, own: tuple[int, int], values: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """(HF name, first row of it, view of ``values``) for every HF tensor that rows ``own`` of ``weight`` touch."""
    start, end = own
    for part in weight.parts:
        first, last = max(part.first, start), min(part.first + part.rows, end)
        if first < last:
            yield part.name, part.offset + first - part.first, values[first - start : last - start]


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, tensor by tensor: the library's own writer first copies everything."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and tensor.is_contiguous(), name
        size = 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb", opener=open_own) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.cpu().numpy()).cast("B"))


@contextlib.contextmanager
def _parts(folder: Path) -> Iterator[tuple[Places, int]]:
    """(where every piece is, version) of a folder's files."""
    places: Places = {}
    versions = set()
    with contextlib.ExitStack() as stack:
        for name in sorted(os.listdir(folder)):
            if not name.startswith("state-"):
                continue
            try:
                file = stack.enter_context(safe_open(folder / name, framework="pt"))
                metadata = file.metadata() or {}
                versions.add(int(metadata.get("version", "-1")))
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"format {metadata.get('format')!r}")
                for key in file.keys():  # noqa: SIM118 - a handle, no mapping
                    kind, first, tensor = key.split("/", 2)
                    places.setdefault((kind, tensor), []).append((int(first), file.get_slice(key)))
            except (SafetensorError, OSError, ValueError) as error:
                raise StateMismatch(f"{name}: {error}") from error
        if len(versions) != 1 or min(versions) < 0:
            raise StateMismatch(f"versions {sorted(versions)} in {folder}, expected one")
        yield places, versions.pop()


def _fill(rows: Tensor, first: int, found: list[tuple[int, Any]], what: str) -> None:
    """Copies rows [first, first + len) from the pieces that hold them."""
    last = first + len(rows)
    place = first
    for start, piece in sorted(found, key=lambda item: item[0]):
        shape = tuple(piece.get_shape())
        if piece.get_dtype() != "F32" or len(shape) != rows.dim() or shape[1:] != tuple(rows.shape[1:]):
            raise StateMismatch(f"{what}: {piece.get_dtype()} {shape}, expected F32 rows of {tuple(rows.shape[1:])}")
        lower, upper = max(place, start), min(last, start + shape[0])
        if start <= place and lower < upper:
            rows[lower - first : upper - first] = piece[lower - start : upper - start]
            place = upper
    if place != last:
        raise StateMismatch(f"{what}: rows {place} to {last} are in no file")
