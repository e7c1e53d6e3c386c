"""The model's tokenizer, and the tokens that end a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_engine.records.errors import UserError

# transformers makes an empty tokenizer, or fails without words, when every one of these is missing.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A transformers tokenizer with the checkpoint's stop tokens.

    Raises:
        UserError: the checkpoint has no tokenizer that can be read.
    """

    def __init__(self, model_root: Path) -> None:
        if not any((model_root / name).is_file() for name in _FILES):
            raise UserError(
                f"no tokenizer in {model_root}", f"one of {', '.join(_FILES)}", "copy it beside the weights"
            )
        from transformers import AutoTokenizer  # takes seconds

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(model_root), local_files_only=True)
        except Exception as error:  # the tokenizers package raises plain Exception for a damaged file
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"a tokenizer in {model_root} that cannot be read ({reason})",
                "undamaged tokenizer files that the installed transformers reads",
                "restore the files",
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
        try:
            eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path} that cannot be read ({error})", "a JSON object", "restore the file") from error
        found.update(value for value in (eos if isinstance(eos, list) else [eos]) if isinstance(value, int))
    return tuple(sorted(found))
