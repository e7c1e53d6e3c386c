"""Selected logp in plain torch, in the stated order."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.functions import exp, f32, log, tree_sum
from rl_engine.ops.selected_logp import LogpProvider, LogpState
from rl_engine.ops.selected_logp.vocabulary import TILE, group_columns


def unpack_mask(mask: Tensor, first: int, last: int) -> Tensor:
    """bool [T, last - first] of packed bits uint8 [T, ceil(V / 8)]."""
    columns = torch.arange(first, last, device=mask.device)
    return ((mask[:, columns // 8].long() >> (columns % 8)) & 1).bool()


Stats = tuple[Tensor, Tensor, Tensor]  # m, l, w


def _merge(total: Stats, tile: Stats) -> Stats:
    m, l, w = total
    m_t, l_t, w_t = tile
    top = torch.maximum(m, m_t)
    a, b = exp(m - top), exp(m_t - top)
    both = (top, l * a + l_t * b, w * a + w_t * b)
    fresh, none = m == -torch.inf, m_t == -torch.inf
    picked = [
        torch.where(none, old, torch.where(fresh, new, joined))
        for old, new, joined in zip(total, tile, both, strict=True)
    ]
    return picked[0], picked[1], picked[2]


class ReferenceLogp(LogpProvider):
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
        zs = z * f32(inv_t)
        last = first + z.shape[1]
        exists = torch.ones_like(zs, dtype=torch.bool) if mask is None else unpack_mask(mask, first, last)
        width = group_columns(vocabulary)
        total: Stats = (state.m, state.l, state.w)
        for group in range(0, z.shape[1], width):
            inner: Stats = (torch.full_like(state.m, -torch.inf), torch.zeros_like(state.l), torch.zeros_like(state.w))
            for tile in range(group, min(group + width, z.shape[1]), TILE):
                stop = min(tile + TILE, group + width, z.shape[1])
                inner = _merge(inner, self._tile(zs[:, tile:stop], exists[:, tile:stop]))
            total = _merge(total, inner)
        state.m.copy_(total[0])
        state.l.copy_(total[1])
        state.w.copy_(total[2])
        here = (targets >= first) & (targets < last)
        rows = here.nonzero()[:, 0]
        state.zs_target[rows] = zs[rows, targets[rows] - first]

    @staticmethod
    def _tile(zs: Tensor, exists: Tensor) -> Stats:
        m = zs.masked_fill(~exists, -torch.inf).amax(1) + f32(0.0)
        e = torch.where(exists, exp(zs - m[:, None]), f32(0.0))
        ez = torch.where(exists & (zs != -torch.inf), e * zs, f32(0.0))
        pad = (0, TILE - zs.shape[1])
        l, w = (tree_sum(torch.nn.functional.pad(x, pad)) for x in (e, ez))
        none = m == -torch.inf
        return m, torch.where(none, f32(0.0), l), torch.where(none, f32(0.0), w)

    def merge_groups(self, m: Tensor, l: Tensor, w: Tensor, state: LogpState) -> None:
        total: Stats = (state.m, state.l, state.w)
        for group in zip(m, l, w, strict=True):
            total = _merge(total, group)
        state.m, state.l, state.w = total

    def finish(self, state: LogpState) -> tuple[Tensor, Tensor]:
        log_l = log(state.l)
        return (state.zs_target - state.m) - log_l, (state.m + log_l) - state.w / state.l

    def logits_gradient(
        self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, targets: Tensor, state: LogpState, c: Tensor
    ) -> Tensor:
        zs = z * f32(inv_t)
        p = exp((zs - state.m[:, None]) - log(state.l)[:, None])
        columns = torch.arange(first, first + z.shape[1])
        chosen = (columns[None] == targets[:, None]).float()
        dz = ((c * f32(inv_t))[:, None] * (p - chosen)).bfloat16()
        return dz if mask is None else torch.where(unpack_mask(mask, first, first + z.shape[1]), dz, 0.0)
