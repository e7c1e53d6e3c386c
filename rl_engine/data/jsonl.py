"""Prompts from a JSONL file: GSM8K's keys (``question``, ``answer``) or DAPO-Math's (``prompt``, ``label``)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from rl_engine.data.prompts import Prompt
from rl_engine.records.errors import UserError

_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_ROLES = ("system", "user", "assistant")


class _LineError(ValueError):
    """What is wrong with one line, and what it should be."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found, self.expected = found, expected


@dataclasses.dataclass(frozen=True)
class _Row:
    line: int
    messages: tuple[dict[str, str], ...]
    answer: str


def bundled_gsm8k(split: str) -> Path:
    """The sample that comes with the package: ``train`` (512 problems) or ``test`` (128)."""
    if split not in ("train", "test"):
        raise UserError(f"GSM8K split {split!r}", "train or test", "name one of the two")
    return Path(__file__).parent / "bundled" / "gsm8k" / f"{split}.jsonl"


class JsonlPrompts:
    """The rows of a file in a seeded order, epoch after epoch, each epoch in another order.

    The whole file is read and checked when it is opened. ``batch(step, count)`` takes rows ``step * count`` onwards,
    so a run keeps one ``count``.

    Args:
        path: the file, UTF-8, one JSON object a line.
        seed: decides the order.

    Raises:
        UserError: the file cannot be read, is empty, or has a broken line, which is named.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self._name = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
        self._seed = seed
        self._rows = _read_rows(path)
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        """Rows in the file."""
        return len(self._rows)

    def batch(self, step: int, count: int) -> list[Prompt]:
        """The ``count`` prompts of ``step``."""
        return [self._prompt(step * count + position, position) for position in range(count)]

    def _prompt(self, number: int, position: int) -> Prompt:
        epoch, place = divmod(number, len(self._rows))
        row = self._rows[self._epoch_order(epoch)[place]]
        return Prompt(position, row.messages, row.answer, f"{self._name}:{row.line}")

    def _epoch_order(self, epoch: int) -> list[int]:
        """Rows sorted by a hash of (seed, epoch, row): the same order under every Python and numpy."""
        if self._order[0] != epoch:

            def key(row: int) -> bytes:
                return hashlib.blake2b(f"jsonl/{self._seed}/{epoch}/{row}".encode(), digest_size=16).digest()

            self._order = (epoch, sorted(range(len(self._rows)), key=key))
        return self._order[1]


def _read_rows(path: Path) -> list[_Row]:
    hint = "check --prompt-data"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "a readable JSONL file", hint) from error
    if not data.strip():
        raise UserError(f"{path} with no rows", "one JSON object a line", hint)
    rows = []
    # Bytes are split at newlines alone: str.splitlines would cut a JSON string at U+2028.
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_Row(number, *_parse_line(line)))
        except _LineError as error:
            raise UserError(
                f"{path} line {number}: {error.found}", error.expected, "mend or remove this line"
            ) from None
    return rows


def _parse_line(line: bytes) -> tuple[tuple[dict[str, str], ...], str]:
    expected = 'an object such as {"question": "...", "answer": "42"}'
    if not line.strip():
        raise _LineError("an empty line", expected)
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _LineError(f"a byte that is not UTF-8 at column {error.start + 1}", "UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON ({error.msg} at column {error.colno})", expected) from None
    except (RecursionError, ValueError):
        # Nested thousands deep, or a number thousands of digits long.
        raise _LineError("JSON beyond any sensible size", expected) from None
    if not isinstance(row, dict):
        raise _LineError(f"a JSON {_kind(row)}", expected)
    if "prompt" in row and "question" not in row:
        return _messages(row["prompt"]), _answer(row, "label")
    question = _text(row, "question")
    return ({"role": "user", "content": f"{question}\n{_INSTRUCTION}"},), _answer(row, "answer")


def _messages(prompt: Any) -> tuple[dict[str, str], ...]:
    """A ``prompt`` is plain text, or chat turns that bring their own instruction."""
    if not isinstance(prompt, list):
        return ({"role": "user", "content": _text({"prompt": prompt}, "prompt")},)
    if not prompt:
        raise _LineError('an empty "prompt"', "at least one chat turn")
    turns = []
    for turn in prompt:
        if not isinstance(turn, dict) or turn.get("role") not in _ROLES:
            raise _LineError("a chat turn without a known role", f"turns with a role of {', '.join(_ROLES)}")
        turns.append({"role": str(turn["role"]), "content": _text(turn, "content")})
    return tuple(turns)


def _answer(row: dict[str, Any], key: str) -> str:
    """The answer; of GSM8K's own worked solutions, what follows the ``####`` mark."""
    answer = _text(row, key).rpartition("####")[2].strip()
    if not answer:
        raise _LineError(f'nothing after #### in "{key}"', "the final answer")
    return answer


def _text(row: dict[str, Any], key: str) -> str:
    if key not in row:
        raise _LineError(f'no key "{key}"', 'the keys "question" and "answer", or "prompt" and "label"')
    value = row[key]
    if not isinstance(value, str):
        raise _LineError(f'"{key}" is a JSON {_kind(value)}', f'"{key}" as a string')
    if not value.strip():
        raise _LineError(f'"{key}" is empty', f'"{key}" with some text')
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise _LineError(f'"{key}" holds half of a surrogate pair', "whole Unicode characters")
    return value


def _kind(value: object) -> str:
    """JSON's word for a parsed value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    for kind, name in ((list, "array"), (dict, "object"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "number"
