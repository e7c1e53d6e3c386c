"""The retained set of top-k, then top-p, exactly.

Contract. Columns are ordered by (zs descending with -0 as +0, id ascending). top-k keeps exactly k. Then, with m the
maximum, ``q_v = floor(exp(fl(zs_v - m)) 2^32)`` in int64: top-p keeps the shortest prefix whose sum reaches
``ceil(fl64(top_p fp64(sum of q over what top-k left)))``, at least one column. -1 and 1.0 skip. There is no size cap.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rl_engine.ops.functions import exp, f32


def retained_mask(z: Tensor, inv_t: float, top_k: int, top_p: float) -> Tensor | None:
    """Packed bits uint8 [R, ceil(V / 8)] of the columns that exist, or None where every column does.

    z is fp32 [R, V], already cut at the true vocabulary.
    """
    vocabulary = z.shape[1]
    if (top_k < 0 or top_k >= vocabulary) and top_p >= 1.0:
        return None
    zs = z * f32(inv_t) + f32(0.0)
    order = torch.sort(zs, dim=1, descending=True, stable=True)
    count = vocabulary if top_k < 0 else min(top_k, vocabulary)
    keep = torch.zeros(z.shape, dtype=torch.bool, device=z.device)
    if top_p >= 1.0:
        keep.scatter_(1, order.indices[:, :count], True)
    else:
        values = order.values[:, :count]
        mass = _mass(values)
        sums = mass.cumsum(1)
        targets = (sums[:, -1:].double() * top_p).ceil().long()  # nothing waits for the device here
        length = (sums < targets).sum(1).add(1).clamp(max=count)
        inside = torch.arange(count, device=z.device)[None] < length[:, None]
        keep.scatter_(1, order.indices[:, :count], inside)
    return _packed(keep)


def _mass(values: Tensor) -> Tensor:
    """int64 q of values fp32 [R, n] in descending order, with the exp of the device they are on."""
    if values.is_cuda:
        from rl_engine.ops.sample.triton import descending_mass

        return descending_mass(values)
    return (exp(values - values[:, :1]).double() * 2.0**32).floor().long()


def _packed(keep: Tensor) -> Tensor:
    """uint8 [R, ceil(V / 8)] of bool [R, V], lowest bit first."""
    if not keep.is_cuda:
        return torch.from_numpy(np.packbits(keep.numpy(), axis=1, bitorder="little"))
    eights = torch.nn.functional.pad(keep, (0, -keep.shape[1] % 8)).unflatten(1, (-1, 8))
    return (eights.long() << torch.arange(8, device=keep.device)).sum(2).to(torch.uint8)
