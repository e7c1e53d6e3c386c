"""AdamW on a GPU, in Triton, one pass: 30 bytes an element, 28 without a bf16 weight; changed ones are counted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.adamw import AdamProvider, AdamScalars
from rl_engine.ops.triton_functions import launch, sum_integers

ELEMENTS = 1024


@triton.jit
def _bf16_bits(x):
    return x.to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit
def adamw_kernel(
    master, m, v, grad, weight, changed, n,
    clip, beta1, rest1, beta2, rest2, decay, step_size, root_bc2, eps,
    WRITE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """C elements, in place; changed int32 [programs]: how many of them have another bf16(master) now. WRITE: there is a
    bf16 weight to be written."""
    at = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    inside = at < n
    g = tl.load(grad + at, mask=inside, other=0.0) * clip
    first = tl.load(m + at, mask=inside, other=0.0) * beta1 + g * rest1
    second = tl.load(v + at, mask=inside, other=0.0) * beta2 + (g * rest2) * g
    ratio = tl.div_rn(first, tl.div_rn(tl.sqrt_rn(second), tl.zeros((C,), tl.float32) + root_bc2) + eps)
    before = tl.load(master + at, mask=inside, other=0.0)
    p = before * decay - ratio * step_size
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)
    tl.store(master + at, p, mask=inside)
    if WRITE:
        tl.store(weight + at, p.to(tl.bfloat16), mask=inside)
    count = sum_integers((inside & (_bf16_bits(before) != _bf16_bits(p))).to(tl.int32), 0)
    tl.store(changed + tl.program_id(0), count)


class TritonAdam(AdamProvider):
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
        programs = -(-n // ELEMENTS)
        changed = torch.empty(programs, dtype=torch.int32, device=master.device)
        launch(
            *(adamw_kernel, (programs,), master, m, v, grad, master if weight is None else weight, changed, n, clip),
            *(s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2, s.decay, s.step_size, s.root_bc2, s.eps),
            warps=4,
            WRITE=weight is not None,
            C=ELEMENTS,
        )
        return changed.sum()
