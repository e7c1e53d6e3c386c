"""What ranks exchange around an operator. Operators compute elements and partials; the exchange moves them.

Each operator has one autograd function, for one rank and for many: it calls the exchange that it was given. On one rank
every exchange is the identity, which is what this module has; ``models.exchange`` has those of a TP x CP mesh. Stock
operators call the same exchanges and leave their backward pass to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_engine.ops.layout import PackedLayout, Runs, whole_runs
from rl_engine.ops.weight import Weight

if TYPE_CHECKING:
    from rl_engine.ops.selected_logp import LogpState
    from rl_engine.ops.selected_logp.vocabulary import Share

Places = Tensor | slice


class Exchange:
    """A rank alone: all tokens, all columns, nothing to exchange.

    Attributes:
        alone: no exchange moves anything, so an operator may fuse over where others would.
        share: this rank's columns of the vocabulary; None: every column.
        waits: the host may wait for the device, to refuse a token and to exchange no more rows than needed; without it
            the device asserts what it must refuse, and exchanges have fixed sizes.
    """

    alone = True
    share: Share | None = None

    def __init__(self, waits: bool = True) -> None:
        self.waits = waits

    # -- columns

    def spread(self, x: Tensor) -> Tensor:
        """``x``, which every TP rank holds. Its gradient is the sum of what every rank's autograd gives it."""
        return x

    def join_inputs(self, x: Tensor, weight: Weight, *, purpose: str) -> Tensor:
        """Whole rows [T, K] of every rank's input columns of ``weight``."""
        return x

    def join_outputs(self, y: Tensor, weight: Weight) -> Tensor:
        """Whole rows [T, N] of every rank's output columns of ``weight``."""
        return y

    def own_outputs(self, y: Tensor, weight: Weight) -> Tensor:
        """This rank's output columns of whole rows [T, N]."""
        return y

    def canonical_outputs(self, dy: Tensor, weight: Weight) -> Tensor:
        """Every rank's output columns [T, N], in the order of the HF tensors."""
        return dy

    def input_columns(self, weight: Weight) -> Weight:
        """What gives the input gradient: all rows of this rank's input columns."""
        return weight

    # -- tokens

    def runs(self, layout: PackedLayout) -> Runs:
        """This rank's tokens of the packed samples."""
        return whole_runs(layout)

    def own_tokens(self, layout: PackedLayout) -> Tensor:
        """int64: places of this rank's tokens in the joined row."""
        return torch.arange(layout.tokens)

    def join_tokens(self, x: Tensor, layout: PackedLayout, *, purpose: str) -> Tensor:
        """x [all tokens, ...] in logical order, of every CP rank's own tokens."""
        return x

    def own_rows(self, layout: PackedLayout, rows: Tensor) -> tuple[Places, Tensor]:
        """(which of ``rows`` this rank owns, which of its tokens they are), of int64 places in the joined row."""
        return slice(None), rows

    def join_rows(self, layout: PackedLayout, rows: Tensor, values: Tensor) -> Tensor:
        """All ranks' values of their share of ``rows``, in order."""
        return values

    # -- sums over tokens

    def weight_rows(self, dy: Tensor, x: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor, PackedLayout]:
        """What the gradient of a weight's rows is made of, in the rows that it has: dY [T, rows] and X [T, K] of all
        tokens, and their fold units."""
        return dy, x, layout

    def gain_sums(self, provider: Any, terms: Tensor, layout: PackedLayout, *, heads: bool) -> Tensor:
        """``provider.unit_sums`` of terms [T, heads, width] over all tokens; with ``heads`` those of every TP rank."""
        sums: Tensor = provider.unit_sums(terms, layout)
        return sums

    def unit_rows(self, layout: PackedLayout, rows: Tensor) -> list[tuple[int, int]] | None:
        """(first, last + 1) among own rows of every fold unit that has some; None where the head's gradient has other
        rows of the table, over all tokens."""
        return layout.unit_rows(rows)

    def fold_gradients(self, weight: Weight, rows: tuple[int, int]) -> None:
        """At a step's end: the gradient of ``rows``, from sums over each rank's own tokens where they are kept."""

    def autograd_rows(self, gradient: Tensor, weight: Weight) -> Tensor:
        """The rows that ``weight.grad`` has, over all tokens, of a gradient that autograd gave to all rows."""
        return gradient

    # -- embedding

    def lookup(self, ids: Tensor, weight: Weight, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """bf16 [T, H] of ids int64 [T]; ``rows`` looks up this rank's rows of the table."""
        return rows(ids)

    def keep_lookups(self, ids: Tensor, dy: Tensor, weight: Weight, layout: PackedLayout | None) -> None:
        """Keeps the gradient rows whose table rows ``weight.grad`` holds, in (sample, position) order."""
        weight.lookups.append((ids, dy.contiguous().clone()))

    # -- the vocabulary

    def join_logits(self, z: Tensor) -> Tensor:
        """All columns fp32 [T, V] of every rank's columns."""
        return z

    def merge_states(self, provider: Any, states: Tensor, zs: Tensor, targets: Tensor) -> LogpState:
        """The whole vocabulary's state, of own groups' states fp32 [groups, 3, R] and own targets' scaled logits."""
        raise AssertionError("a rank alone scans every column")

    def fold_groups(self, dh: Tensor) -> Tensor:
        """bf16 [R, H] of the chains of own groups fp32 [groups, R, H], folded ascending over the whole vocabulary; one
        chain where every group is here."""
        return dh[0].bfloat16()

    def best(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """int64 [R]: the token of the highest score, of every rank's best; -1 where a score is NaN."""
        return tokens


ALONE = Exchange()
