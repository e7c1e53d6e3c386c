"""Prompts: where they come from, and how they become token ids.

A source gives ``batch(step, count)``. What it gives depends only on the source's seed, the step and the position, so
that two runs, or a run and its resumption, see the same prompts. Sampling noise is keyed by ``Prompt.index`` too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from rl_engine.records.errors import UserError


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One task.

    Attributes:
        index: position within its step's batch, from 0.
        messages: chat turns, each with the keys ``role`` and ``content``.
        answer: what the reward compares the response with.
        source: where it comes from (``gsm8k/train.jsonl:17``), for the records.
    """

    index: int
    messages: tuple[dict[str, str], ...]
    answer: str
    source: str


class PromptSource(Protocol):
    """A deterministic, endless supply of prompts."""

    def batch(self, step: int, count: int) -> list[Prompt]:
        """The ``count`` prompts of ``step``; position ``i`` has ``index`` ``i``."""
        ...


def open_prompts(source: str, path: str | None, seed: int) -> PromptSource:
    """The prompt source that a plan names.

    Args:
        source: ``arithmetic`` (generated), ``gsm8k`` (the bundled sample) or ``jsonl`` (the file ``path``).
        path: the JSONL file; only with ``jsonl``.
        seed: chooses the problems or their order.

    Raises:
        UserError: an unknown source, a path missing or too many, or a file that cannot be used.
    """
    from rl_engine.data.arithmetic import ArithmeticPrompts
    from rl_engine.data.jsonl import JsonlPrompts, bundled_gsm8k

    if source == "jsonl":
        if path is None:
            raise UserError("prompt source jsonl without a file", "the path of a JSONL file", "give --prompt-data FILE")
        return JsonlPrompts(Path(path), seed)
    if source not in ("arithmetic", "gsm8k"):
        raise UserError(f"prompt source {source!r}", "arithmetic, gsm8k or jsonl", "see the profile's data.source")
    if path is not None:
        raise UserError(f"a path with prompt source {source}", "a path only with jsonl", "set the source to jsonl")
    return ArithmeticPrompts(seed) if source == "arithmetic" else JsonlPrompts(bundled_gsm8k("train"), seed)


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of the prompt, ready for the model to answer.

    With the tokenizer's chat template and its generation prompt; a tokenizer without a template gets the turns'
    contents, one a line, as plain text.

    Args:
        tokenizer: a transformers tokenizer (4.56 or later).
        prompt: the task.

    Returns:
        At least one token id.

    Raises:
        UserError: the template refuses the turns, or nothing is left to encode.
    """
    messages = [dict(message) for message in prompt.messages]
    if getattr(tokenizer, "chat_template", None):
        # Text first, then ids: asked for ids, transformers 4 and 5 return different types.
        text = _apply_template(tokenizer, messages, prompt)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        tokens = tokenizer("\n".join(message["content"] for message in messages) + "\n")["input_ids"]
    if not tokens:
        raise UserError(f"an empty prompt ({prompt.source})", "at least one token", "look at this prompt's text")
    return [int(token) for token in tokens]


def _apply_template(tokenizer: Any, messages: list[dict[str, str]], prompt: Prompt) -> str:
    from jinja2.exceptions import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"a chat template that refuses {prompt.source} ({error})",
            f"a template that accepts the turns {roles}",
            "use another model, or change the prompts",
        ) from error
