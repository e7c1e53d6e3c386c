"""Weights as they cross between engines: bytes with a digest per tensor, checked on arrival."""

from __future__ import annotations

import numpy as np
import torch

from rl_engine.engines.types import WeightSnapshot
from rl_engine.models.weights import ModelWeights
from rl_engine.numerics.digest import tensor_digest


class SnapshotMismatch(RuntimeError):
    """A tensor's bytes are not those that were exported."""


def export_snapshot(weights: ModelWeights, version: int) -> WeightSnapshot:
    """The model's bf16 weights by HF name."""
    tensors, digests = {}, {}
    with torch.no_grad():
        for name, tensor in weights.export().items():
            tensors[name] = tensor.detach().view(torch.int16).numpy().view(np.uint16)
            digests[name] = tensor_digest(name, tensor.detach())
    return WeightSnapshot(version, tensors, digests)


def load_snapshot(weights: ModelWeights, snapshot: WeightSnapshot) -> dict[str, str]:
    """Replaces ``weights`` by the snapshot; the digests of what arrived.

    Raises:
        SnapshotMismatch: a digest differs from the exporter's.
    """
    tensors, digests = {}, {}
    for name, bits in snapshot.tensors.items():
        tensor = torch.from_numpy(np.ascontiguousarray(bits).view(np.int16).copy()).view(torch.bfloat16)
        digests[name] = tensor_digest(name, tensor)
        if digests[name] != snapshot.digests.get(name):
            raise SnapshotMismatch(f"{name} of weight version {snapshot.version} arrived with another digest")
        tensors[name] = tensor
    weights.load(tensors)
    return digests
