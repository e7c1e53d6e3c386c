"""Sampling on a GPU, in Triton: the best of every chunk of columns, then the best chunk.

The noise of a column is keyed by its identity alone, and a maximum has no order; ties go to the lowest id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.sample import DrawKey, SampleProvider, counters
from rl_engine.ops.triton_functions import exp, launch, log, log1p

COLUMNS = 2048


@triton.jit
def philox_first_word(k0, k1, c0, c1, c2, c3):
    """First word of Philox4x32-10, uint32."""
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high_1, low_1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0


@triton.jit
def word(words, i, ids):
    """uint32 word ``i`` of the draw's identity, spread over the columns."""
    return tl.load(words + i).to(tl.uint32, bitcast=True) + tl.zeros_like(ids)


@triton.jit
def sample_kernel(z, mask, words, scores, tokens, z_row, mask_row, first, columns, chunks, inv_t,
                  MASK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Best score fp32 and its token int64 of C columns of one row; -inf and -1 where none exists.

    words int32 [rows, 5]: seed, step, position, sample, prompt.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cols = chunk * C + tl.arange(0, C)
    exists = cols < columns
    zs = tl.load(z + row * z_row + cols, mask=exists, other=0.0) * inv_t
    v = first + cols
    if MASK:
        byte = tl.load(mask + row * mask_row + v // 8, mask=exists, other=0).to(tl.int32)
        exists = exists & ((byte >> (v % 8)) & 1 == 1)
    ids, words = v.to(tl.uint32), words + row * 5
    x = philox_first_word(
        word(words, 0, ids), word(words, 1, ids), ids, word(words, 2, ids), word(words, 3, ids), word(words, 4, ids)
    )
    u = ((x.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32)
    u = tl.minimum(u, 0.999999940395355224609375)
    score = tl.where(exists, zs - log(-log1p(-u)), float("-inf"))
    best = tl.max(score, 0)
    token = tl.min(tl.where(exists & (score == best), v, 0x7FFFFFFF), 0)
    tl.store(scores + row * chunks + chunk, best)
    tl.store(tokens + row * chunks + chunk, tl.where(best > float("-inf"), token, -1).to(tl.int64))


@triton.jit
def best_chunk_kernel(scores, tokens, score, token, chunks, C: tl.constexpr):
    """The best of a row's chunks."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    found = tl.load(scores + row * chunks + n, mask=n < chunks, other=float("-inf"))
    ids = tl.load(tokens + row * chunks + n, mask=n < chunks, other=-1)
    best = tl.max(found, 0)
    lowest = tl.min(tl.where((found == best) & (ids >= 0), ids, 0x7FFFFFFF), 0)
    tl.store(score + row, best)
    tl.store(token + row, tl.where(best > float("-inf"), lowest, -1))


@triton.jit
def mass_kernel(values, mass, columns, C: tl.constexpr):
    """floor(exp(fl(v - v_0)) 2^32), int64, of rows fp32 [rows, columns] in descending order."""
    row, cols = tl.program_id(1).to(tl.int64), tl.program_id(0) * C + tl.arange(0, C)
    top = tl.load(values + row * columns)
    v = tl.load(values + row * columns + cols, mask=cols < columns, other=float("-inf"))
    q = (exp(v - top).to(tl.float64) * 4294967296.0).to(tl.int64)
    tl.store(mass + row * columns + cols, q, mask=cols < columns)


def descending_mass(values: Tensor) -> Tensor:
    """int64 [R, n]: top-p's integer mass of values fp32 [R, n] in descending order."""
    values = values.contiguous()
    mass = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    rows, columns = values.shape
    launch(mass_kernel, (-(-columns // COLUMNS), rows), values, mass, columns, warps=4, C=COLUMNS)
    return mass


class TritonSample(SampleProvider):
    def best(
        self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, keys: list[DrawKey]
    ) -> tuple[Tensor, Tensor]:
        assert z.dtype == torch.float32 and z.stride(1) == 1 and z.shape[0] == len(keys)
        assert mask is None or mask.is_contiguous()
        seed, step, rest = counters(keys)
        both = torch.tensor([seed, step], dtype=torch.int64).to(torch.int32).expand(len(keys), 2)
        words = torch.cat([both, rest], 1).to(z.device)
        return self.best_of(z, first, inv_t, mask, words)

    def best_of(self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, words: Tensor) -> tuple[Tensor, Tensor]:
        """As ``best``, with the draws' identities on the device: int32 [R, 5], seed, step, position, sample, prompt."""
        rows, columns = z.shape
        chunks = max(-(-columns // COLUMNS), 1)
        scores = torch.empty(rows, chunks, dtype=torch.float32, device=z.device)
        tokens = torch.empty(rows, chunks, dtype=torch.int64, device=z.device)
        launch(
            sample_kernel,
            (chunks, rows),
            *(z, z if mask is None else mask, words, scores, tokens, z.stride(0)),
            *(0 if mask is None else mask.shape[1], first, columns, chunks, inv_t),
            warps=4,
            MASK=mask is not None,
            C=COLUMNS,
        )
        score = torch.empty(rows, dtype=torch.float32, device=z.device)
        token = torch.empty(rows, dtype=torch.int64, device=z.device)
        width = triton.next_power_of_2(chunks)
        launch(best_chunk_kernel, (rows,), scores, tokens, score, token, chunks, warps=4, C=width)
        return score, token
