"""Weights as they cross between engines: rows of HF tensors, from any layout to any other, with digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_engine.engines.protocol import Rows, WeightPart, WeightSource
from rl_engine.engines.types import SnapshotMismatch, TensorRows, WeightSnapshot
from rl_engine.models.weights import ModelWeights
from rl_engine.numerics.digest import digest_tensors, tensor_digest

DIGEST_THREADS = 8  # each copies one tensor from a GPU


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


class JoinedWeights:
    """The parts of every rank as one source of weights.

    Raises:
        SnapshotMismatch: parts of different versions.
    """

    def __init__(self, parts: Sequence[WeightPart]) -> None:
        versions = {part.version for part in parts}
        if len(versions) != 1:
            raise SnapshotMismatch(f"snapshots of versions {sorted(versions)}")
        self.version = versions.pop()
        self._held: dict[str, list[tuple[int, int, WeightPart]]] = {}
        for part in parts:
            for name, (first, last) in part.held.items():
                self._held.setdefault(name, []).append((first, last, part))
        for pieces in self._held.values():
            pieces.sort(key=lambda piece: piece[0])

    @property
    def held(self) -> dict[str, tuple[int, int]]:
        """HF name -> (0, number of its rows)."""
        return {name: (0, max(last for _, last, _ in pieces)) for name, pieces in sorted(self._held.items())}

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """bf16 rows [first, last) of an HF tensor, a copy of the caller's own, joined where several parts have them.

        Raises:
            SnapshotMismatch: no part has some of the rows.
        """
        found: list[Tensor] = []
        place = first
        for start, end, part in self._held.get(name, ()):
            if start <= place < min(last, end):
                found.append(part.rows(name, place, min(last, end)))
                place = min(last, end)
        if place != last or not found:
            raise SnapshotMismatch(f"rows {place} to {last} of {name} were exported by no rank")
        return found[0] if len(found) == 1 else torch.cat(found)


def rows_digest(source: WeightSource, name: str, first: int, last: int) -> str:
    """Digest of rows [first, last) of a tensor, as an engine's rank that holds them would report it."""
    return tensor_digest(name, source.rows(name, first, last))


def row_digests(source: WeightSource, rows: Rows) -> dict[str, str]:
    """Digest of rows (first, last + 1) of every tensor."""
    return {name: rows_digest(source, name, first, last) for name, (first, last) in rows.items()}


def own_digests(weights: ModelWeights) -> dict[str, str]:
    """Digest of the rows that this rank holds of every HF tensor."""
    return _digests(weights.export())


def _digests(rows: Mapping[str, Tensor]) -> dict[str, str]:
    detached = {name: values.detach() for name, values in rows.items()}
    return digest_tensors(detached, min(torch.get_num_threads(), DIGEST_THREADS))


def load_source(weights: ModelWeights, source: WeightSource) -> dict[str, str]:
    """Replaces ``weights`` by this rank's rows of the source; digests of what arrived, before anything is packed.

    Raises:
        SnapshotMismatch: a row that no rank exported.
    """
    weights.load(source.rows)
    return own_digests(weights)
