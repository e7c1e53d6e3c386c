"""What the figures show, as data: one description for the page's SVG, the PNG and the tables behind them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from rl_engine.records.types import StepRecord, StepSeconds
from rl_engine.report.collect import RunView
from rl_engine.report.deltas import EDGES
from rl_engine.report.prices import Prices

Kind = Literal["lines", "bars", "stack", "rows"]
Fold = Literal["max", "mean", "sum"]
MOST_POINTS = 240  # of one series on the page; more steps are folded into ranges
MOST_BARS = 16  # steps; more are drawn as lines
AVERAGED = 10  # steps of the moving average

PHASES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(StepSeconds))
PHASE_WORDS = {"old_logp": "old logp", "weight_sync": "weight sync"}


@dataclasses.dataclass(frozen=True)
class Series:
    """One line, or one bar of every group. ``role`` picks the colour: a mode, or ``phase-N``; ``dashed`` lines only."""

    name: str
    role: str
    values: tuple[float, ...]
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """One figure. ``x`` are positions on the axis, ``labels`` what stands there; every series has as many values.

    ``says`` tells in one sentence what to look for.
    """

    key: str
    title: str
    says: str
    x_name: str
    unit: str
    kind: Kind
    x: tuple[float, ...]
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    note: str = ""


Value = Callable[[StepRecord], float]


def step_charts(runs: Sequence[RunView]) -> list[Chart]:
    """Every figure over steps, for the runs of one experiment (native first where there are two)."""
    charts = [
        _over_steps(
            runs,
            "mismatches",
            "Logprobs that differ",
            "Tokens whose logprob differs in bits between rollout and trainer. Consistency must be 0.",
            "tokens",
            [("", lambda s: float(s.mismatches))],
            fold="sum",
            bars=True,
        ),
        _over_steps(
            runs,
            "max-dlogp",
            "Largest difference",
            "The largest |train - rollout| of a step.",
            "nats",
            [("", lambda s: s.max_abs_dlogp)],
            fold="max",
            bars=True,
        ),
        _reward(runs),
        _over_steps(
            runs,
            "kl",
            "KL of rollout and trainer",
            "Estimators k1 and k3 over the sampled tokens. Any KL here is error: the weights are the same.",
            "nats",
            [("k1", lambda s: s.kl_k1), ("k3", lambda s: s.kl_k3)],
        ),
        _over_steps(
            runs,
            "entropy",
            "Entropy",
            "Mean entropy of the policy at response tokens.",
            "nats",
            [("", lambda s: s.entropy_mean)],
        ),
        _over_steps(runs, "length", "Response length", "Mean length of a response.", "tokens", [("", _length)]),
        _over_steps(
            runs,
            "truncated",
            "Truncated responses",
            "Responses that met the length limit.",
            "samples",
            [("", lambda s: float(s.truncated))],
            fold="sum",
            bars=True,
        ),
        _over_steps(
            runs,
            "grad-norm",
            "Gradient norm",
            "Global norm before clipping.",
            "",
            [("", lambda s: s.grad_norm)],
        ),
        _over_steps(
            runs,
            "rollout-speed",
            "Rollout speed",
            "Response tokens per second and rank while generating. Higher is better.",
            "tokens/s",
            [("", lambda s: s.rollout_tokens_per_gpu_s)],
        ),
        _over_steps(
            runs,
            "train-speed",
            "Training speed",
            "Tokens per second of the update. Higher is better.",
            "tokens/s",
            [("", lambda s: s.train_tokens_per_s)],
        ),
    ]
    return [chart for chart in charts if chart.x]


def _length(step: StepRecord) -> float:
    return step.response_len_mean


def _over_steps(
    runs: Sequence[RunView],
    key: str,
    title: str,
    says: str,
    unit: str,
    values: Sequence[tuple[str, Value]],
    *,
    fold: Fold = "mean",
    bars: bool = False,
) -> Chart:
    """One series for each run and value, over the steps that any run has."""
    steps = sorted({step.step for run in runs for step in run.steps})
    groups, labels, note = _ranges(steps, fold)
    series = []
    for run in runs:
        known = {step.step: step for step in run.steps}
        for index, (name, value) in enumerate(values):
            points = tuple(_fold([value(known[s]) for s in group if s in known], fold) for group in groups)
            title_of = f"{run.mode} {name}".strip()
            series.append(Series(title_of, run.mode, points, dashed=index > 0))
    kind: Kind = "bars" if bars and len(groups) <= MOST_BARS else "lines"
    x = tuple(float(group[0] + 1) for group in groups)
    return Chart(key, title, says, "step", unit, kind, x, labels, tuple(series), note=note)


def _ranges(steps: list[int], fold: Fold) -> tuple[list[list[int]], tuple[str, ...], str]:
    """Steps in ranges short enough to draw, their labels (from 1), and a note where a range holds several."""
    size = max(1, math.ceil(len(steps) / MOST_POINTS))
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    labels = tuple(f"{g[0] + 1}" if len(g) == 1 else f"{g[0] + 1}-{g[-1] + 1}" for g in groups)
    words = {"max": "maximum", "mean": "mean", "sum": "sum"}[fold]
    return groups, labels, f"Each point is the {words} of {size} steps." if size > 1 else ""


def _fold(values: list[float], how: Fold) -> float:
    if not values:
        return math.nan
    if how == "max":
        return max(values)
    total = math.fsum(values) if all(map(math.isfinite, values)) else math.nan
    return total if how == "sum" else total / len(values)


def moving_average(values: Sequence[float], window: int = AVERAGED) -> list[float]:
    """Mean of the last ``window`` values up to each; fewer at the start."""
    out = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        out.append(_fold(list(part), "mean"))
    return out


def _reward(runs: Sequence[RunView]) -> Chart:
    """Reward of every step; with more than three steps also its moving average."""
    averages = {run.run_id: moving_average([step.reward_mean for step in run.steps]) for run in runs}
    values: list[tuple[str, Value]] = [("", lambda s: s.reward_mean)]
    chart = _over_steps(runs, "reward", "Reward", "Mean reward of a step's samples.", "reward", values)
    if max((len(run.steps) for run in runs), default=0) <= 3:
        return chart
    groups, _, _ = _ranges(sorted({step.step for run in runs for step in run.steps}), "mean")
    series = list(chart.series)
    for run in runs:
        known = {step.step: mean for step, mean in zip(run.steps, averages[run.run_id], strict=True)}
        points = tuple(_fold([known[s] for s in group if s in known], "mean") for group in groups)
        series.append(Series(f"{run.mode} average", run.mode, points, dashed=True))
    says = f"Mean reward of a step's samples; dashed: mean of the last {AVERAGED} steps."
    return dataclasses.replace(chart, says=says, series=tuple(series))


def phase_charts(runs: Sequence[RunView]) -> list[Chart]:
    """Seconds of every phase, stacked: one bar a run (mean of its steps), then one figure a run over its steps."""
    runs = [run for run in runs if run.steps]
    if not runs:
        return []
    means = tuple(
        Series(
            PHASE_WORDS.get(phase, phase),
            f"phase-{index}",
            tuple(_fold([getattr(step.seconds, phase) for step in run.steps], "mean") for run in runs),
        )
        for index, phase in enumerate(PHASES)
    )
    numbers = tuple(float(index) for index in range(len(runs)))
    says = "Mean seconds of a step by phase. Lower is better."
    charts = [Chart("seconds", "Time of a step", says, "", "seconds", "stack", numbers, _names(runs), means)]
    for run in runs:
        groups, labels, note = _ranges([step.step for step in run.steps], "mean")
        known = {step.step: step.seconds for step in run.steps}
        series = tuple(
            Series(
                PHASE_WORDS.get(phase, phase),
                f"phase-{index}",
                tuple(_fold([getattr(known[s], phase) for s in group], "mean") for group in groups),
            )
            for index, phase in enumerate(PHASES)
        )
        x = tuple(float(group[0] + 1) for group in groups)
        title, key = f"Time by phase, {run.mode}", f"seconds-{run.mode}"
        charts.append(
            Chart(
                key, title, "Seconds of each step's phases.", "step", "seconds", "stack", x, labels, series, note=note
            )
        )
    return charts


def _names(runs: Sequence[RunView]) -> tuple[str, ...]:
    """What to call the runs of one experiment: their modes, or their ids where modes repeat."""
    modes = [run.mode for run in runs]
    return tuple(modes if len(set(modes)) == len(modes) else [run.run_id for run in runs])


def delta_charts(runs: Sequence[RunView]) -> list[Chart]:
    """Histogram of |train - rollout| with equal bits as a bar of their own, and |train - rollout| by position."""
    runs = [run for run in runs if run.deltas.equal or run.deltas.counts.any() or run.deltas.not_finite]
    if not runs:
        return []
    used = [index for index in range(len(EDGES) + 1) if any(run.deltas.counts[index] for run in runs)]
    bins = list(range(min(used), max(used) + 1)) if used else []
    odd = any(run.deltas.not_finite for run in runs)
    labels = ["equal", *(_size(index) for index in bins), *(["not finite"] if odd else [])]
    series = []
    for run in runs:
        counts = [run.deltas.equal, *(int(run.deltas.counts[index]) for index in bins)]
        counts += [run.deltas.not_finite] if odd else []
        series.append(Series(run.mode, run.mode, tuple(float(count) for count in counts)))
    x = tuple(float(index) for index in range(len(labels)))
    says = "Tokens by the size of |train - rollout|. 'equal' means all 32 bits are the same."
    unit = "tokens"
    histogram = Chart(
        "dlogp-histogram", "How far apart", says, "up to, nats", unit, "bars", x, tuple(labels), tuple(series)
    )
    return [histogram, *_by_position(runs)]


def _size(index: int) -> str:
    return f"{EDGES[index]:.0e}".replace("e-0", "e-").replace("e+0", "e") if index < len(EDGES) else "more"


def _by_position(runs: Sequence[RunView]) -> list[Chart]:
    places = sorted({int(place) for run in runs for place in run.deltas.place})
    if len(places) < 2:
        return []
    series = []
    for run in runs:
        where = {int(place): index for index, place in enumerate(run.deltas.place)}
        for name, values in (("mean", run.deltas.mean), ("largest", run.deltas.largest)):
            points = tuple(float(values[where[place]]) if place in where else math.nan for place in places)
            series.append(Series(f"{run.mode} {name}", run.mode, points, dashed=name == "largest"))
    x = tuple(float(place + 1) for place in places)
    says = "|train - rollout| by the token's position in the response; dashed: the largest."
    labels = tuple(f"{place + 1}" for place in places)
    return [
        Chart("dlogp-position", "Where it differs", says, "response token", "nats", "lines", x, labels, tuple(series))
    ]


def price_charts(prices: Prices) -> list[Chart]:
    """How fast each contestant is against stock, one figure a benchmark."""
    charts = []
    for benchmark in dict.fromkeys(row.benchmark for row in prices.rows):
        rows = [row for row in prices.rows if row.benchmark == benchmark and row.speed is not None]
        cases = list(dict.fromkeys(row.case for row in rows))[:24]  # the table has them all
        names = list(dict.fromkeys(row.contestant for row in rows))[:4]
        if not cases:
            continue
        speed = {(row.case, row.contestant): row.speed for row in rows}
        series = tuple(
            Series(
                name,
                "consistency" if index == 0 else f"phase-{index}",
                tuple(float(speed.get((case, name)) or math.nan) for case in cases),
            )
            for index, name in enumerate(names)
        )
        x = tuple(float(index) for index in range(len(cases)))
        key = "price-" + "".join(c if c.isalnum() else "-" for c in benchmark)[:40]
        says = "Times as fast as stock, or as the library's best, on the same machine: above 1 is faster."
        charts.append(
            Chart(key, f"Price list: {benchmark}", says, "", "times as fast", "rows", x, tuple(cases), series)
        )
    return charts
