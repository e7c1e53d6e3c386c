"""The model's tokenizer, and the tokens that end a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_engine.records.errors import UserError


class Tokenizer:
    """A transformers tokenizer with the checkpoint's stop tokens.

    Raises:
        UserError: the checkpoint has no tokenizer that can be read.
    """

    def __init__(self, model_root: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(model_root), local_files_only=True)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"no tokenizer in {model_root} ({reason})", "tokenizer files beside the weights", "copy them there"
            ) from error
        self.stop_tokens = _stop_tokens(model_root, self.tokenizer.eos_token_id)

    def decode(self, tokens: list[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _stop_tokens(model_root: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """From generation_config.json, config.json and the tokenizer, joined."""
    found: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        path = model_root / name
        if not path.is_file():
            continue
        eos = json.loads(path.read_text()).get("eos_token_id")
        found.update(value for value in (eos if isinstance(eos, list) else [eos]) if isinstance(value, int))
    return tuple(sorted(found))
