"""Tensor and context parallelism that cannot change a bit: elements are computed whole by one rank, ranks exchange
bytes.

TP cuts output columns, CP cuts tokens. Forward: a linear without a residual needs nothing, one with a residual gathers
its input and its output. Backward: a rank computes its own input slice of dX in one chain over all canonical columns,
from a second copy of the weight; under CP each rank computes other rows of dW over all tokens. Partials of a sum
(vocabulary groups of dH and of logp) are gathered and folded in ascending order by their owner. No operator of the
contract adds what two ranks computed in an order that a layout could change. Stock operators do: autograd's partial
gradients are added here, ranks ascending in fp32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_engine.models.sharding import Sharding
from rl_engine.models.weights import in_hf_order
from rl_engine.ops.device_checks import demand
from rl_engine.ops.exchange import Exchange
from rl_engine.ops.layout import PackedLayout, Runs
from rl_engine.ops.selected_logp import LogpState
from rl_engine.ops.selected_logp.vocabulary import Share
from rl_engine.ops.weight import Weight
from rl_engine.parallel import ContextLayout, Mesh, bounds, join_columns


def exchange_of(mesh: Mesh | None, sharding: Sharding, local_sums: bool = False, waits: bool = True) -> Exchange:
    """What the operators of one rank of ``mesh`` exchange."""
    alone = mesh is None or mesh.size == 1
    return Exchange(waits) if alone else MeshExchange(mesh, sharding, local_sums, waits)


class _Moved(torch.autograd.Function):
    """Bytes that move, with the way back for the gradients of stock operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return move(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient.contiguous()), None, None


def _moved(x: Tensor, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    found: Tensor = _Moved.apply(x, move, back) if torch.is_grad_enabled() and x.requires_grad else move(x)
    return found


def one_unit(tokens: int) -> PackedLayout:
    """All of a rank's tokens as one fold unit; no unit without a token."""
    return PackedLayout((tokens,), (1,)) if tokens else PackedLayout((), ())


def _ascending(parts: Sequence[Tensor]) -> Tensor:
    """fp32 sum of the ranks' parts, ascending."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


class MeshExchange(Exchange):
    """The exchanges of one rank of a TP x CP mesh.

    ``local_sums``: under CP a rank adds up the weight gradients of its own tokens only, over the whole step;
    :meth:`fold_gradients` exchanges them at its end.
    """

    alone = False

    def __init__(self, mesh: Mesh, sharding: Sharding, local_sums: bool = False, waits: bool = True) -> None:
        super().__init__(waits)
        self.tp, self.cp, self.sharding = mesh.tp, mesh.cp, sharding
        self.local_sums = local_sums and mesh.cp.size > 1
        self._vocabularies = [sharding.vocabulary(rank) for rank in range(self.tp.size)]
        if self.tp.size > 1:
            self.share = Share(sharding.config.vocabulary, tuple(sharding.groups(self.tp.index)))
        self._contexts: dict[tuple[int, ...], ContextLayout] = {}

    def context(self, layout: PackedLayout) -> ContextLayout:
        """CP ownership of the layout's tokens."""
        if layout.lengths not in self._contexts:
            if len(self._contexts) > 64:
                self._contexts.clear()
            self._contexts[layout.lengths] = ContextLayout(layout.lengths, self.cp.size, self.cp.index)
        return self._contexts[layout.lengths]

    # -- columns

    def spread(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return x

        def back(gradient: Tensor) -> Tensor:
            return _ascending(self.tp.all_gather(gradient, purpose="autograd sums")).to(gradient.dtype)

        return _moved(x, lambda same: same.view_as(same), back)

    def _join_columns(self, x: Tensor, slices: list[tuple[int, int]], *, purpose: str) -> Tensor:
        own = slice(*slices[self.tp.index])
        return _moved(x, lambda x: join_columns(self.tp, x, slices, purpose=purpose), lambda dx: dx[:, own])

    def join_inputs(self, x: Tensor, weight: Weight, *, purpose: str) -> Tensor:
        slices = [self.sharding.inputs(weight.name, rank) for rank in range(self.tp.size)]
        return self._join_columns(x, slices, purpose=purpose)

    def join_outputs(self, y: Tensor, weight: Weight) -> Tensor:
        slices = [self.sharding.rows(weight.name, rank) for rank in range(self.tp.size)]
        return self._join_columns(y, slices, purpose="outputs")

    def own_outputs(self, y: Tensor, weight: Weight) -> Tensor:
        first, last = self.sharding.rows(weight.name)
        return y[:, first:last]

    def canonical_outputs(self, dy: Tensor, weight: Weight) -> Tensor:
        if self.tp.size == 1:
            return dy
        counts = [self.sharding.part_rows(weight.name, rank) for rank in range(self.tp.size)]
        parts = self.tp.all_gather(dy, [(dy.shape[0], sum(rows)) for rows in counts], purpose="dY")
        return in_hf_order(parts, counts, 1)

    def input_columns(self, weight: Weight) -> Weight:
        if self.tp.size == 1:
            return weight
        assert weight.input_shard is not None, weight.name
        return weight.input_shard

    # -- tokens

    def runs(self, layout: PackedLayout) -> Runs:
        return tuple(self.context(layout).runs)

    def own_tokens(self, layout: PackedLayout) -> Tensor:
        return self.context(layout).own

    def join_tokens(self, x: Tensor, layout: PackedLayout, *, purpose: str) -> Tensor:
        if self.cp.size == 1:
            return x
        context = self.context(layout)

        def back(gradient: Tensor) -> Tensor:
            parts = [gradient[places] for places in context.places_on(gradient.device)]
            own = (len(context.own), *gradient.shape[1:])
            received = self.cp.all_to_all(parts, [own] * self.cp.size, purpose="autograd sums")
            return _ascending(received).to(gradient.dtype)

        return _moved(x, lambda own: context.gather(self.cp, own, purpose=purpose), back)

    def _row_places(self, layout: PackedLayout, rows: Tensor) -> tuple[list[Tensor], Tensor]:
        """(for every CP rank which of ``rows`` it owns, in its local order; which of its own tokens this rank's are);
        on a CPU, which all sizes are known to."""
        number = torch.full((layout.tokens,), -1, dtype=torch.int64)
        number[rows.cpu()] = torch.arange(rows.numel())
        found = [number[places] for places in self.context(layout).places]
        return [places[places >= 0] for places in found], (found[self.cp.index] >= 0).nonzero()[:, 0]

    def own_rows(self, layout: PackedLayout, rows: Tensor) -> tuple[Tensor, Tensor]:
        places, local = self._row_places(layout, rows)
        return places[self.cp.index], local

    def join_rows(self, layout: PackedLayout, rows: Tensor, values: Tensor) -> Tensor:
        if self.cp.size == 1:
            return values
        places, _ = self._row_places(layout, rows)
        parts = self.cp.all_gather(values, [(len(p), *values.shape[1:]) for p in places], purpose="logp")
        full = torch.empty(rows.numel(), *values.shape[1:], dtype=values.dtype, device=values.device)
        for place, part in zip(places, parts, strict=True):
            full[place.to(values.device)] = part
        return full

    # -- sums over tokens

    def weight_rows(self, dy: Tensor, x: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor, PackedLayout]:
        if self.local_sums:
            return dy, x, one_unit(x.shape[0])
        context = self.context(layout)
        rows = context.columns(self.cp, dy, 1, purpose="dW dY")
        return rows, context.gather(self.cp, x, purpose="dW X"), layout

    def gain_sums(self, provider: Any, terms: Tensor, layout: PackedLayout, *, heads: bool) -> Tensor:
        if self.local_sums:
            sums = provider.unit_sums(terms, one_unit(terms.shape[0])) if terms.shape[0] else terms
        else:
            sums = provider.unit_sums(self.context(layout).columns(self.cp, terms, 2, purpose="gain terms"), layout)
        if heads:  # of every TP rank, folded in canonical order
            sums = torch.cat(self.tp.all_gather(sums, purpose="gain sums"), dim=1)
        return sums.contiguous()

    def unit_rows(self, layout: PackedLayout, rows: Tensor) -> list[tuple[int, int]] | None:
        if self.cp.size == 1:
            return layout.unit_rows(rows)
        own = self.own_rows(layout, rows)[0].numel()
        return ([(0, own)] if own else []) if self.local_sums else None

    def fold_gradients(self, weight: Weight, rows: tuple[int, int]) -> None:
        """With local sums: exchanges fp32 sums once a step; each CP rank folds its ``rows``, ranks ascending.

        The same layout gives the same bits; another CP size adds in another order.
        """
        if self.local_sums and weight.grad is not None:
            weight.grad, weight.grad_rows = self._sum_rows(weight.grad, rows), rows

    def autograd_rows(self, gradient: Tensor, weight: Weight) -> Tensor:
        return gradient if self.cp.size == 1 or self.local_sums else self._sum_rows(gradient, weight.grad_rows)

    def _sum_rows(self, gradient: Tensor, rows: tuple[int, int]) -> Tensor:
        """fp32 sums of the CP ranks' gradients in this rank's ``rows``."""
        parts = [gradient[a:b].contiguous() for a, b in bounds(gradient.shape[0], self.cp.size)]
        shape = (rows[1] - rows[0], *gradient.shape[1:])
        return _ascending(self.cp.all_to_all(parts, [shape] * self.cp.size, purpose="gradient sums"))

    # -- embedding

    def lookup(self, ids: Tensor, weight: Weight, rows: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.waits:
            return self._lookup_of_fixed_size(ids, rows)
        last = torch.tensor([last for _, last in self._vocabularies], device=ids.device)
        owner = torch.bucketize(ids, last, right=True).masked_fill(ids < 0, self.tp.size)
        order = torch.sort(owner, stable=True)
        counts = torch.bincount(order.values, minlength=self.tp.size + 1).tolist()
        assert counts[-1] == 0, "a token id lies outside the vocabulary"
        places = order.indices.split(counts[:-1])
        own = places[self.tp.index]

        def join(mine: Tensor) -> Tensor:
            shapes = [(n, weight.shape[1]) for n in counts[:-1]]
            out = torch.empty(ids.numel(), weight.shape[1], dtype=mine.dtype, device=mine.device)
            for place, part in zip(places, self.tp.all_gather(mine, shapes, purpose="embedding"), strict=True):
                out[place] = part
            return out

        return _moved(rows(ids[own] - self._vocabularies[self.tp.index][0]), join, lambda dy: dy[own])

    def _lookup_of_fixed_size(self, ids: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Every rank sends a row for each token, its own or another; who owns the token decides which one counts. The
        same bytes as ``lookup``, TP times as many on the way, and no size that depends on ``ids``."""
        last = [last for _, last in self._vocabularies]
        demand(((ids >= 0) & (ids < last[-1])).all(), "a token id lies outside the vocabulary")
        first, end = self._vocabularies[self.tp.index]
        mine = rows((ids - first).clamp(0, end - first - 1))
        parts = self.tp.all_gather(mine.detach(), purpose="embedding")
        out = parts[-1]
        for rank in reversed(range(self.tp.size - 1)):
            out = torch.where((ids < last[rank])[:, None], parts[rank], out)
        return out

    def keep_lookups(self, ids: Tensor, dy: Tensor, weight: Weight, layout: PackedLayout | None) -> None:
        if weight.grad is None:
            return
        first, count = self._vocabularies[self.tp.index][0], weight.shape[0]
        if not self.local_sums:
            assert layout is not None
            context = self.context(layout)
            ids = context.gather(self.cp, ids, purpose="embedding gradient")
            dy = context.gather(self.cp, dy, purpose="embedding gradient")
            first, count = first + weight.grad_rows[0], weight.grad.shape[0]
        own = ((ids >= first) & (ids < first + count)).nonzero()[:, 0]
        weight.lookups.append((ids[own] - first, dy[own]))

    # -- the vocabulary

    def join_logits(self, z: Tensor) -> Tensor:
        return self._join_columns(z, self._vocabularies, purpose="logits")

    def merge_states(self, provider: Any, states: Tensor, zs: Tensor, targets: Tensor) -> LogpState:
        counts = [len(self.sharding.groups(rank)) for rank in range(self.tp.size)]
        rows = zs.numel()
        gathered = torch.cat(self.tp.all_gather(states, [(n, 3, rows) for n in counts], purpose="logp states"))
        scaled = self.tp.all_gather(zs, purpose="logp targets")
        merged = LogpState.empty(rows, zs.device)
        provider.merge_groups(gathered[:, 0], gathered[:, 1], gathered[:, 2], merged)
        for (first, last), found in zip(self._vocabularies, scaled, strict=True):
            merged.zs_target = torch.where((targets >= first) & (targets < last), found, merged.zs_target)
        return merged

    def fold_groups(self, dh: Tensor) -> Tensor:
        if self.tp.size == 1:
            return super().fold_groups(dh)
        slices = bounds(dh.shape[2], self.tp.size)
        width = slices[self.tp.index][1] - slices[self.tp.index][0]
        counts = [len(self.sharding.groups(rank)) for rank in range(self.tp.size)]
        received = self.tp.all_to_all(
            [dh[:, :, a:b].contiguous() for a, b in slices],
            [(n, dh.shape[1], width) for n in counts],
            purpose="dH groups",
        )
        total = torch.zeros(dh.shape[1], width, device=dh.device)
        for group in torch.cat(received):
            total = total + group
        return join_columns(self.tp, total.bfloat16(), slices, purpose="dH")

    def best(self, scores: Tensor, tokens: Tensor) -> Tensor:
        all_scores = torch.stack(self.tp.all_gather(scores, purpose="sample"))
        all_tokens = torch.stack(self.tp.all_gather(tokens, purpose="sample"))
        best = all_scores.max(0).values
        chosen = all_tokens[-1]
        for rank in reversed(range(self.tp.size)):  # ties to the lowest id, which is the lowest rank's
            chosen = torch.where(all_scores[rank] == best, all_tokens[rank], chosen)
        return torch.where(all_scores.isnan().any(), all_tokens.min(0).values, chosen)
