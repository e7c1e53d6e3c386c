"""Attention in plain torch, in the stated order; ``gemm`` is the order of one product."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rl_engine.numerics.contract import Contract
from rl_engine.ops.attention import AttentionProvider, run_rows
from rl_engine.ops.attention.paged import PagedBatch, transposed_pairs
from rl_engine.ops.functions import chain256_gemm, chain_gemm, exp, f32, log, tree_sum
from rl_engine.ops.layout import PackedLayout, Runs

BLOCK, SPLIT = Contract().kv_block, Contract().kv_split
State = tuple[Tensor, Tensor, Tensor, Tensor]  # m, l, mu [Q], O [Q, D]


def _rounded(x: Tensor) -> Tensor:
    """fp32 values rounded to bf16."""
    return x.bfloat16().float()


class ReferenceAttention(AttentionProvider):
    gemm = staticmethod(chain_gemm)

    def _split(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, first: int, last: int) -> State:
        """State of queries q [Q, D] over keys [first, last), from the empty state."""
        c = f32(q.shape[1] ** -0.5)
        m = torch.full((q.shape[0],), -torch.inf)
        l, mu, o = torch.zeros_like(m), m.clone(), torch.zeros(q.shape[0], v.shape[1])
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            exists = torch.arange(start, stop)[None] <= positions[:, None]
            some = exists.any(1)
            d = self.gemm(q, k[start:stop].T)
            top = torch.maximum(m, d.masked_fill(~exists, -torch.inf).amax(1)) + f32(0.0)
            mu_new = top * c
            p = torch.where(exists, exp(d * c - mu_new[:, None]), f32(0.0))
            p = torch.nn.functional.pad(p, (0, BLOCK - (stop - start)))
            alpha = torch.where(m == -torch.inf, f32(0.0), exp(mu - mu_new))
            block = self.gemm(_rounded(p[:, : stop - start]), v[start:stop])
            l = torch.where(some, l * alpha + tree_sum(p), l)
            o = torch.where(some[:, None], o * alpha[:, None] + block, o)
            m, mu = torch.where(some, top, m), torch.where(some, mu_new, mu)
        return m, l, mu, o

    @staticmethod
    def _merge(total: State, split: State) -> State:
        m, l, mu, o = total
        m_s, l_s, mu_s, o_s = split
        top = torch.maximum(mu, mu_s)
        a, b = exp(mu - top), exp(mu_s - top)
        merged = (torch.maximum(m, m_s), l * a + l_s * b, top, o * a[:, None] + o_s * b[:, None])
        fresh, none = m == -torch.inf, m_s == -torch.inf

        def pick(old: Tensor, new: Tensor, both: Tensor) -> Tensor:
            shape = (-1,) + (1,) * (both.dim() - 1)
            return torch.where(none.view(shape), old, torch.where(fresh.view(shape), new, both))

        return tuple(pick(old, new, both) for old, new, both in zip(total, split, merged, strict=True))  # type: ignore[return-value]

    def _head(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One query head against one KV head of one sample: (O / l fp32 [Q, D], LSE [Q])."""
        length = int(positions[-1]) + 1
        total = self._split(q, k, v, positions, 0, min(SPLIT, length))
        for first in range(SPLIT, length, SPLIT):
            total = self._merge(total, self._split(q, k, v, positions, first, min(first + SPLIT, length)))
        _, l, mu, o = total
        return o / l[:, None], mu + log(l)

    def _sample(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + q.shape[0])
        out = torch.empty(q.shape, dtype=torch.bfloat16)
        lse = torch.empty(q.shape[:2])
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            values, lse[:, head] = self._head(
                q[:, head].float(), k[:, head // group].float(), v[:, head // group].float(), positions
            )
            out[:, head] = values.bfloat16()
        return out, lse

    def forward_runs(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, runs: Runs) -> tuple[Tensor, Tensor]:
        offsets, done, results = layout.offsets.tolist(), 0, []
        for sample, first, count in runs:
            keys = slice(offsets[sample], offsets[sample] + first + count)
            results.append(self._sample(q[done : done + count], k[keys], v[keys], first))
            done += count
        nothing = (torch.empty_like(q[:0]), torch.empty(0, q.shape[1]))
        outs, lses = zip(nothing, *results, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def over_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: PagedBatch,
        *,
        settled: bool = False,
    ) -> Tensor:
        page, kept = v_pages.shape[2], batch.slots >= 0
        pages, slots = batch.slots[kept] // page, batch.slots[kept] % page
        k_pages[pages, :, :, slots] = k[kept]
        v_pages[pages, :, slots] = v[kept]
        out = torch.zeros_like(q)
        for s, (start, rows) in enumerate(zip(batch.q_position.tolist(), batch.counts(), strict=True)):
            if not rows:
                continue
            length = start + rows
            table = batch.table[s, : -(-length // page)].long()
            keys = k_pages[table].permute(0, 3, 1, 2).flatten(0, 1)[:length]
            values = v_pages[table].permute(0, 2, 1, 3).flatten(0, 1)[:length]
            first = int(batch.q_offsets[s])
            out[first : first + rows] = self._sample(q[first : first + rows], keys, values, start)[0]
        return out

    def paired_pages(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        return transposed_pairs(pages)

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return tree_sum(dout.float() * out.float())

    def backward_runs(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        layout: PackedLayout,
        runs: Runs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.bfloat16) for x in (q, k, v))
        bounds = layout.offsets.tolist()
        for first, last in itertools.pairwise(bounds):
            part = slice(first, last)
            for kv in range(k.shape[1]):
                sums_k, sums_v = torch.zeros(last - first, q.shape[2]), torch.zeros(last - first, q.shape[2])
                for head in range(kv * group, (kv + 1) * group):
                    rows = (x[part, head].float() for x in (q, dout))
                    keys = (x[part, kv].float() for x in (k, v))
                    dq[part, head] = self._head_backward(
                        *rows, *keys, lse[part, head], delta[part, head], sums_k, sums_v
                    )
                dk[part, kv] = (sums_k * f32(q.shape[2] ** -0.5)).bfloat16()
                dv[part, kv] = sums_v.bfloat16()
        rows = run_rows(layout, runs)
        return dq[rows], dk[rows], dv[rows]

    def _head_backward(
        self, q: Tensor, do: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, sums_k: Tensor, sums_v: Tensor
    ) -> Tensor:
        """dq bf16 of one head and sample; adds its blocks into sums_k and sums_v, query blocks ascending."""
        n, c = q.shape[0], f32(q.shape[1] ** -0.5)
        sums_q = torch.zeros_like(q)
        for i in range(0, n, BLOCK):
            for j in range(0, i + 1, BLOCK):
                a, b = slice(i, min(i + BLOCK, n)), slice(j, min(j + BLOCK, n))
                exists = torch.arange(n)[b][None] <= torch.arange(n)[a][:, None]
                p = exp(self.gemm(q[a], k[b].T) * c - lse[a, None])
                ds = _rounded(p * (self.gemm(do[a], v[b].T) - delta[a, None]))
                p, ds = (torch.where(exists, x, f32(0.0)) for x in (_rounded(p), ds))
                sums_q[a] = sums_q[a] + self.gemm(ds, k[b])
                sums_v[b] = sums_v[b] + self.gemm(p.T, do[a])
                sums_k[b] = sums_k[b] + self.gemm(ds.T, q[a])
        return (sums_q * c).bfloat16()


class FallbackAttention(ReferenceAttention):
    """The provider of a machine without a C compiler (contract id ``rlk.v1/cpu-chain256``)."""

    gemm = staticmethod(chain256_gemm)
