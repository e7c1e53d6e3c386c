"""What a person sees of a run: progress, one line a step, and the verdict. Talk goes to stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from rl_engine.records.types import PairRecord, StepRecord

Advance = Callable[[int, int], None]
LIVE_STEPS = 8  # rows of the live table


class _StderrConsole(Console):
    def on_broken_pipe(self) -> None:
        """The reader went away (``| head``): the run ends like any other filter, not with rich's silent exit."""
        self.quiet = True
        raise BrokenPipeError


class Display:
    """On a terminal a live table of the latest steps above a bar; plain lines elsewhere."""

    def __init__(self) -> None:
        self.console = _StderrConsole(stderr=True, highlight=False, soft_wrap=True)
        self._mode = ""
        self._steps: list[StepRecord] = []
        self._rollouts = 0

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def step(self, mode: str, record: StepRecord, rollouts: int) -> None:
        """A finished step of ``rollouts``. A terminal keeps the whole table once the run's last step is done."""
        if not self.console.is_terminal:
            self.say(step_line(mode, record, rollouts))
            return
        if mode != self._mode:
            self._mode, self._steps = mode, []
        self._rollouts = rollouts
        self._steps.append(record)
        if record.step + 1 >= rollouts:
            self.console.print(live_table(mode, self._steps, rollouts))
            self._mode, self._steps = "", []

    @contextlib.contextmanager
    def task(self, text: str) -> Iterator[Advance]:
        """A bar while something runs, below the table of steps so far; the callable takes (done, all)."""
        if not self.console.is_terminal:
            yield lambda done, total: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        progress = Progress(*columns, console=self.console)
        task = progress.add_task(text, total=None)
        parts = [live_table(self._mode, self._steps[-LIVE_STEPS:], self._rollouts)] if self._steps else []
        with Live(
            Group(*parts, progress),
            console=self.console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=8,
        ):
            yield lambda done, total: progress.update(task, completed=done, total=total or None)


def live_table(mode: str, steps: list[StepRecord], rollouts: int) -> Table:
    """The given steps of a run, with the time that the rest is expected to take; within 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("step", "mismatches", "max |dlogp|", "reward", "grad", "tok/s", "s/step"):
        table.add_column(name, justify="left" if name == "step" else "right", no_wrap=True)
    for record in steps:
        share = f" ({record.mismatches / record.tokens_compared:.1%})" if record.mismatches else ""
        table.add_row(
            f"{mode} {record.step + 1}/{rollouts}",
            f"{record.mismatches}{share}",
            f"{record.max_abs_dlogp:.4g}",
            f"{record.reward_mean:.2f}",
            f"{record.grad_norm:.3f}",
            f"{rollout_speed([record]):.1f}",
            f"{total_seconds(record):.1f}",
        )
    left = rollouts - steps[-1].step - 1 if steps else 0
    if left > 0:
        table.caption = f"{left} steps left, about {time_left(steps, left)}"
        table.caption_justify = "left"
    return table


def time_left(steps: list[StepRecord], left: int) -> str:
    """``left`` steps at the pace of the given ones, in words."""
    seconds = round(left * sum(map(total_seconds, steps)) / len(steps))
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def step_line(mode: str, record: StepRecord, rollouts: int) -> str:
    """What one step did and took."""
    s = record.seconds
    share = record.mismatches / record.tokens_compared if record.tokens_compared else 0.0
    return (
        f"{mode:11} step {record.step + 1}/{rollouts}: {record.tokens_compared} tokens, "
        f"{record.mismatches} mismatches ({share:.1%}), |dlogp| max {record.max_abs_dlogp:.4g} "
        f"mean {record.mean_abs_dlogp:.4g}, reward {record.reward_mean:.2f}, grad norm {record.grad_norm:.4f} | "
        f"rollout {s.rollout:.1f} s, reward {s.reward:.1f}, old logp {s.old_logp:.1f}, train {s.train:.1f}, "
        f"optimizer {s.optimizer:.1f}, sync {s.weight_sync:.1f}"
    )


def total_seconds(record: StepRecord) -> float:
    s = record.seconds
    return s.rollout + s.reward + s.old_logp + s.train + s.optimizer + s.weight_sync + s.other


def summary_table(rows: list[tuple[str, list[StepRecord]]]) -> Table:
    """One row a run: what was compared, what differed, and what it cost."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)  # within 80 columns
    for name in ("mode", "tokens", "mismatches", "max |dlogp|", "mean |dlogp|", "reward", "tok/s", "s/step"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for mode, steps in rows:
        tokens = sum(s.tokens_compared for s in steps)
        mismatches = sum(s.mismatches for s in steps)
        weighted = sum(s.mean_abs_dlogp * s.tokens_compared for s in steps) / tokens if tokens else 0.0
        share = f" ({mismatches / tokens:.1%})" if mismatches else ""
        table.add_row(
            mode,
            f"{tokens}",
            f"{mismatches}{share}",
            f"{max((s.max_abs_dlogp for s in steps), default=0.0):.4g}",
            f"{weighted:.4g}",
            f"{sum(s.reward_mean for s in steps) / len(steps):.2f}" if steps else "-",
            f"{rollout_speed(steps):.1f}",
            f"{sum(total_seconds(s) for s in steps) / len(steps):.1f}" if steps else "-",
        )
    return table


def rollout_speed(steps: list[StepRecord]) -> float:
    """Response tokens per second of generation, over all steps."""
    seconds = sum(s.seconds.rollout for s in steps)
    return sum(s.tokens_compared for s in steps) / seconds if seconds else 0.0


def verdict_lines(pair: PairRecord) -> list[str]:
    """The pair in words."""
    lines = []
    if pair.exact:
        lines.append(f"consistency: 0 of {pair.consistency.tokens_compared} logprobs differ: exactly on-policy.")
    else:
        differing = f"{pair.consistency.mismatches} of {pair.consistency.tokens_compared}"
        lines.append(f"consistency: {differing} logprobs differ: NOT exact.")
    if pair.control:
        lines.append(f"native: {pair.native.mismatches} of {pair.native.tokens_compared} differ: the control holds.")
    else:
        lines.append("native: 0 differ as well, so this pair proves nothing; use a larger model or more tokens.")
    if not pair.same_start:
        lines.append("the two runs did not start from the same weights: the comparison is void.")
    return lines


class Stopwatch:
    """Seconds between calls of :meth:`lap`."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
