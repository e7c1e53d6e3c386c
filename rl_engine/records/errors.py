"""The one family of errors for the user's own mistakes; the command line prints one line and exits with 2."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can correct.

    Args:
        found: what was met, in words (``--temperature 0``).
        expected: what would have been right (``a finite number above 0``).
        hint: the next thing to type or to look at.
    """

    def __init__(self, found: str, expected: str, hint: str) -> None:
        super().__init__(found, expected, hint)
        self.found = found
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        return f"found {self.found}, expected {self.expected}; hint: {self.hint}"
