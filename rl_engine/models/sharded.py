"""Tensor and context parallelism that cannot change a bit: elements are computed whole by one rank, ranks exchange
bytes.

TP cuts output columns, CP cuts tokens. Forward: ``project`` needs nothing, ``project_back`` gathers its input and its
output. Backward: a rank computes its own input slice of dX in one chain over all canonical columns, from a second copy
of the weight; under CP each rank computes other rows of dW over all tokens. Partials of a sum (vocabulary groups of dH
and of logp) are gathered and folded in ascending order by their owner. Nothing here adds what two ranks computed in an
order that a layout could change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.models.placement import refuse_nan
from rl_engine.models.sharded_functions import (
    Attention,
    Embedding,
    Norm,
    NormRope,
    Project,
    ProjectBack,
    Score,
    ScoreBatch,
    one_unit,
)
from rl_engine.models.sharding import Sharding
from rl_engine.models.weights import in_hf_order
from rl_engine.ops import Operators
from rl_engine.ops.device_checks import demand
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.sample.retained import retained_mask
from rl_engine.ops.selected_logp import LogpState, check_targets, inverse_temperature
from rl_engine.ops.weight import Weight
from rl_engine.parallel import ContextLayout, Mesh, bounds


class Sharded:
    """The operators of one rank of a TP x CP mesh.

    ``waits``: the host may wait for the device, to refuse a token and to exchange no more rows than needed; without it
    the device asserts what it must refuse, and exchanges have fixed sizes.
    """

    def __init__(
        self, ops: Operators, sharding: Sharding, mesh: Mesh, local_sums: bool = False, waits: bool = True
    ) -> None:
        self.ops, self.sharding, self.mesh, self.waits = ops, sharding, mesh, waits
        # Under CP with local sums a rank adds up its own tokens only, over the whole step; see fold_gradients.
        self.local_sums = local_sums and mesh.cp.size > 1
        self.tp, self.cp = mesh.tp, mesh.cp
        self._contexts: dict[tuple[int, ...], ContextLayout] = {}

    # -- who owns what

    def context(self, layout: PackedLayout) -> ContextLayout:
        """CP ownership of the layout's tokens."""
        if layout.lengths not in self._contexts:
            if len(self._contexts) > 64:
                self._contexts.clear()
            self._contexts[layout.lengths] = ContextLayout(layout.lengths, self.cp.size, self.cp.index)
        return self._contexts[layout.lengths]

    def own_tokens(self, layout: PackedLayout) -> Tensor:
        return self.context(layout).own

    def _row_places(self, layout: PackedLayout, rows: Tensor) -> list[Tensor]:
        """For every CP rank: which of ``rows`` it owns, in its local order; on a CPU, which all sizes are known to."""
        number = torch.full((layout.tokens,), -1, dtype=torch.int64)
        number[rows.cpu()] = torch.arange(rows.numel())
        found = (number[places] for places in self.context(layout).places)
        return [places[places >= 0] for places in found]

    def own_rows(self, layout: PackedLayout, rows: Tensor) -> Tensor:
        return self._row_places(layout, rows)[self.cp.index]

    def gather_rows(self, layout: PackedLayout, rows: Tensor, values: Tensor) -> Tensor:
        if self.cp.size == 1:
            return values
        places = self._row_places(layout, rows)
        shapes = [(len(p), *values.shape[1:]) for p in places]
        parts = self.cp.all_gather(values, shapes, purpose="logp")
        full = torch.empty(rows.numel(), *values.shape[1:], dtype=values.dtype, device=values.device)
        for place, part in zip(places, parts, strict=True):
            full[place.to(values.device)] = part
        return full

    # -- exchanges

    def gather_columns(self, x: Tensor, slices: list[tuple[int, int]], *, purpose: str) -> Tensor:
        """Whole rows [T, ...] of every TP rank's contiguous columns x [T, own]."""
        if self.tp.size == 1:
            return x
        parts = self.tp.all_gather(x, [(x.shape[0], b - a) for a, b in slices], purpose=purpose)
        return torch.cat(parts, dim=1)

    def canonical_columns(self, dy: Tensor, merged: str) -> Tensor:
        """All columns of dy in HF order, from every TP rank's columns."""
        counts = [self.sharding.part_rows(merged, rank) for rank in range(self.tp.size)]
        parts = self.tp.all_gather(dy, [(dy.shape[0], sum(rows)) for rows in counts], purpose="dY")
        return in_hf_order(parts, counts, 1)

    def tokens_for_columns(self, x: Tensor, axis: int, layout: PackedLayout, *, purpose: str) -> Tensor:
        """All tokens of this CP rank's slice of ``axis``, from own tokens of the whole axis."""
        if self.cp.size == 1:
            return x
        slices = bounds(x.shape[axis], self.cp.size)
        context = self.context(layout)
        own = slices[self.cp.index][1] - slices[self.cp.index][0]
        shape = list(x.shape)
        shape[axis] = own
        received = self.cp.all_to_all(
            [x.narrow(axis, a, b - a).contiguous() for a, b in slices],
            [(len(p), *shape[1:]) for p in context.places],
            purpose=purpose,
        )
        return context.merge(received)

    def add_weight_gradient(self, dy: Tensor, x: Tensor, weight: Weight, layout: PackedLayout) -> None:
        """Own rows of dW: all tokens of the unit in logical order, one chain."""
        if weight.grad is None:
            return
        if self.local_sums:
            if x.shape[0]:
                self.ops.provider("linear").add_weight_gradient(dy, x, one_unit(x.shape[0]), weight.grad)
            return
        rows = self.tokens_for_columns(dy, 1, layout, purpose="dW dY")
        tokens = self.context(layout).gather(self.cp, x, purpose="dW X")
        self.ops.add_weight_rows(rows, tokens, layout, weight.grad)

    def fold_gradients(self, weight: Weight, rows: tuple[int, int]) -> None:
        """With local sums: exchanges fp32 sums once a step; each CP rank folds its ``rows``, ranks ascending.

        The same layout gives the same bits; another CP size adds in another order.
        """
        if not self.local_sums or weight.grad is None:
            return
        slices = bounds(weight.shape[0], self.cp.size)
        shape = (rows[1] - rows[0], *weight.shape[1:])
        parts = self.cp.all_to_all(
            [weight.grad[a:b].contiguous() for a, b in slices], [shape] * self.cp.size, purpose="gradient sums"
        )
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        weight.grad, weight.grad_rows = total, rows

    # -- operators

    def embedding(self, ids: Tensor, weight: Weight, layout: PackedLayout | None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.lookup(ids, weight)
        return Embedding.apply(ids, torch.empty(0, requires_grad=True), weight, layout, self)

    def lookup(self, ids: Tensor, weight: Weight) -> Tensor:
        self.ops.count("embedding", ids)
        last = [self.sharding.vocabulary(rank)[1] for rank in range(self.tp.size)]
        if not self.waits:
            return self._lookup_of_fixed_size(ids, weight, last)
        owner = torch.bucketize(ids, torch.tensor(last, device=ids.device), right=True)
        order = torch.sort(owner.masked_fill(ids < 0, self.tp.size), stable=True)
        counts = torch.bincount(order.values, minlength=self.tp.size + 1).tolist()
        assert counts[-1] == 0, "a token id lies outside the vocabulary"
        places = order.indices.split(counts[:-1])
        mine = weight.value[ids[places[self.tp.index]] - self.sharding.vocabulary(self.tp.index)[0]]
        width = weight.shape[1]
        parts = self.tp.all_gather(mine.detach(), [(n, width) for n in counts[:-1]], purpose="embedding")
        out = torch.empty(ids.numel(), width, dtype=torch.bfloat16, device=ids.device)
        for place, part in zip(places, parts, strict=True):
            out[place] = part
        return out

    def _lookup_of_fixed_size(self, ids: Tensor, weight: Weight, last: list[int]) -> Tensor:
        """Every rank sends a row for each token, its own or another; who owns the token decides which one counts. The
        same bytes as ``lookup``, TP times as many on the way, and no size that depends on ``ids``."""
        demand(((ids >= 0) & (ids < last[-1])).all(), "a token id lies outside the vocabulary")
        first, end = self.sharding.vocabulary(self.tp.index)
        mine = weight.value[(ids - first).clamp(0, end - first - 1)]
        parts = self.tp.all_gather(mine.detach(), purpose="embedding")
        out = parts[-1]
        for rank in reversed(range(self.tp.size - 1)):
            out = torch.where((ids < last[rank])[:, None], parts[rank], out)
        return out

    def keep_lookups(self, ids: Tensor, dy: Tensor, weight: Weight, layout: PackedLayout) -> None:
        """Keeps the gradient rows whose table rows this rank's gradient holds, in (sample, position) order."""
        if weight.grad is None:
            return
        if self.local_sums:
            first, last = self.sharding.vocabulary(self.tp.index)
            own = ((ids >= first) & (ids < last)).nonzero()[:, 0]
            weight.lookups.append((ids[own] - first, dy[own]))
            return
        context = self.context(layout)
        all_ids = context.gather(self.cp, ids, purpose="embedding gradient")
        rows = context.gather(self.cp, dy, purpose="embedding gradient")
        first = self.sharding.vocabulary(self.tp.index)[0] + weight.grad_rows[0]
        own = ((all_ids >= first) & (all_ids < first + weight.grad.shape[0])).nonzero()[:, 0]
        weight.lookups.append((all_ids[own] - first, rows[own]))

    def finish_embedding(self, weight: Weight) -> None:
        self.ops.finish_embedding(weight)

    def norm(self, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.ops.rms_norm(x, weight, eps)
        return Norm.apply(x, weight, eps, layout, self, "rms_norm")

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
        if not torch.is_grad_enabled():
            return self.ops.qk_norm_rope(q, k, q_norm, k_norm, eps, positions, table)
        if self.ops.fuses_qk_norm(q.shape[2]):
            rotated: tuple[Tensor, Tensor] = NormRope.apply(
                q, k, (q_norm, k_norm), eps, positions.contiguous(), table, layout, self
            )
            return rotated
        q = Norm.apply(q, q_norm, eps, layout, self, "qk_norm")
        k = Norm.apply(k, k_norm, eps, layout, self, "qk_norm")
        return self.ops.rope(q, positions, table), self.ops.rope(k, positions, table)

    def project(self, x: Tensor, weight: Weight, layout: PackedLayout | None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.ops.linear(x, weight)
        return Project.apply(x, weight, layout, self)

    def project_back(self, x: Tensor, weight: Weight, stream: Tensor, layout: PackedLayout | None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.project_back_forward(x, weight, stream)[0]
        return ProjectBack.apply(x, stream, weight, layout, self)

    def project_back_forward(self, x: Tensor, weight: Weight, stream: Tensor) -> tuple[Tensor, Tensor]:
        """(new stream [T, H], gathered input [T, K])."""
        inputs = [self.sharding.inputs(weight.name, rank) for rank in range(self.tp.size)]
        outputs = [self.sharding.rows(weight.name, rank) for rank in range(self.tp.size)]
        whole = self.gather_columns(x, inputs, purpose="inputs")
        first, last = outputs[self.tp.index]
        own = self.ops.linear_forward(whole, weight, stream[:, first:last])
        return self.gather_columns(own, outputs, purpose="outputs"), whole

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        if not torch.is_grad_enabled():
            return self.attend(q, k, v, layout)[0]
        return Attention.apply(q, k, v, layout, self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, LSE) of own queries and all keys and values in logical order."""
        self.ops.count("attention", q)
        context = self.context(layout)
        keys = context.gather(self.cp, k, purpose="K")
        values = context.gather(self.cp, v, purpose="V")
        provider = self.ops.provider("attention")
        out, lse = provider.forward_runs(q.contiguous(), keys, values, layout, tuple(context.runs))
        return out, lse, keys, values

    # -- the vocabulary side

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
        check_targets(targets, self.sharding.config.vocabulary, mask)
        rows = rows.cpu()
        self.ops.count("lm_head", rows)
        self.ops.count("selected_logp", rows)
        batch = ScoreBatch(weight, targets, inverse_temperature(temperature), mask, layout, rows)
        return Score.apply(hidden, batch, self)

    def head_columns(self, group: tuple[int, int]) -> tuple[int, int]:
        """Local rows of the head for a group's global columns."""
        first = self.sharding.vocabulary(self.tp.index)[0]
        return group[0] - first, group[1] - first

    def merged_state(
        self, hidden: Tensor, weight: Weight, targets: Tensor, inv_t: float, mask: Tensor | None
    ) -> LogpState:
        """The whole vocabulary's state of each row: own groups' states, gathered, merged ascending."""
        head, logp = self.ops.provider("lm_head"), self.ops.provider("selected_logp")
        vocabulary = self.sharding.config.vocabulary
        states = []
        zs = torch.zeros(hidden.shape[0], device=hidden.device)
        for first, last in self.sharding.groups(self.tp.index):
            state = LogpState.empty(hidden.shape[0], hidden.device)
            z = head.logits(hidden, weight, self.head_columns((first, last)))
            logp.merge_columns(z, first, vocabulary, inv_t, mask, targets, state)
            zs = torch.where((targets >= first) & (targets < last), state.zs_target, zs)
            states.append(torch.stack([state.m, state.l, state.w]))
        return self.merge_states(torch.stack(states), zs, targets)

    def merge_states(self, states: Tensor, zs: Tensor, targets: Tensor) -> LogpState:
        """states fp32 [own groups, 3, R] and own targets' scaled logits [R], from every TP rank."""
        counts = [len(self.sharding.groups(rank)) for rank in range(self.tp.size)]
        rows = zs.numel()
        gathered = torch.cat(self.tp.all_gather(states, [(n, 3, rows) for n in counts], purpose="logp states"))
        scaled = self.tp.all_gather(zs, purpose="logp targets")
        merged = LogpState.empty(rows, zs.device)
        self.ops.provider("selected_logp").merge_groups(gathered[:, 0], gathered[:, 1], gathered[:, 2], merged)
        for rank in range(self.tp.size):
            first, last = self.sharding.vocabulary(rank)
            merged.zs_target = torch.where((targets >= first) & (targets < last), scaled[rank], merged.zs_target)
        return merged

    def draw(
        self, hidden: Tensor, weight: Weight, temperature: float, top_k: int, top_p: float, keys: list[DrawKey]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        first = self.sharding.vocabulary(self.tp.index)[0]
        z = self.ops.logits(hidden, weight)
        inv_t = inverse_temperature(temperature)
        mask = None
        if top_k >= 0 or top_p < 1.0:  # the set depends on every column
            slices = [self.sharding.vocabulary(rank) for rank in range(self.tp.size)]
            mask = retained_mask(self.gather_columns(z, slices, purpose="logits"), inv_t, top_k, top_p)
        self.ops.count("sample", z)
        score, token = self.ops.provider("sample").best(z, first, inv_t, mask, keys)
        scores = torch.stack(self.tp.all_gather(score, purpose="sample"))
        tokens = torch.stack(self.tp.all_gather(token, purpose="sample"))
        chosen = tokens.gather(0, scores.argmax(0, keepdim=True))[0]
        best = scores.max(0).values
        for rank in reversed(range(self.tp.size)):  # ties to the lowest id, which is the lowest rank's
            chosen = torch.where(scores[rank] == best, tokens[rank], chosen)
        refuse_nan(torch.where(scores.isnan().any(), tokens.min(0).values, chosen), self.waits)
        return chosen, self._logp_of(z, first, chosen, inv_t, mask), mask

    def raw_logprobs(self, hidden: Tensor, weight: Weight, tokens: Tensor) -> Tensor:
        first = self.sharding.vocabulary(self.tp.index)[0]
        return self._logp_of(self.ops.logits(hidden, weight), first, tokens, 1.0, None)

    def _logp_of(self, z: Tensor, first: int, tokens: Tensor, inv_t: float, mask: Tensor | None) -> Tensor:
        """fp32 [R] from own logits z of columns ``first`` ..., all ranks' states merged."""
        self.ops.count("selected_logp", z)
        logp, vocabulary = self.ops.provider("selected_logp"), self.sharding.config.vocabulary
        check_targets(tokens, vocabulary, mask, self.waits)
        states, zs = [], torch.zeros(z.shape[0], device=z.device)
        for a, b in self.sharding.groups(self.tp.index):
            state = LogpState.empty(z.shape[0], z.device)
            logp.merge_columns(z[:, a - first : b - first], a, vocabulary, inv_t, mask, tokens, state)
            zs = torch.where((tokens >= a) & (tokens < b), state.zs_target, zs)
            states.append(torch.stack([state.m, state.l, state.w]))
        return logp.finish(self.merge_states(torch.stack(states), zs, tokens))[0]
