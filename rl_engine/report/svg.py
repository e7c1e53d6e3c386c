"""A chart as inline SVG. Colours and fonts come from the page's style sheet, through classes."""

from __future__ import annotations

import html
import math
from collections.abc import Callable

from rl_engine.report.charts import Chart
from rl_engine.report.numbers import short, ticks

WIDTH, HEIGHT = 420, 244
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 30, 40
_INNER_W, _INNER_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

Scale = Callable[[float], float]


def draw(chart: Chart) -> str:
    """The figure as one ``<svg>``; every text in it is escaped.

    ``data-x`` holds the horizontal place of each point in the drawing's own units, for the page's read-out.
    """
    if chart.kind == "rows":
        return _rows(chart)
    places = _places(chart)
    marks = ticks(*_range(chart))
    low, high = marks[0], marks[-1]

    def y_of(value: float) -> float:
        return TOP + _INNER_H * (1 - (min(max(value, low), high) - low) / (high - low))

    body = [*_grid(chart, marks, y_of), *_x_axis(chart, places)]
    body += {"lines": _lines, "bars": _bars, "stack": _stack}[chart.kind](chart, places, y_of)
    at = " ".join(f"{place:.1f}" for place in places)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label(chart))}" '
        f'data-x="{at}" data-top="{TOP}" data-bottom="{HEIGHT - BOTTOM}">'
        f'{"".join(body)}<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def _rows(chart: Chart) -> str:
    """Horizontal bars under their names, with a line at 1: for names too long to stand below a column."""
    tall = 22 + 14 * len(chart.series)
    height = TOP + tall * len(chart.x) + 8
    values = [value for series in chart.series for value in series.values if math.isfinite(value)]
    reach = max([1.0, *values]) * 1.12
    one = 8 + (WIDTH - 60) / reach
    parts = [f'<line class="zero" x1="{one:.1f}" x2="{one:.1f}" y1="{TOP - 6}" y2="{height - 6}"/>']
    parts.append(f'<text class="tick" x="{one:.1f}" y="{TOP - 10}" text-anchor="middle">1</text>')
    middles = []
    for index, name in enumerate(chart.labels):
        y = TOP + tall * index
        middles.append(y + tall / 2)
        cut = name if len(name) <= 62 else name[:61] + "…"
        parts.append(f'<text class="tick" x="8" y="{y + 12}">{html.escape(cut)}</text>')
        for number, series in enumerate(chart.series):
            value, top = series.values[index], y + 17 + 14 * number
            if math.isfinite(value) and value > 0:
                wide = (WIDTH - 60) * value / reach
                parts.append(f'<rect class="bar {series.role}" x="8" y="{top}" width="{wide:.1f}" height="11"/>')
                parts.append(f'<text class="value" x="{12 + wide:.1f}" y="{top + 9}">{short(value)}</text>')
    at = " ".join(f"{middle:.1f}" for middle in middles)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(label(chart))}" '
        f'data-y="{at}">{"".join(parts)}<line class="cursor"/></svg>'
    )


def label(chart: Chart) -> str:
    """What a screen reader says of a figure."""
    parts = []
    for series in chart.series:
        finite = [value for value in series.values if math.isfinite(value)]
        if finite:
            parts.append(f"{series.name} from {short(min(finite))} to {short(max(finite))}")
    return f"{chart.title}: " + (", ".join(parts) or "no values") + (f" {chart.unit}" if chart.unit else "")


def _places(chart: Chart) -> list[float]:
    """Horizontal place of every point: numbers on a scale for lines, equal slots for bars."""
    count = len(chart.x)
    if chart.kind != "lines":
        return [LEFT + _INNER_W * (index + 0.5) / max(count, 1) for index in range(count)]
    low, high = min(chart.x, default=0.0), max(chart.x, default=1.0)
    if high <= low:
        return [LEFT + _INNER_W / 2] * count
    pad = 10.0
    return [LEFT + pad + (_INNER_W - 2 * pad) * (value - low) / (high - low) for value in chart.x]


def _range(chart: Chart) -> tuple[float, float]:
    """Least and largest value to show. Zero is always in view: a value of 0 is what these figures are about."""
    if chart.kind == "stack":
        columns = zip(*(series.values for series in chart.series), strict=True)
        values = [math.fsum(v for v in column if math.isfinite(v)) for column in columns]
    else:
        values = [value for series in chart.series for value in series.values if math.isfinite(value)]
    low, high = min([0.0, *values]), max([0.0, *values])
    return (low, high) if high > low else (0.0, 1.0)


def _grid(chart: Chart, marks: list[float], y_of: Scale) -> list[str]:
    parts = []
    for mark in marks:
        y, kind = y_of(mark), "zero" if mark == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(mark)}</text>')
    unit = html.escape(chart.unit)
    parts.append(f'<text class="unit" x="4" y="12">{unit}</text>')
    return parts


def _x_axis(chart: Chart, places: list[float]) -> list[str]:
    """Labels that fit: short ones upright, long ones cut, never two on one another."""
    base = HEIGHT - BOTTOM
    parts = [f'<text class="unit" x="{LEFT + _INNER_W / 2}" y="{HEIGHT - 5}" text-anchor="middle">']
    parts = ["".join([*parts, html.escape(chart.x_name), "</text>"])]
    room = _INNER_W / max(len(places), 1)
    longest = max((len(text) for text in chart.labels), default=1)
    letters = max(4, int(room / 6.6))
    every = 1
    if chart.kind == "lines" or longest <= 7:
        every = max(1, math.ceil((min(longest, 7) * 6.6 + 8) / room))
    else:
        every = max(1, math.ceil(34 / room))
        letters = max(4, int(room * every / 6.6))
    last = -math.inf
    for index in range(0, len(places), every):
        text = chart.labels[index]
        text = text if len(text) <= letters or longest <= 7 else text[: letters - 1] + "…"
        if places[index] - last < min(len(text), 7) * 6.6:
            continue
        last = places[index]
        where = f'x="{last:.1f}" y="{base + 15}" text-anchor="middle"'
        parts.append(f'<text class="tick" {where}>{html.escape(text)}</text>')
    return parts


def _lines(chart: Chart, places: list[float], y_of: Scale) -> list[str]:
    parts = []
    for series in chart.series:
        dash = " dashed" if series.dashed else ""
        run: list[str] = []
        for place, value in [*zip(places, series.values, strict=True), (0.0, math.nan)]:
            if math.isfinite(value):
                run.append(f"{place:.1f},{y_of(value):.1f}")
                continue
            if len(run) > 1:
                parts.append(f'<polyline class="line {series.role}{dash}" points="{" ".join(run)}"/>')
            run = []
        if len(places) <= 24 and not series.dashed:
            shape = _square if series.role == "native" else _circle
            parts += [
                shape(place, y_of(value), series.role)
                for place, value in zip(places, series.values, strict=True)
                if math.isfinite(value)
            ]
    return parts


def _circle(x: float, y: float, role: str) -> str:
    return f'<circle class="mark {role}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _square(x: float, y: float, role: str) -> str:
    return f'<rect class="mark {role}" x="{x - 2.7:.1f}" y="{y - 2.7:.1f}" width="5.4" height="5.4"/>'


def _bars(chart: Chart, places: list[float], y_of: Scale) -> list[str]:
    """Groups of bars. In a figure of few bars a zero stands as a line on the axis, with its number."""
    parts = []
    room = _INNER_W / max(len(places), 1) * 0.78
    wide = min(room / max(len(chart.series), 1), 46.0)
    zero = y_of(0.0)
    for number, series in enumerate(chart.series):
        for place, value in zip(places, series.values, strict=True):
            if not math.isfinite(value):
                continue
            x = place + (number - len(chart.series) / 2) * wide
            y = y_of(value)
            top, tall = min(y, zero), abs(zero - y)
            if value == 0 and len(places) > 8:
                continue
            if tall < 2.0:
                top, tall = zero - 2.0, 2.0
            parts.append(
                f'<rect class="bar {series.role}" x="{x + 0.5:.1f}" y="{top:.1f}" width="{max(wide - 1, 1):.1f}" '
                f'height="{tall:.1f}"/>'
            )
            text = short(value)
            if wide >= 6.4 * len(text) + 3:
                parts.append(
                    f'<text class="value" x="{x + wide / 2:.1f}" y="{top - 4:.1f}" text-anchor="middle">{text}</text>'
                )
    return parts


def _stack(chart: Chart, places: list[float], y_of: Scale) -> list[str]:
    parts = []
    wide = min(_INNER_W / max(len(places), 1) * 0.8, 90.0)
    for index, place in enumerate(places):
        total = 0.0
        for series in chart.series:
            value = series.values[index]
            if not math.isfinite(value) or value <= 0:
                continue
            bottom, top = y_of(total), y_of(total + value)
            total += value
            parts.append(
                f'<rect class="bar {series.role}" x="{place - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" '
                f'height="{max(bottom - top, 0.2):.1f}"/>'
            )
        if wide >= 30:
            text = short(round(total, 1))
            parts.append(
                f'<text class="value" x="{place:.1f}" y="{y_of(total) - 4:.1f}" text-anchor="middle">{text}</text>'
            )
    return parts
