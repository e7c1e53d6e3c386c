"""Finds the final answer in a response."""

from __future__ import annotations

import re

# Digits in thousands groups or plain, with an optional fraction part; ASCII digits alone.
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_BOXED = "\\boxed{"


def last_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{...}`` with balanced braces, or None. Linear in the text's length."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for at in range(start, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start:at].strip() or None
    return None


def last_number(text: str) -> str | None:
    """The last number in the text, without thousands commas, or None.

    A minus sign belongs to it only where no operand comes before: ``8-3`` ends in 3, ``= -3`` in -3.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    number = last.group().replace(",", "")
    if number.startswith("-") and _after_operand(text, last.start()):
        number = number[1:]
    return number


def _after_operand(text: str, at: int) -> bool:
    """Whether a minus sign at ``at`` subtracts: right after a letter, or after a number or bracket and spaces."""
    before = text[max(0, at - 64) : at]
    if before[-1:].isalnum():
        return True
    return before.rstrip()[-1:] in set("0123456789)]}")


def final_answer(text: str) -> str | None:
    """The content of the last box, else the last number, else None."""
    return last_boxed(text) or last_number(text)
