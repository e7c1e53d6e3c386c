"""The backward passes of ``Sharded``: partials are computed by providers and moved by the mesh."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rms_norm import as_heads
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.selected_logp import LogpState
from rl_engine.ops.weight import Weight
from rl_engine.parallel import bounds

if TYPE_CHECKING:
    from rl_engine.models.sharded import Sharded

ROWS_AT_ONCE = 2048  # rows of the head's dW computed from one block of logits


def one_unit(tokens: int) -> PackedLayout:
    """All of a rank's tokens as one fold unit."""
    return PackedLayout((tokens,), (1,))


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, anchor: Tensor, weight: Weight, layout: PackedLayout, place: Sharded) -> Tensor:
        ctx.ids, ctx.weight, ctx.layout, ctx.place = ids, weight, layout, place
        return place.lookup(ids, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        ctx.place.keep_lookups(ctx.ids, dy.contiguous(), ctx.weight, ctx.layout)
        return None, None, None, None, None


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Weight, eps: float, layout: PackedLayout, place: Sharded, operator: str
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.eps, ctx.layout, ctx.place, ctx.operator = weight, eps, layout, place, operator
        place.ops.count(operator, x)
        return place.ops.provider(operator).forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = norm_gradients(ctx.place, ctx.operator, dy.contiguous(), x, ctx.weight, ctx.eps, ctx.layout)
        return dx, None, None, None, None, None


def norm_gradients(
    place: Sharded, operator: str, dy: Tensor, x: Tensor, weight: Weight, eps: float, layout: PackedLayout
) -> Tensor:
    """dx of a norm; its gain's gradient over all ranks' tokens is added into ``weight.grad`` where it trains."""
    provider = place.ops.provider(operator)
    dx, terms = provider.backward(dy, x, weight, eps, weight.grad is not None)
    if weight.grad is not None:
        if place.local_sums:
            sums = provider.unit_sums(as_heads(terms), one_unit(x.shape[0])) if x.shape[0] else as_heads(terms)
        else:
            terms = place.tokens_for_columns(as_heads(terms), 2, layout, purpose="gain terms")
            sums = provider.unit_sums(terms, layout)
        if operator == "qk_norm":  # heads of every TP rank, folded in canonical order
            sums = torch.cat(place.tp.all_gather(sums, purpose="gain sums"), dim=1)
        provider.add_gain(sums.contiguous(), weight.grad)
    found: Tensor = dx
    return found


class NormRope(torch.autograd.Function):
    """QK norm and rotation in one call; backward they are two, since the gains' terms are exchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: tuple[Weight, Weight],
        eps: float,
        positions: Tensor,
        table: RopeTable,
        layout: PackedLayout,
        place: Sharded,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k)
        ctx.weights, ctx.eps, ctx.layout, ctx.place = weights, eps, layout, place
        ctx.positions, ctx.table = positions, table
        place.ops.count("qk_norm_rope", q)
        rotated: tuple[Tensor, Tensor] = place.ops.provider("rope").norm_rotate(q, k, *weights, eps, positions, table)
        return rotated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        place, found = ctx.place, []
        for dy, x, weight in zip(gradients, ctx.saved_tensors, ctx.weights, strict=True):
            turned = place.ops.provider("rope").rotate(dy.contiguous(), ctx.positions, ctx.table, -1.0)
            found.append(norm_gradients(place, "qk_norm", turned, x, weight, ctx.eps, ctx.layout))
        return *found, None, None, None, None, None, None


class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, layout: PackedLayout, place: Sharded) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.layout, ctx.place = weight, layout, place
        return place.ops.linear_forward(x, weight, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        place, weight, dy = ctx.place, ctx.weight, dy.contiguous()
        place.add_weight_gradient(dy, x, weight, ctx.layout)
        provider = place.ops.provider("linear")
        if place.tp.size == 1:
            return provider.input_gradient(dy, weight), None, None, None
        own = provider.input_gradient(place.canonical_columns(dy, weight.name), weight.input_shard)
        slices = [place.sharding.inputs(weight.name, rank) for rank in range(place.tp.size)]
        return place.gather_columns(own, slices, purpose="dX"), None, None, None


class ProjectBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Tensor, weight: Weight, layout: PackedLayout, place: Sharded) -> Tensor:
        out, whole = place.project_back_forward(x, weight, stream)
        ctx.save_for_backward(whole)
        ctx.weight, ctx.layout, ctx.place = weight, layout, place
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (whole,) = ctx.saved_tensors
        place, weight, dy = ctx.place, ctx.weight, dy.contiguous()
        first, last = place.sharding.rows(weight.name)
        place.add_weight_gradient(dy[:, first:last].contiguous(), whole, weight, ctx.layout)
        source = weight if place.tp.size == 1 else weight.input_shard
        return place.ops.provider("linear").input_gradient(dy, source), dy, None, None, None


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, place: Sharded) -> Tensor:
        q = q.contiguous()
        out, lse, keys, values = place.attend(q, k, v, layout)
        ctx.save_for_backward(q, keys, values, out, lse)
        ctx.layout, ctx.place = layout, place
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, out, lse = ctx.saved_tensors
        place, layout, dout = ctx.place, ctx.layout, dout.contiguous()
        provider, context = place.ops.provider("attention"), place.context(layout)
        delta = provider.delta(dout, out)
        whole = [context.gather(place.cp, x, purpose="attention gradient") for x in (dout, q, lse, delta)]
        dq, dk, dv = provider.backward_runs(
            *(whole[0], whole[1], keys, values, whole[2], whole[3], layout, tuple(context.runs))
        )
        return dq, dk, dv, None, None


class ScoreBatch:
    """What one call of ``score`` is about; targets, mask and rows cover all CP ranks' tokens."""

    def __init__(
        self, weight: Weight, targets: Tensor, inv_t: float, mask: Tensor | None, layout: PackedLayout, rows: Tensor
    ) -> None:
        self.weight, self.targets, self.inv_t, self.mask = weight, targets, inv_t, mask
        self.layout, self.rows = layout, rows


class Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, batch: ScoreBatch, place: Sharded) -> tuple[Tensor, Tensor]:
        own = place.own_rows(batch.layout, batch.rows)
        number = torch.full((batch.layout.tokens,), -1, dtype=torch.int64)
        number[place.own_tokens(batch.layout)] = torch.arange(hidden.shape[0])
        local = number[batch.rows[own]].to(hidden.device)
        own = own.to(hidden.device)
        chosen, mask = hidden[local], None if batch.mask is None else batch.mask[own].contiguous()
        state = place.merged_state(chosen, batch.weight, batch.targets[own], batch.inv_t, mask)
        logp, entropy = place.ops.provider("selected_logp").finish(state)
        ctx.save_for_backward(chosen, local)
        ctx.batch, ctx.place, ctx.state, ctx.own, ctx.mask, ctx.shape = batch, place, state, own, mask, hidden.shape
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, c: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        chosen, local = ctx.saved_tensors
        d_hidden = torch.zeros(ctx.shape, dtype=torch.bfloat16, device=chosen.device)
        c = (-c).contiguous()  # autograd hands over dL/dlogp; the contract's c multiplies p - [v = y]
        d_hidden[local] = _score_input_gradient(ctx, chosen, c)
        if ctx.batch.weight.grad is not None:
            _add_head_gradient(ctx, chosen, c)
        return d_hidden, None, None


def _score_input_gradient(ctx: Any, chosen: Tensor, c: Tensor) -> Tensor:
    """bf16 [R, H]: every group's chain, folded ascending by the owner of each slice of H, rounded once."""
    batch, place, state = ctx.batch, ctx.place, ctx.state
    head, logp = place.ops.provider("lm_head"), place.ops.provider("selected_logp")
    groups = place.sharding.groups(place.tp.index)
    shape = (len(groups), *chosen.shape) if place.tp.size > 1 else chosen.shape
    own = torch.zeros(shape, dtype=torch.float32, device=chosen.device)
    for number, (first, last) in enumerate(groups):
        columns = place.head_columns((first, last))
        z = head.logits(chosen, batch.weight, columns)
        dz = logp.logits_gradient(z, first, batch.inv_t, ctx.mask, batch.targets[ctx.own], state, c)
        head.add_input_gradient(dz, batch.weight, columns, own[number] if place.tp.size > 1 else own)
    if place.tp.size == 1:  # every group is here: each chain was added to those before it
        return own.bfloat16()
    slices = bounds(chosen.shape[1], place.tp.size)
    width = slices[place.tp.index][1] - slices[place.tp.index][0]
    counts = [len(place.sharding.groups(rank)) for rank in range(place.tp.size)]
    received = place.tp.all_to_all(
        [own[:, :, a:b].contiguous() for a, b in slices],
        [(n, chosen.shape[0], width) for n in counts],
        purpose="dH groups",
    )
    total = torch.zeros(chosen.shape[0], width, device=chosen.device)
    for group in torch.cat(received):
        total = total + group
    return place.gather_columns(total.bfloat16(), slices, purpose="dH")


def _add_head_gradient(ctx: Any, chosen: Tensor, c: Tensor) -> None:
    """Own rows of the head's dW over all rows of all CP ranks (with local sums: over own rows), unit by unit."""
    batch, place, state = ctx.batch, ctx.place, ctx.state
    weight, layout, rows = batch.weight, batch.layout, batch.rows
    head, logp = place.ops.provider("lm_head"), place.ops.provider("selected_logp")
    if place.local_sums:
        hidden, coefficients, whole = chosen, c, state
        targets, mask, edges = batch.targets[ctx.own], ctx.mask, [0, chosen.shape[0]]
    else:
        hidden, coefficients = (place.gather_rows(layout, rows, x) for x in (chosen, c))
        whole = LogpState(*(place.gather_rows(layout, rows, x) for x in (state.m, state.l, state.w, state.zs_target)))
        targets, mask = batch.targets, batch.mask
        edges = torch.searchsorted(rows, layout.unit_offsets).tolist()  # both on a CPU
    offset = place.sharding.vocabulary(place.tp.index)[0]
    start, end = weight.grad_rows
    for first in range(start, end, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, end)
        z = head.logits(hidden, weight, (first, last))
        dz = logp.logits_gradient(z, offset + first, batch.inv_t, mask, targets, whole, coefficients)
        units = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
        head.add_unit_gradients(dz, hidden, units, (first - start, last - start), weight.grad)
