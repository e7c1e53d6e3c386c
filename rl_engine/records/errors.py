"""The one family of errors for the user's own mistakes; the command line prints one line and exits with 2."""

from __future__ import annotations

import re


class UserError(Exception):
    """A mistake that the user can correct.

    Args:
        found: what was met, in words (``--temperature 0``).
        expected: what would have been right (``a finite number above 0``).
        hint: the next thing to type or to look at.
    """

    def __init__(self, found: str, expected: str, hint: str) -> None:
        found = told_inside(found)
        super().__init__(found, expected, hint)
        self.found = found
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        parts = (printable(part.replace("\n", " "), 2000) for part in (self.found, self.expected, self.hint))
        return "found {}, expected {}; hint: {}".format(*parts)


def told_inside(text: str) -> str:
    """What an error said, as the found part of another's line: one ``expected`` a line, the outer one, and one hint."""
    text = re.sub(r"(^|: |\()found (?=.*(?:, expected |; hint: ))", r"\1", text)
    text = re.sub(r"; hint: [^)]*", "", text)
    text = re.sub(r"(?:,|;) expected ", ", not ", text)
    return re.sub(r"\((.{1,400}?) expected\)", r"(not \1)", text)


def printable(text: str, limit: int = 600) -> str:
    """``text`` for a message: control and format characters escaped, at most about ``limit`` characters.

    A stranger's file must neither steer a terminal nor fill it.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 4 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
