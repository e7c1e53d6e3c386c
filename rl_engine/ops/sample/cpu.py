"""Sampling in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.library import load
from rl_engine.ops.sample import DrawKey, SampleProvider, counters


class CpuSample(SampleProvider):
    def best(
        self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, keys: list[DrawKey]
    ) -> tuple[Tensor, Tensor]:
        assert z.stride(1) == 1 and z.shape[0] == len(keys)
        assert mask is None or mask.is_contiguous()
        seed, step, words = counters(keys)
        tokens, scores = torch.empty(len(keys), dtype=torch.int64), torch.empty(len(keys))
        load().rlk_sample(
            *(z.shape[0], first, z.shape[1], z.data_ptr(), z.stride(0), inv_t),
            *(None if mask is None else mask.data_ptr(), 0 if mask is None else mask.shape[1]),
            *(seed, step, words.data_ptr(), tokens.data_ptr(), scores.data_ptr()),
        )
        return scores, tokens
