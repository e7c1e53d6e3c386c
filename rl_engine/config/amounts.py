"""How much a step takes: prompts and samples of an update, and tokens of a micro-batch."""

from __future__ import annotations

import dataclasses
from typing import cast

from rl_engine.config.values import Values
from rl_engine.records.errors import UserError

PROMPT_ROOM = 512  # tokens of a prompt that a derived micro-batch budget leaves room for


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts of a step, samples per prompt, and their product, which is one update."""

    prompts: int
    samples: int
    total: int


def read_batch(ask: Values) -> Batch:
    """The samples of an update; a flag on a factor discards the profile's product."""
    prompts, samples = ask.whole("rollout_batch_size"), ask.whole("samples_per_prompt")
    product = prompts * samples
    factor_flag = bool({"rollout_batch_size", "samples_per_prompt"} & set(ask.request.flags))
    if factor_flag and "global_batch_size" not in ask.request.flags:
        ask.derive("global_batch_size", product, "prompts x samples")
    total = ask.whole("global_batch_size", (product, "prompts x samples"))
    if total != product:
        raise UserError(
            f"--global-batch-size {total} with {prompts} prompts x {samples} samples = {product}",
            "their product: one update per rollout",
            f"leave --global-batch-size out, or set it to {product}",
        )
    if product > 2**20:
        raise UserError(
            f"{prompts} prompts x {samples} samples = {product}",
            "at most 1048576 samples per update",
            "lower one of them",
        )
    return Batch(prompts, samples, total)


def read_budget(ask: Values, cp: int, fold: int, response: int) -> int:
    """Tokens of a micro-batch per rank. Our trainer cuts neither a fold unit nor a sample, so both must fit.

    A flag on the response length discards a profile's budget that the response would not fit.
    """
    if ask.text("stack") == "vime":
        return ask.whole("max_tokens_per_gpu", (max(1, 1024 // cp), "1024 // CP"))
    longest = max(fold, response + PROMPT_ROOM)
    rule = "longest fold unit or sample / CP"
    derived = -(-max(1024, longest) // cp)
    given = ask.given("max_tokens_per_gpu")
    flagged = bool({"max_response_len", "fold_tokens"} & set(ask.request.flags))
    if given is not None and given.source == "profile" and flagged and cast(int, given.value) * cp < longest:
        ask.derive("max_tokens_per_gpu", derived, rule)
    tokens = ask.whole("max_tokens_per_gpu", (derived, rule))
    for flag, value, size in (("--fold-tokens", fold, fold), ("--max-response-len", response, response + 1)):
        if size > tokens * cp:
            raise UserError(
                f"{flag} {value} with a budget of {tokens} x CP {cp} tokens",
                "a micro-batch that holds it whole",
                f"--max-tokens-per-gpu {derived}",
            )
    return tokens
