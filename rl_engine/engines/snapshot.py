"""Weights as they cross between engines: rows of HF tensors as bytes, from any layout to any other, with digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_engine.engines.types import TensorRows, WeightSnapshot
from rl_engine.models.weights import ModelWeights
from rl_engine.numerics.digest import digest_tensors, tensor_digest

DIGEST_THREADS = 8  # each copies one tensor from a GPU
Bits = npt.NDArray[np.uint16]


class SnapshotMismatch(RuntimeError):
    """Rows are missing, or bytes are not those that were exported."""


def export_snapshot(weights: ModelWeights, version: int) -> WeightSnapshot:
    """This rank's bf16 rows by HF name: views, or copies where the weights lie on a GPU."""
    return snapshot_of(weights.export_rows(), version)


def snapshot_of(rows: Mapping[str, tuple[int, Tensor]], version: int) -> WeightSnapshot:
    """The snapshot of anybody's weights: HF name -> (first row, bf16 rows [n, ...] of that tensor), rank by rank as
    they lie there; views, or copies where they lie on a GPU.

    Raises:
        SnapshotMismatch: rows of another dtype.
    """
    for name, (_, values) in rows.items():
        if values.dtype != torch.bfloat16:
            raise SnapshotMismatch(f"{name} has {values.dtype} rows, expected bf16: the owner rounds them")
    tensors = {
        name: TensorRows(first, values.detach().contiguous().view(torch.int16).cpu().numpy().view(np.uint16))
        for name, (first, values) in rows.items()
    }
    return WeightSnapshot(version, tensors, _digests({name: values for name, (_, values) in rows.items()}))


def rows_of(snapshots: Sequence[WeightSnapshot], name: str, first: int, last: int) -> Bits:
    """Rows [first, last) of HF tensor ``name`` from the ranks' snapshots; a copy only where they come from several.

    Raises:
        SnapshotMismatch: no rank exported some of the rows.
    """
    pieces: list[Bits] = []
    place = first
    for part in sorted((s.tensors[name] for s in snapshots if name in s.tensors), key=lambda rows: rows.first):
        start, end = max(place, part.first), min(last, part.first + len(part.bits))
        if start == place and start < end:
            pieces.append(part.bits[start - part.first : end - part.first])
            place = end
    if place != last or not pieces:
        raise SnapshotMismatch(f"rows {place} to {last} of {name} were exported by no rank")
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _as_tensor(bits: Bits) -> Tensor:
    # Arrays from an object store are read-only, which torch does not know: it gets a copy, a tensor at a time.
    return torch.from_numpy(np.array(bits, order="C").view(np.int16)).view(torch.bfloat16)


def snapshot_digests(snapshots: Sequence[WeightSnapshot]) -> dict[str, str]:
    """Digest of every whole HF tensor, whatever the layout that exported it."""
    names = {name for snapshot in snapshots for name in snapshot.tensors}
    rows = {
        name: (0, max(s.tensors[name].first + len(s.tensors[name].bits) for s in snapshots if name in s.tensors))
        for name in sorted(names)
    }
    return shard_digests(snapshots, rows)


def shard_digests(snapshots: Sequence[WeightSnapshot], rows: dict[str, tuple[int, int]]) -> dict[str, str]:
    """Digest of rows (first, last + 1) of every tensor, as an engine rank that holds them would report it."""
    return {
        name: tensor_digest(name, _as_tensor(rows_of(snapshots, name, first, last)))
        for name, (first, last) in rows.items()
    }


def own_digests(weights: ModelWeights) -> dict[str, str]:
    """Digest of the rows that this rank holds of every HF tensor."""
    return _digests(weights.export())


def _digests(rows: Mapping[str, Tensor]) -> dict[str, str]:
    detached = {name: values.detach() for name, values in rows.items()}
    return digest_tensors(detached, min(torch.get_num_threads(), DIGEST_THREADS))


def load_snapshots(weights: ModelWeights, snapshots: Sequence[WeightSnapshot]) -> dict[str, str]:
    """Replaces ``weights`` by this rank's rows of the snapshots; digests of what arrived, before anything is packed.

    Raises:
        SnapshotMismatch: a row that no rank exported, or snapshots of different versions.
    """
    versions = {snapshot.version for snapshot in snapshots}
    if len(versions) != 1:
        raise SnapshotMismatch(f"snapshots of versions {sorted(versions)}")

    def read(name: str, first: int, last: int) -> Tensor:
        return _as_tensor(rows_of(snapshots, name, first, last))

    weights.load(read)
    return own_digests(weights)
