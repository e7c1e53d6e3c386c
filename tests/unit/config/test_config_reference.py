"""The reference page is what the tables say."""

from __future__ import annotations

from rl_engine.config.options import OPTIONS
from rl_engine.config.paths import PATHS, REPOSITORY
from rl_engine.config.reference import page

FILE = REPOSITORY / "docs/reference/options.md"


def test_the_page_is_current():
    assert FILE.read_text(encoding="utf-8") == page(), (
        "run: python -m rl_engine.config.reference > docs/reference/options.md"
    )


def test_every_flag_and_variable_is_on_it():
    text = page()
    for flag in [flag for option in OPTIONS for flag in option.flags] + [path.flag for path in PATHS]:
        assert f"`{flag}`" in text
    for path in PATHS:
        assert f"`{path.variable}`" in text
