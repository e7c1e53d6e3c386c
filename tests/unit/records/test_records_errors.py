"""One line, one ``expected``: what an inner error said stands in the outer one's line without its own."""

from __future__ import annotations

import pytest

from rl_engine.checks.finding import Finding
from rl_engine.records.errors import UserError, told_inside

INNER = [
    (str(UserError("a link", "a file", "remove it")), "a link, not a file"),
    (f"seal: {UserError('a link', 'a file', 'remove it')}", "seal: a link, not a file"),
    (f"matrix ({UserError('a link', 'a file', 'remove it')})", "matrix (a link, not a file)"),
    ("w has rows of shape (3,), expected (4,)", "w has rows of shape (3,), not (4,)"),
    ("no samples (a safetensors file expected)", "no samples (not a safetensors file)"),
    ("3 mismatches found in 2 steps", "3 mismatches found in 2 steps"),
    ("found it", "found it"),
    ("Expecting value: line 1 column 1 (char 0)", "Expecting value: line 1 column 1 (char 0)"),
]


@pytest.mark.parametrize(("text", "clean"), INNER)
def test_what_an_inner_error_said(text: str, clean: str) -> None:
    assert told_inside(text) == clean
    line = str(UserError(text, "another thing", "look"))
    assert line == f"found {clean}, expected another thing; hint: look"
    assert Finding("records", "FAIL", text, "whole lines", "").found == clean
