"""Sampling in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.functions import f32, log, log1p
from rl_engine.ops.sample import DrawKey, SampleProvider
from rl_engine.ops.selected_logp.reference import unpack_mask

WORD = 0xFFFFFFFF


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of a 64-bit product, in int64 arithmetic that cannot overflow."""
    low_part, high_part = multiplier * (word & 0xFFFF), multiplier * (word >> 16)
    total = low_part + ((high_part & 0xFFFF) << 16)
    return (high_part >> 16) + (total >> 32), total & WORD


def philox_first_word(key: tuple[int, int], counter: tuple[Tensor, int, int, int]) -> Tensor:
    """First word (int64 holding 32 bits) of Philox4x32-10; the first counter word is a tensor."""
    c0 = counter[0].long()
    c1, c2, c3 = (torch.full_like(c0, value) for value in counter[1:])
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product(0xD2511F53, c0)
        high1, low1 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0


class ReferenceSample(SampleProvider):
    def best(
        self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, keys: list[DrawKey]
    ) -> tuple[Tensor, Tensor]:
        zs = z * f32(inv_t)
        ids = torch.arange(first, first + z.shape[1])
        exists = None if mask is None else unpack_mask(mask, first, first + z.shape[1])
        scores, tokens = [], []
        for row, key in enumerate(keys):
            x = philox_first_word((key.seed, key.step), (ids, key.position, key.sample, key.prompt))
            u = ((x.double() + 0.5) * 2.0**-32).float().clamp(max=1.0 - 2.0**-24)
            score = zs[row] - log(-log1p(-u))
            if exists is not None:
                score = score.masked_fill(~exists[row], -torch.inf)
            best = score.max() if score.numel() else torch.tensor(-torch.inf)
            found = (score == best).nonzero() if best > -torch.inf else ids.new_empty(0, 1)
            scores.append(float(best))
            tokens.append(int(ids[found[0]]) if found.numel() else -1)
        return torch.tensor(scores, dtype=torch.float32), torch.tensor(tokens, dtype=torch.int64)
