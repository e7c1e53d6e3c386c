"""Embedding's gradient on a GPU, in Triton: tokens sorted by id (stably), one chain a table row, no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.embedding import EmbeddingProvider
from rl_engine.ops.triton_functions import launch
from rl_engine.ops.weight import Weight

COLUMNS = 512


@triton.jit
def lookup_gradient_kernel(ids, order, ends, rows, grad, width, row_stride, FRESH: tl.constexpr, C: tl.constexpr):
    """C columns of one table row, at the first place of its id among the sorted ``ids``: the chain over its tokens, in
    token order. FRESH: the chain starts from +0 and is added once; otherwise it starts from the row's own value.

    order int64: token of each sorted place. ends int64: first place behind the id's last.
    """
    chunks = tl.cdiv(width, C)  # one axis of the grid: another one ends at 65,535
    place, cols = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks * C + tl.arange(0, C)
    token = tl.load(ids + place)
    before = tl.load(ids + place - 1, mask=place > 0, other=-1)
    if token != before:
        inside, at = cols < width, grad + token * width + cols
        total = tl.load(at, mask=inside, other=0.0)
        chain = tl.zeros((C,), tl.float32) if FRESH else total
        for i in tl.range(place, tl.load(ends + place), num_stages=4):
            row = tl.load(order + i)
            chain = chain + tl.load(rows + row * row_stride + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total + chain if FRESH else chain, mask=inside)


class TritonEmbedding(EmbeddingProvider):
    def lookup_gradient(self, ids: Tensor, rows: Tensor, grad: Tensor) -> None:
        self._add(ids, rows, grad, False)

    def finish(self, weight: Weight) -> None:
        assert weight.grad is not None
        if weight.lookups:
            ids = torch.cat([ids for ids, _ in weight.lookups])
            rows = torch.cat([rows for _, rows in weight.lookups])
            self._add(ids, rows, weight.grad, True)
            weight.lookups.clear()

    @staticmethod
    def _add(ids: Tensor, rows: Tensor, grad: Tensor, fresh: bool) -> None:
        assert rows.stride(1) == 1 and grad.is_contiguous() and rows.dtype == torch.bfloat16
        found = torch.sort(ids, stable=True)
        ends = torch.searchsorted(found.values, found.values, right=True)
        launch(
            lookup_gradient_kernel,
            (-(-rows.shape[1] // COLUMNS) * ids.numel(),),
            *(found.values, found.indices, ends, rows, grad, rows.shape[1], rows.stride(0)),
            warps=4,
            stages=4,
            FRESH=fresh,
            C=COLUMNS,
        )
