"""One rank's placement of a model: every operator sees all tokens and all columns; nothing is exchanged."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.models.sharding import Sharding
from rl_engine.ops import Operators
from rl_engine.ops.device_checks import demand
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.sample.retained import retained_mask
from rl_engine.ops.selected_logp import inverse_temperature
from rl_engine.ops.weight import Weight


class NonFiniteLogits(ArithmeticError):
    """A logit is NaN: no token can be drawn."""


def refuse_nan(tokens: Tensor, waits: bool = True) -> Tensor:
    """The drawn tokens.

    Args:
        waits: the host waits for the answer; without it the device asserts it (``device_checks.demand``).

    Raises:
        NonFiniteLogits: a sampler found a NaN (token -1), where the host waits.
    """
    message = "a logit is NaN, so no token can be drawn; look at the weights and the last update"
    if not waits:
        demand((tokens >= 0).all(), message)
    elif bool((tokens < 0).any()):
        raise NonFiniteLogits(message)
    return tokens


class OneRank:
    """What ``Sharded`` does with groups of ranks, done by one.

    ``waits``: the host may wait for the device to refuse a token; without it the device asserts what it must refuse.
    """

    def __init__(self, ops: Operators, sharding: Sharding, waits: bool = True) -> None:
        self.ops, self.sharding, self.waits = ops, sharding, waits

    def own_tokens(self, layout: PackedLayout) -> Tensor:
        """int64: places of this rank's tokens in the joined row."""
        return torch.arange(layout.tokens)

    def own_rows(self, layout: PackedLayout, rows: Tensor) -> Tensor:
        """int64: which of ``rows`` (places in the joined row, ascending) this rank owns."""
        return torch.arange(rows.numel())

    def fold_gradients(self, weight: Weight, rows: tuple[int, int]) -> None:
        """Nothing to exchange: the gradient is whole."""

    def embedding(self, ids: Tensor, weight: Weight, layout: PackedLayout | None) -> Tensor:
        return self.ops.embedding(ids, weight)

    def finish_embedding(self, weight: Weight) -> None:
        self.ops.finish_embedding(weight)

    def norm(self, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None) -> Tensor:
        return self.ops.rms_norm(x, weight, eps, layout)

    def qk_norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        q_norm: Weight,
        k_norm: Weight,
        eps: float,
        positions: Tensor,
        table: RopeTable,
        layout: PackedLayout | None,
    ) -> tuple[Tensor, Tensor]:
        return self.ops.qk_norm_rope(q, k, q_norm, k_norm, eps, positions, table, layout)

    def project(self, x: Tensor, weight: Weight, layout: PackedLayout | None) -> Tensor:
        """Whole rows in, this rank's columns out (qkv, gate and up)."""
        return self.ops.linear(x, weight, None, layout)

    def project_back(self, x: Tensor, weight: Weight, stream: Tensor, layout: PackedLayout | None) -> Tensor:
        """This rank's columns in, the whole new stream out (o, down), the residual added."""
        return self.ops.linear(x, weight, stream, layout)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        return self.ops.attention_packed(q, k, v, layout)

    def score(
        self,
        hidden: Tensor,
        weight: Weight,
        targets: Tensor,
        temperature: float,
        mask: Tensor | None,
        layout: PackedLayout,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(logp, entropy) fp32 of this rank's share of ``rows``; targets and mask cover all of them.

        Targets and mask lie where hidden lies; rows may be on a CPU.
        """
        return self.ops.score(hidden, weight, targets, temperature, mask, layout, rows.to(hidden.device))

    def gather_rows(self, layout: PackedLayout, rows: Tensor, values: Tensor) -> Tensor:
        """All ranks' values fp32 of their share of ``rows``, in order."""
        return values

    def draw(
        self, hidden: Tensor, weight: Weight, temperature: float, top_k: int, top_p: float, keys: list[DrawKey]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(tokens int64, logprobs fp32, mask of the retained set or None) of the token after each row."""
        z = self.ops.logits(hidden, weight)
        inv_t = inverse_temperature(temperature)
        mask = retained_mask(z, inv_t, top_k, top_p)
        tokens = refuse_nan(self.ops.draw(z, inv_t, mask, keys), self.waits)
        logprobs, _ = self.ops.logp_from_logits(z, tokens, temperature, mask, self.waits)
        return tokens, logprobs, mask

    def draw_words(self, hidden: Tensor, weight: Weight, temperature: float, words: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens int64, logprobs fp32) without filters, of draws whose identities lie on the device; as
        ``Operators.draw_and_score``."""
        return self.ops.draw_and_score(self.ops.logits(hidden, weight), temperature, words)

    def raw_logprobs(self, hidden: Tensor, weight: Weight, tokens: Tensor) -> Tensor:
        """fp32: log-probability of ``tokens`` at temperature 1 over the whole vocabulary."""
        return self.ops.logp_from_logits(self.ops.logits(hidden, weight), tokens, 1.0, None, self.waits)[0]
