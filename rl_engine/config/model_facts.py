"""What a plan needs to know of a checkpoint, from its ``config.json`` alone."""

from __future__ import annotations

from pathlib import Path

from rl_engine.config.plan import ModelFacts
from rl_engine.families.config import read_config
from rl_engine.families.refusal import Refusal
from rl_engine.families.tensors import check_headers, read_headers
from rl_engine.records.errors import UserError

PADDING = 128 * 8  # vocabulary padding, for every backend and width


def pad_vocab(size: int) -> int:
    """The next multiple of 128 x 8."""
    return (size + PADDING - 1) // PADDING * PADDING


def read_model_facts(model_root: Path) -> ModelFacts:
    """Facts from a Hugging Face ``config.json`` of a model that the engines compute.

    Raises:
        UserError: not JSON, a model that they do not compute, or a field that is missing or no sensible value.
    """
    try:
        config = read_config(model_root)
    except Refusal as error:
        raise UserError(error.found, error.expected, error.hint) from None
    except OSError as error:
        found = f"{model_root / 'config.json'} that cannot be read ({error.strerror or error})"
        raise UserError(found, "a Hugging Face config.json", "check --model-root") from None
    return ModelFacts(
        num_layers=config.layers,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocabulary,
        padded_vocab_size=pad_vocab(config.vocabulary),
        tied=config.tied,
    )


def check_tensors(model_root: Path) -> int:
    """Whether the checkpoint holds the tensors of its model and no others; the number of them. No value is read.

    Raises:
        UserError: a tensor is missing, unread, quantized or of another shape; or a file is missing or damaged.
    """
    try:
        headers = read_headers(model_root)
        check_headers(read_config(model_root), headers, model_root)
    except Refusal as error:
        raise UserError(error.found, error.expected, error.hint) from None
    except OSError as error:
        raise UserError(f"{model_root} that cannot be read ({error})", "a checkpoint", "check --model-root") from None
    return len(headers)
