"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from rl_engine.orchestrators.display import Display, live_table, step_line, time_left
from rl_engine.records.types import StepRecord
from tests.helpers.synthetic_run import make_batch, make_step


def steps(count: int) -> list[StepRecord]:
    first = make_step(0, make_batch(0, "native"))
    return [dataclasses.replace(first, step=index, mismatches=12 + index) for index in range(count)]


def display(terminal: bool, width: int = 80) -> tuple[Display, io.StringIO]:
    out, shown = io.StringIO(), Display()
    shown.console = Console(file=out, force_terminal=terminal, width=width, highlight=False, soft_wrap=True)
    return shown, out


def test_plain_lines_without_a_terminal() -> None:
    shown, out = display(terminal=False)
    with shown.task("native: generating") as advance:
        advance(1, 2)
    shown.step("native", steps(1)[0], 3)
    assert out.getvalue() == step_line("native", steps(1)[0], 3) + "\n"
    assert "\x1b" not in out.getvalue()


def test_live_table_on_a_terminal() -> None:
    shown, out = display(terminal=True)
    shown.step("native", steps(1)[0], 3)
    assert out.getvalue() == ""  # the table is drawn with the next task
    with shown.task("native: generating") as advance:
        advance(1, 2)
    text = out.getvalue()
    assert "native 1/3" in text and "12 (92.3%)" in text and "2 steps left, about 6 s" in text and "generating" in text


def test_the_whole_table_stays_after_the_last_step() -> None:
    shown, out = display(terminal=True)
    for record in steps(12):
        shown.step("consistency", record, 12)
    text = out.getvalue()
    assert all(f"consistency {number}/12" in text for number in range(1, 13)) and "left" not in text
    shown.step("native", steps(1)[0], 2)
    with shown.task("x"):
        pass
    assert "consistency 12/12" not in out.getvalue()[len(text) :]


@pytest.mark.parametrize("mode", ["native", "consistency"])
def test_table_fits_80_columns(mode: str) -> None:
    out = io.StringIO()
    wide = [dataclasses.replace(record, mismatches=12345, tokens_compared=12400, step=198) for record in steps(1)]
    Console(file=out, width=80).print(live_table(mode, wide, 200))
    assert max(map(len, out.getvalue().splitlines())) <= 80 and "…" not in out.getvalue()


def test_time_left_in_words() -> None:
    record = steps(1)[0]  # 2.9 s
    assert time_left([record], 1) == "3 s"
    assert time_left([record], 100) == "4 min 50 s"
    assert time_left([record], 10_000) == "8 h 3 min"
