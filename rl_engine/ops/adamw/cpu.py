"""AdamW in C, one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.adamw import AdamProvider, AdamScalars
from rl_engine.ops.library import load

CHUNK = 1 << 16


class CpuAdam(AdamProvider):
    def update(
        self,
        master: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        weight: Tensor | None,
        clip: float,
        scalars: AdamScalars,
    ) -> Tensor:
        assert all(x is None or x.is_contiguous() for x in (master, m, v, grad, weight))
        s, n = scalars, master.numel()
        changed = torch.zeros(-(-n // CHUNK), dtype=torch.int64)
        pointers = (None if x is None else x.data_ptr() for x in (master, m, v, grad, weight, changed))
        load().rlk_adamw(
            *(n, CHUNK, *pointers, clip, s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2),
            *(s.decay, s.step_size, s.root_bc2, s.eps),
        )
        return changed.sum()
