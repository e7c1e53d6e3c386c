"""Exact sampling, keyed by the sample's identity.

Contract. ``x`` is the first word of Philox4x32-10 with key (rollout seed, step) and counter (token id, position,
sample, prompt), 32 bits each. ``u = min(fp32(fp64(x + 1/2) 2^-32), 1 - 2^-24)``, ``E = -log1p(-u)``; the token is the
argmax over existing columns of ``fl(zs_v - log E_v)``, ties to the lowest id (Gumbel-max, exact for the softmax over
the set).

Invariant to: engine, slot, batch, retry, preemption: none of them enters. Errors: an identity wider than 32 bits.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rl_engine.ops.device_checks import demand
from rl_engine.ops.exchange import ALONE, Exchange


@dataclasses.dataclass(frozen=True)
class DrawKey:
    """Identity of one draw; each value is below 2^32."""

    seed: int
    step: int
    prompt: int
    sample: int
    position: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < 2**32:
                raise ValueError(f"{field.name} {value} does not fit in 32 bits")


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


class SampleProvider:
    def best(
        self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, keys: list[DrawKey]
    ) -> tuple[Tensor, Tensor]:
        """(score fp32 [R], token id int64 [R]) of the winner among columns ``first`` ... of logits z fp32 [R, n].

        ``mask`` covers the whole vocabulary, as in ``selected_logp``; the id is -1 and the score -inf where no column
        of z exists. All keys share seed and step. A vocabulary in several pieces draws by the highest score, ties to
        the lowest id, so shards only exchange (score, id).
        """
        raise AssertionError("a provider defines best")

    def draw(
        self, z: Tensor, inv_t: float, mask: Tensor | None, keys: list[DrawKey], exchange: Exchange = ALONE
    ) -> Tensor:
        """Token ids int64 [R] from logits z fp32 [R, n] of this rank's columns; -1 where a logit is NaN."""
        first = 0 if exchange.share is None else exchange.share.first
        return exchange.best(*self.best(z, first, inv_t, mask, keys))


def counters(keys: list[DrawKey]) -> tuple[int, int, Tensor]:
    """(seed, step, int32-viewed uint32 [R, 3]: position, sample, prompt)."""
    seed, step = keys[0].seed, keys[0].step
    assert all(key.seed == seed and key.step == step for key in keys)
    values = [[key.position, key.sample, key.prompt] for key in keys]
    signed = torch.tensor(values, dtype=torch.int64)
    return seed, step, torch.where(signed >= 2**31, signed - 2**32, signed).to(torch.int32)
