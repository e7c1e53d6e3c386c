"""Linear as torch has it: ``F.linear`` in bf16, autograd's backward."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight


class StockLinear:
    def __call__(
        self, x: Tensor, weight: Weight, residual: Tensor | None = None, layout: PackedLayout | None = None
    ) -> Tensor:
        branch = functional.linear(x, weight.value)
        return branch if residual is None else residual + branch
