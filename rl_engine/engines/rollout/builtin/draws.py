"""The next tokens of samples that are caught up, and whether a sample ends with its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rl_engine.engines.rollout.builtin.sequence import Sequence
from rl_engine.engines.types import pack_retained
from rl_engine.models.decoder import Decoder
from rl_engine.ops.sample import DrawKey

Decode = Callable[[list[int]], str]
STOP_MARGIN = 8  # tokens searched for a stop string beyond its own bytes


class Draws:
    """Draws with the decoder's head, and appends to the samples what was drawn."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def draw(self, ready: list[Sequence], hidden: Tensor, version: int) -> int:
        """The next tokens of samples from hidden bf16 [R, H], by weights of ``version``; how many."""
        for group in _draw_groups(ready):
            rows = hidden if len(group) == len(ready) else hidden[group]
            self._draw_group([ready[i] for i in group], rows, version)
        return len(ready)

    def _draw_group(self, ready: list[Sequence], hidden: Tensor, version: int) -> None:
        """The next token of samples that share seed, step and filters, from hidden bf16 [R, H]."""
        first = ready[0].job
        sampling = first.sampling
        keys = [
            DrawKey(sampling.seed, first.step, s.job.request.prompt, s.job.request.sample, len(s.tokens)) for s in ready
        ]
        drawn = self.decoder.draw(hidden, sampling.temperature, sampling.top_k, sampling.top_p, keys)
        logprobs = drawn.logprobs.tolist()
        raw = logprobs if any(s.job.raw for s in ready) else None
        if raw is not None and (sampling.temperature != 1.0 or drawn.mask is not None):
            raw = self.decoder.raw_logprobs(hidden, drawn.tokens).tolist()
        self.append(ready, version, drawn.tokens.tolist(), logprobs, raw, drawn.mask)

    def append(
        self,
        ready: list[Sequence],
        version: int,
        tokens: list[int],
        logprobs: list[float],
        raw: list[float] | None,
        mask: Tensor | None = None,
    ) -> int:
        """Drawn tokens, their fp32 logprobs, those at temperature 1 where one asks for them, packed retained sets uint8
        [R, ceil(V / 8)] if any; how many samples got one."""
        for sequence, token, logprob in zip(ready, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
        if raw is not None:
            for sequence, logprob in zip(ready, raw, strict=True):
                if sequence.job.raw:
                    sequence.raw_logprobs.append(logprob)
        if mask is not None:
            vocabulary = self.decoder.config.vocabulary
            for sequence, bits in zip(ready, mask.cpu().numpy(), strict=True):
                sequence.retained.append(pack_retained(bits, vocabulary))
        return len(ready)


def end_of(sequence: Sequence, decode: Decode | None) -> str | None:
    """``stop``, ``length``, or None while there is more to draw."""
    sampling, stops = sequence.job.sampling, sequence.job.stop_strings
    if sequence.tokens[-1] in sampling.stop_tokens:
        return "stop"
    if stops and decode is not None:
        reach = max(len(text.encode()) for text in stops) + STOP_MARGIN
        text = decode(sequence.tokens[-min(reach, sequence.responses) :])
        if any(stop in text for stop in stops):
            return "stop"
    return "length" if sequence.responses >= sampling.max_response_len else None


def _draw_groups(ready: list[Sequence]) -> list[list[int]]:
    """Rows that one call can draw: same seed, step and filters; groups in the order of their first row."""
    groups: dict[object, list[int]] = {}
    for row, sequence in enumerate(ready):
        s = sequence.job.sampling
        groups.setdefault((sequence.job.step, s.seed, s.temperature, s.top_k, s.top_p), []).append(row)
    return list(groups.values())
