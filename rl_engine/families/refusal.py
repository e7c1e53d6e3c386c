"""Refusals of a checkpoint, and how values of a stranger's file are shown in them."""

from __future__ import annotations


class Refusal(ValueError):
    """A checkpoint that cannot be used: ``found``, ``expected``, and ``hint``, the next thing to do."""

    def __init__(self, found: str, expected: str, hint: str) -> None:
        super().__init__(f"{found}, expected {expected}")
        self.found, self.expected, self.hint = found, expected, hint


class UnsupportedModel(Refusal):
    """The config asks for something that the decoder does not compute, or is no config."""

    def __init__(self, found: str, expected: str, hint: str = "restore config.json, or check --model-root") -> None:
        super().__init__(found, expected, hint)


class WeightMismatch(Refusal):
    """Tensors do not fit the model: one is missing, unread, of another shape or type, or a file is damaged."""

    def __init__(
        self,
        found: str,
        expected: str = "a complete safetensors checkpoint",
        hint: str = "restore it, or prepare it again",
    ) -> None:
        super().__init__(found, expected, hint)


def shown(value: object) -> str:
    """At most 60 printable characters of a stranger's value."""
    if isinstance(value, int) and abs(value) >= 10**50:
        return "of more than 50 digits"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
