"""Requests for the samples of a step, from its prompts."""

from __future__ import annotations

import math

from rl_engine.config.plan import Plan
from rl_engine.data.prompts import Prompt, PromptSource, encode_prompt
from rl_engine.engines.types import Request
from rl_engine.orchestrators.tokens import Tokenizer
from rl_engine.records.errors import UserError

CHECKED_PROMPTS = 4096  # looked at before anything starts; later ones in their step


class Asker:
    """Encodes prompts, and asks for every sample of each.

    Args:
        vocabulary, positions: the model's.
    """

    def __init__(self, plan: Plan, tokens: Tokenizer, vocabulary: int, positions: int) -> None:
        self.plan, self.tokens, self.vocabulary, self.positions = plan, tokens, vocabulary, positions
        self.stop_tokens = tokens.stop_tokens

    def check(self, prompts: PromptSource) -> None:
        """The prompts of the first steps, before anything starts.

        Raises:
            UserError: as :meth:`requests`.
        """
        count = self.plan.data.prompts_per_step
        for step in range(min(self.plan.rollouts, math.ceil(CHECKED_PROMPTS / count))):
            self.requests(prompts.batch(step, count))

    def requests(self, prompts: list[Prompt]) -> list[Request]:
        """Every sample of a step to draw.

        Raises:
            UserError: a prompt that the model or a micro-batch cannot hold.
        """
        requests = [
            Request(prompt.index, sample, tuple(tokens))
            for prompt in prompts
            for tokens in [self._encode(prompt)]
            for sample in range(self.plan.data.samples_per_prompt)
        ]
        self._check_lengths(requests)
        return requests

    def _encode(self, prompt: Prompt) -> list[int]:
        tokens = encode_prompt(self.tokens.tokenizer, prompt)
        if max(tokens) >= self.vocabulary:
            raise UserError(
                f"token {max(tokens)} in the prompt {prompt.source}",
                f"ids below the model's vocabulary of {self.vocabulary}",
                "use the tokenizer that belongs to the model",
            )
        return tokens

    def _check_lengths(self, requests: list[Request]) -> None:
        """The longest possible sample must fit into the model and, as a fold unit, into a micro-batch."""
        cap = self.plan.sampling.max_response_len
        longest = max(len(request.tokens) for request in requests) + cap
        if longest > self.positions:
            raise UserError(
                f"a prompt of {longest - cap} tokens with --max-response-len {cap}",
                f"at most {self.positions} positions together",
                "lower --max-response-len or drop the prompt",
            )
        unit = max(longest, min(self.plan.fold_tokens, longest * len(requests)))
        if unit > self.plan.max_tokens_per_gpu:
            raise UserError(
                f"--max-tokens-per-gpu {self.plan.max_tokens_per_gpu}",
                f"at least {unit}, one fold unit (prompt and response of a sample, or --fold-tokens)",
                f"--max-tokens-per-gpu {unit}",
            )
