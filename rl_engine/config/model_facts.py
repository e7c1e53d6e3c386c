"""What a plan needs to know of a checkpoint, from its ``config.json`` alone."""

from __future__ import annotations

import json
from pathlib import Path

from rl_engine.config.plan import ModelFacts
from rl_engine.config.profile import MOST
from rl_engine.records.errors import UserError

PADDING = 128 * 8  # vocabulary padding, for every backend and width


def pad_vocab(size: int) -> int:
    """The next multiple of 128 x 8."""
    return (size + PADDING - 1) // PADDING * PADDING


def read_model_facts(model_root: Path) -> ModelFacts:
    """Facts from a Hugging Face ``config.json``.

    Raises:
        UserError: not JSON, or a field that is missing or not a positive whole number.
    """
    file = model_root / "config.json"
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} that cannot be read ({error})", "a Hugging Face config.json", "check --model-root"
        ) from None

    def number(name: str, otherwise: int | None = None) -> int:
        value = body.get(name, otherwise) if isinstance(body, dict) else None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            shown = repr(value)[:80] if not isinstance(value, int) or abs(value) < 10**50 else "a huge number"
            raise UserError(f"{name} = {shown} in {file}", f"a whole number from 1 to {MOST}", "check --model-root")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    vocab = number("vocab_size")
    return ModelFacts(
        num_layers=number("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", max(1, hidden // heads))
        if body.get("head_dim") is not None
        else max(1, hidden // heads),
        vocab_size=vocab,
        padded_vocab_size=pad_vocab(vocab),
        tied=body.get("tie_word_embeddings") is True,
    )
