"""AdamW in C, one pass."""

from __future__ import annotations

from torch import Tensor

from rl_engine.ops.adamw import AdamProvider, AdamScalars
from rl_engine.ops.library import load


class CpuAdam(AdamProvider):
    def update(
        self, master: Tensor, m: Tensor, v: Tensor, grad: Tensor, weight: Tensor, clip: float, scalars: AdamScalars
    ) -> None:
        assert all(x.is_contiguous() for x in (master, m, v, grad, weight))
        s = scalars
        load().rlk_adamw(
            *(master.numel(), master.data_ptr(), m.data_ptr(), v.data_ptr(), grad.data_ptr(), weight.data_ptr(), clip),
            *(s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2, s.decay, s.step_size, s.root_bc2, s.eps),
        )
