"""Selected logp in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.library import load
from rl_engine.ops.selected_logp import LogpProvider, LogpState
from rl_engine.ops.selected_logp.vocabulary import group_columns


def _mask_arguments(mask: Tensor | None) -> tuple[int | None, int]:
    if mask is None:
        return None, 0
    assert mask.dtype == torch.uint8 and mask.is_contiguous()
    return mask.data_ptr(), mask.shape[1]


class CpuLogp(LogpProvider):
    def merge_columns(
        self,
        z: Tensor,
        first: int,
        vocabulary: int,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        state: LogpState,
    ) -> None:
        assert z.stride(1) == 1
        targets = targets.contiguous()
        load().rlk_logp_groups(
            *(z.shape[0], first, z.shape[1], vocabulary, group_columns(vocabulary), z.data_ptr(), z.stride(0), inv_t),
            *(*_mask_arguments(mask), targets.data_ptr()),
            *(state.m.data_ptr(), state.l.data_ptr(), state.w.data_ptr(), state.zs_target.data_ptr()),
        )

    def merge_groups(self, m: Tensor, l: Tensor, w: Tensor, state: LogpState) -> None:
        m, l, w = m.contiguous(), l.contiguous(), w.contiguous()
        load().rlk_logp_merge(
            *(m.shape[1], m.shape[0], m.data_ptr(), l.data_ptr(), w.data_ptr()),
            *(state.m.data_ptr(), state.l.data_ptr(), state.w.data_ptr()),
        )

    def finish(self, state: LogpState) -> tuple[Tensor, Tensor]:
        logp, entropy = torch.empty_like(state.m), torch.empty_like(state.m)
        load().rlk_logp_finish(
            *(state.m.numel(), state.m.data_ptr(), state.l.data_ptr(), state.w.data_ptr()),
            *(state.zs_target.data_ptr(), logp.data_ptr(), entropy.data_ptr()),
        )
        return logp, entropy

    def logits_gradient(
        self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, targets: Tensor, state: LogpState, c: Tensor
    ) -> Tensor:
        dz = torch.empty(z.shape, dtype=torch.bfloat16)
        targets, c = targets.contiguous(), c.contiguous()
        load().rlk_logits_gradient(
            *(z.shape[0], first, z.shape[1], z.data_ptr(), z.stride(0), inv_t, *_mask_arguments(mask)),
            *(targets.data_ptr(), state.m.data_ptr(), state.l.data_ptr(), c.data_ptr(), dz.data_ptr()),
        )
        return dz
