"""Log-probability of the chosen token, and entropy, with temperature and an optional retained set.

Contract. ``invT = fp32(1 / T)``, ``zs = fl(z invT)``. Only columns below the true vocabulary and inside the retained
set exist. Tile of 128 columns: m its maximum, ``l = tree(exp(fl(zs - m)))``, ``w = tree(fl(e zs))``. A group is
``ceil(ceil(V / 128) / 16)`` tiles. Merge, tiles ascending in a group, then groups ascending: ``m' = max``, ``a =
exp(fl(m - m'))``, ``b = exp(fl(m_t - m'))``, ``l = fl(fl(l a) + fl(l_t b))``, w likewise; the empty state is the
identity. ``logp = fl(fl(zs_y - m) - log l)``, entropy ``fl(fl(m + log l) - fl(w / l))``.

Backward. Group by group: z as in forward, ``p = exp(fl(fl(zs - m) - log l))``,
``dz = bf16(fl(fl(c invT) fl(p - [v = y])))`` with ``c = -dL/dlogp``, +0 outside the set; dH's groups are folded
ascending in fp32 and rounded once; the head's rows of dW per fold unit.

Logits between forward and backward. A trainer's first micro-batch of a step finds the head's gradient cleared: on a
GPU its memory, fp32 [V, H], holds the logits of as many groups as fit (all of them up to T = H) until the group's rows
of dW take their place. Every other logit is the same chain computed again; both ways have the same bits.

Masks are packed bits, uint8 [T, ceil(V / 8)], bit v of row t: column v exists. A target outside its set is an input
error.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_engine.ops.device_checks import demand
from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.lm_head import HeadProvider
from rl_engine.ops.selected_logp.vocabulary import Share, groups, whole_share
from rl_engine.ops.weight import Loan, Weight

ROWS_AT_ONCE = 2048  # rows of the head's dW computed from one block of logits


def kept_logits(space: Tensor, rows: int) -> list[Tensor]:
    """Views fp32 [rows, n] of ``space`` fp32 [V, H] for the logits of its first groups, as many as fit.

    The view of a group does not reach into the rows of ``space`` of any group before it, so that those may be
    overwritten while it is still needed.
    """
    (vocabulary, hidden), flat, views = space.shape, space.view(-1), []
    for first, last in groups(vocabulary):
        width = -(-(last - first) // 8) * 8  # whole rows of 32 bytes for the copy engine
        start = first * max(rows, hidden)
        if start + rows * width > flat.numel():
            break
        views.append(flat[start : start + rows * width].view(rows, width)[:, : last - first])
    return views


def check_targets(targets: Tensor, vocabulary: int, mask: Tensor | None, waits: bool = True) -> None:
    """Refuses a target that is no column, or lies outside its retained set.

    Args:
        waits: the host waits for the answer; without it the device asserts it (``device_checks.demand``).

    Raises:
        ValueError: where the host waits.
    """
    if not waits:
        _demand_targets(targets, vocabulary, mask)
        return
    if targets.numel() and not (int(targets.min()) >= 0 and int(targets.max()) < vocabulary):
        raise ValueError(f"a target lies outside the vocabulary of {vocabulary}")
    if mask is not None:
        inside = (mask[torch.arange(targets.numel(), device=targets.device), targets // 8].long() >> (targets % 8)) & 1
        if not bool(inside.all()):
            raise ValueError(f"target of row {int(inside.argmin())} lies outside its retained set")


def _demand_targets(targets: Tensor, vocabulary: int, mask: Tensor | None) -> None:
    exists = (targets >= 0) & (targets < vocabulary)
    demand(exists.all(), f"a target lies outside the vocabulary of {vocabulary}")
    if mask is not None:
        byte = mask.gather(1, (targets.clamp(0, vocabulary - 1) // 8)[:, None])[:, 0]
        demand((((byte.long() >> (targets % 8)) & 1) == 1).all(), "a target lies outside its retained set")


@dataclasses.dataclass
class LogpState:
    """Running state per row, fp32 [T], from the empty state."""

    m: Tensor
    l: Tensor
    w: Tensor
    zs_target: Tensor

    @staticmethod
    def empty(rows: int, device: torch.device | None = None) -> LogpState:
        m = torch.full((rows,), -torch.inf, dtype=torch.float32, device=device)
        l, w, zs = (torch.zeros(rows, dtype=torch.float32, device=device) for _ in range(3))
        return LogpState(m, l, w, zs)


class LogpProvider:
    keeps_logits = False  # whether a cleared gradient's memory holds logits; where memory is slow it does not pay

    def merge_columns(
        self,
        z: Tensor,
        first: int,
        vocabulary: int,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        state: LogpState,
    ) -> None:
        """Merges whole groups, logits z fp32 [T, n] of columns from ``first``, into ``state``."""
        raise AssertionError("a provider defines merge_columns")

    def merge_groups(self, m: Tensor, l: Tensor, w: Tensor, state: LogpState) -> None:
        """Merges group states fp32 [groups, T], groups ascending, into ``state``."""
        raise AssertionError("a provider defines merge_groups")

    def finish(self, state: LogpState) -> tuple[Tensor, Tensor]:
        """(logp, entropy), fp32 [T]."""
        raise AssertionError("a provider defines finish")

    def logits_gradient(
        self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, targets: Tensor, state: LogpState, c: Tensor
    ) -> Tensor:
        """dz bf16 [T, n] from logits z fp32 [T, n] and coefficients c fp32 [T]."""
        raise AssertionError("a provider defines logits_gradient")

    def scan(
        self,
        hidden: Tensor,
        weight: Weight,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        head: HeadProvider,
        kept: Sequence[Tensor] = (),
    ) -> LogpState:
        """The state of every row of hidden bf16 [T, H], group by group; the head's GEMM included.

        The logits of the first groups stay in ``kept`` (:func:`kept_logits`).
        """
        state = LogpState.empty(hidden.shape[0], hidden.device)
        for columns, out in itertools.zip_longest(groups(weight.shape[0]), kept):
            z = head.logits(hidden, weight, columns, out)
            self.merge_columns(z, columns[0], weight.shape[0], inv_t, mask, targets, state)
        return state

    def group_gradient(
        self,
        hidden: Tensor,
        weight: Weight,
        columns: tuple[int, int],
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
        state: LogpState,
        c: Tensor,
        head: HeadProvider,
        z: Tensor | None = None,
    ) -> Tensor:
        """dz bf16 [T, n] of the group ``columns``, from its logits z fp32 [T, n] or from logits computed again."""
        z = head.logits(hidden, weight, columns) if z is None else z
        return self.logits_gradient(z, columns[0], inv_t, mask, targets, state, c)

    def group_states(
        self,
        logits: Callable[[tuple[int, int]], Tensor],
        share: Share,
        inv_t: float,
        mask: Tensor | None,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(states fp32 [groups, 3, R] of a rank's groups, scaled logits fp32 [R] of the targets among them); ``logits``
        gives fp32 [R, n] of some of the rank's columns."""
        states, zs = [], torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
        for first, last in share.groups:
            state = LogpState.empty(targets.numel(), targets.device)
            z = logits(share.rows((first, last)))
            self.merge_columns(z, first, share.vocabulary, inv_t, mask, targets, state)
            zs = torch.where((targets >= first) & (targets < last), state.zs_target, zs)
            states.append(torch.stack([state.m, state.l, state.w]))
        return torch.stack(states), zs

    def from_logits(
        self, z: Tensor, targets: Tensor, temperature: float, mask: Tensor | None, exchange: Exchange = ALONE
    ) -> tuple[Tensor, Tensor]:
        """(logp, entropy) fp32 [T] from logits z fp32 [T, n] of this rank's columns."""
        share, inv_t = exchange.share or whole_share(z.shape[1]), inverse_temperature(temperature)
        check_targets(targets, share.vocabulary, mask, exchange.waits)
        if share.whole:
            state = LogpState.empty(z.shape[0], z.device)
            self.merge_columns(z, 0, share.vocabulary, inv_t, mask, targets, state)
        else:
            own = self.group_states(lambda columns: z[:, slice(*columns)], share, inv_t, mask, targets)
            state = exchange.merge_states(self, *own, targets)
        return self.finish(state)

    def score(
        self,
        hidden: Tensor,
        weight: Weight,
        targets: Tensor,
        temperature: float,
        mask: Tensor | None,
        layout: PackedLayout,
        rows: Tensor,
        head: HeadProvider,
        exchange: Exchange = ALONE,
    ) -> tuple[Tensor, Tensor]:
        """(logp, entropy) fp32 of this rank's share of the rows ``rows`` int64 [R] of hidden bf16 [T, H], all ranks'
        tokens counted; the head's GEMM included.

        ``layout`` describes the tokens, ``hidden`` has this rank's; targets and mask have R rows. Only logp carries a
        gradient.
        """
        share = exchange.share or whole_share(weight.shape[0])
        check_targets(targets, share.vocabulary, mask)
        follows = torch.is_grad_enabled() and hidden.requires_grad and rows.numel() > 0
        lends = self.keeps_logits and follows and exchange.alone and weight.grad_rows == (0, weight.shape[0])
        loan = weight.lend_gradient() if lends else None
        batch = ScoreBatch(weight, targets, inverse_temperature(temperature), mask, layout, rows, share, loan)
        return _Score.apply(hidden, batch, self, head, exchange)


def inverse_temperature(temperature: float) -> float:
    """fp32(1 / T), computed in fp64."""
    return float(torch.tensor(1.0 / temperature, dtype=torch.float32))


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreBatch:
    """What one call of ``score`` is about; targets, mask and rows cover all ranks' tokens."""

    weight: Weight
    targets: Tensor
    inv_t: float
    mask: Tensor | None
    layout: PackedLayout
    rows: Tensor
    share: Share
    loan: Loan | None


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, batch: ScoreBatch, provider: LogpProvider, head: HeadProvider, exchange: Exchange
    ) -> tuple[Tensor, Tensor]:
        own, local = exchange.own_rows(batch.layout, batch.rows)
        local = local.to(hidden.device)
        # Rows are distinct and ascend: as many as there are tokens are all of them.
        chosen = hidden if local.numel() == hidden.shape[0] else hidden[local]
        targets, mask = batch.targets[own], None if batch.mask is None else batch.mask[own].contiguous()
        weight, inv_t = batch.weight, batch.inv_t
        if batch.share.whole:
            kept = [] if batch.loan is None else kept_logits(batch.loan.space, chosen.shape[0])
            state = provider.scan(chosen, weight, inv_t, mask, targets, head, kept)
        else:
            logits = functools.partial(head.logits, chosen, weight)
            states = provider.group_states(logits, batch.share, inv_t, mask, targets)
            state = exchange.merge_states(provider, *states, targets)
        logp, entropy = provider.finish(state)
        ctx.save_for_backward(chosen, local)
        ctx.batch, ctx.provider, ctx.head, ctx.exchange = batch, provider, head, exchange
        ctx.state, ctx.targets, ctx.mask, ctx.shape = state, targets, mask, hidden.shape
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, c: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        chosen, local = ctx.saved_tensors
        batch, head, exchange = ctx.batch, ctx.head, ctx.exchange
        weight, share = batch.weight, batch.share
        c = (-c).contiguous()  # autograd hands over dL/dlogp; the contract's c multiplies p - [v = y]
        chains = 1 if share.whole else len(share.groups)  # with every group here, each is added to those before it
        dh = torch.zeros((chains, *chosen.shape), dtype=torch.float32, device=chosen.device)
        units = exchange.unit_rows(batch.layout, batch.rows)
        empty = weight.settle(batch.loan)  # the loan holds at most once
        kept = [] if empty is None else kept_logits(empty, chosen.shape[0])
        grad = weight.grad if empty is None else empty
        targets, mask = share.own(ctx.targets, ctx.mask)
        for number, (group, z) in enumerate(itertools.zip_longest(share.groups, kept)):
            columns = share.rows(group)
            dz = ctx.provider.group_gradient(
                *(chosen, weight, columns, batch.inv_t, mask, targets, ctx.state, c, head, z)
            )
            head.add_input_gradient(dz, weight, columns, dh[min(number, chains - 1)])
            if empty is not None:
                head.set_unit_gradients(dz, chosen, units, columns, empty)
            elif grad is not None and units is not None:
                head.add_unit_gradients(dz, chosen, units, columns, grad)
            del dz
        if grad is not None and units is None:
            _add_own_rows(ctx, chosen, c, grad)
        dh = exchange.fold_groups(dh)
        if chosen.shape[0] == ctx.shape[0]:
            return dh, None, None, None, None
        d_hidden = torch.zeros(ctx.shape, dtype=torch.bfloat16, device=dh.device)
        d_hidden[local] = dh
        return d_hidden, None, None, None, None


def _add_own_rows(ctx: Any, chosen: Tensor, c: Tensor, grad: Tensor) -> None:
    """The head's dW over all context-parallel ranks' tokens, in the rows of the table that this rank has."""
    batch, provider, head, state = ctx.batch, ctx.provider, ctx.head, ctx.state

    def joined(x: Tensor) -> Tensor:
        return ctx.exchange.join_rows(batch.layout, batch.rows, x)

    hidden, c = joined(chosen), joined(c)
    whole = LogpState(*map(joined, (state.m, state.l, state.w, state.zs_target)))
    units = batch.layout.unit_rows(batch.rows)
    start, end = batch.weight.grad_rows
    for first in range(start, end, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, end)
        z = head.logits(hidden, batch.weight, (first, last))
        dz = provider.logits_gradient(z, batch.share.first + first, batch.inv_t, batch.mask, batch.targets, whole, c)
        head.add_unit_gradients(dz, hidden, units, (first - start, last - start), grad)
