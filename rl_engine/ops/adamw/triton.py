"""AdamW on a GPU, in Triton, one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rl_engine.ops.adamw import AdamProvider, AdamScalars
from rl_engine.ops.triton_functions import launch

ELEMENTS = 1024


@triton.jit
def adamw_kernel(
    master, m, v, grad, weight, n, clip, beta1, rest1, beta2, rest2, decay, step_size, root_bc2, eps, C: tl.constexpr
):
    """C elements, in place."""
    at = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    inside = at < n
    g = tl.load(grad + at, mask=inside, other=0.0) * clip
    first = tl.load(m + at, mask=inside, other=0.0) * beta1 + g * rest1
    second = tl.load(v + at, mask=inside, other=0.0) * beta2 + (g * rest2) * g
    ratio = tl.div_rn(first, tl.div_rn(tl.sqrt_rn(second), tl.zeros((C,), tl.float32) + root_bc2) + eps)
    p = tl.load(master + at, mask=inside, other=0.0) * decay - ratio * step_size
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)
    tl.store(master + at, p, mask=inside)
    tl.store(weight + at, p.to(tl.bfloat16), mask=inside)


class TritonAdam(AdamProvider):
    def update(
        self, master: Tensor, m: Tensor, v: Tensor, grad: Tensor, weight: Tensor, clip: float, scalars: AdamScalars
    ) -> None:
        assert all(x.is_contiguous() for x in (master, m, v, grad, weight))
        s, n = scalars, master.numel()
        launch(
            adamw_kernel,
            (-(-n // ELEMENTS),),
            *(master, m, v, grad, weight, n, clip, s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2),
            *(s.decay, s.step_size, s.root_bc2, s.eps),
            warps=4,
            C=ELEMENTS,
        )
