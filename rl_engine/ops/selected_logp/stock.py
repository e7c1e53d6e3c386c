"""Selected logp as the stock engines have it: fp32 ``log_softmax`` over the logits, autograd's backward."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.lm_head.stock import StockHead
from rl_engine.ops.selected_logp import check_targets
from rl_engine.ops.selected_logp.reference import unpack_mask
from rl_engine.ops.weight import Weight


class StockLogp:
    def from_logits(
        self, z: Tensor, targets: Tensor, temperature: float, mask: Tensor | None, exchange: Exchange = ALONE
    ) -> tuple[Tensor, Tensor]:
        z = exchange.join_logits(z)
        check_targets(targets, z.shape[1], mask, exchange.waits)
        scaled = z / temperature if temperature != 1.0 else z
        if mask is not None:
            scaled = scaled.masked_fill(~unpack_mask(mask, 0, z.shape[1]), -torch.inf)
        logps = scaled.log_softmax(-1)
        with torch.no_grad():
            finite = logps if mask is None else logps.nan_to_num(neginf=0.0)
            entropy = -(logps.exp() * finite).sum(-1)
        return logps.gather(1, targets[:, None])[:, 0], entropy

    def score(
        self,
        hidden: Tensor,
        weight: Weight,
        targets: Tensor,
        temperature: float,
        mask: Tensor | None,
        layout: PackedLayout,
        rows: Tensor,
        head: StockHead,
        exchange: Exchange = ALONE,
    ) -> tuple[Tensor, Tensor]:
        own, local = exchange.own_rows(layout, rows)
        z = head.logits(exchange.spread(hidden[local]), weight)
        return self.from_logits(z, targets[own], temperature, None if mask is None else mask[own], exchange)
