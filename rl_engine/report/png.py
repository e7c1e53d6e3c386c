"""A chart as PNG, drawn by matplotlib, for slides and papers."""

from __future__ import annotations

import io
import math
from typing import Any

from rl_engine.records.matrix import MatrixCell, MatrixRecord
from rl_engine.report.charts import Chart

COLOURS = {"native": "#c2410c", "consistency": "#1d4ed8"}
PHASE_COLOURS = ("#0e7490", "#67d3e8", "#9333ea", "#e2a20f", "#65a30d", "#db2777", "#a3a09c")
CELL_COLOURS = {
    "equal": "#86d39b",
    "differs": "#f2a07b",
    "failed": "#e46a6a",
    "control": "#f6dfa0",
    "refused": "#d4d4d8",
    "not run": "#f4f4f5",
}
SIZE, DPI = (6.4, 3.8), 150


def colour(role: str) -> str:
    """Hex colour of a series."""
    if role.startswith("phase-"):
        return PHASE_COLOURS[int(role.removeprefix("phase-")) % len(PHASE_COLOURS)]
    return COLOURS.get(role, "#52525b")


def png(chart: Chart) -> bytes:
    """The figure as a PNG file's bytes. No text of it is taken for markup.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = _new(chart.title)
    if chart.kind == "lines":
        for series in chart.series:
            style = "--" if series.dashed else "-"
            marker = "" if series.dashed or len(chart.x) > 48 else ("s" if series.role == "native" else "o")
            axes.plot(
                chart.x, series.values, style, marker=marker, ms=4, color=colour(series.role), label=_text(series.name)
            )
    elif chart.kind == "rows":
        return _bytes(_rows(chart))
    else:
        _columns(axes, chart)
    axes.set_xlabel(_text(chart.x_name))
    axes.set_ylabel(_text(chart.unit))
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), max(high, 0.0) if high > 0 else 1.0)
    axes.grid(axis="y", color="#e4e4e7", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8, ncols=min(len(chart.series), 4))
    return _bytes(figure)


def _rows(chart: Chart) -> Any:
    """Horizontal bars with a line at 1."""
    figure, axes = _new(chart.title)
    figure.set_size_inches(SIZE[0], max(SIZE[1], 0.28 * len(chart.x) * len(chart.series) + 1.2))
    tall = 0.8 / max(len(chart.series), 1)
    for number, series in enumerate(chart.series):
        at = [place + number * tall for place in range(len(chart.x))]
        values = [value if math.isfinite(value) else 0.0 for value in series.values]
        bars = axes.barh(at, values, tall, color=colour(series.role), label=_text(series.name))
        axes.bar_label(bars, labels=[f"{value:.3g}" for value in values], fontsize=6, padding=2)
    axes.set_yticks(list(range(len(chart.x))), [_text(text[:60]) for text in chart.labels], fontsize=6)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#52525b", linewidth=0.8)
    axes.set_xlabel(_text(chart.unit))
    return figure


def _columns(axes: Any, chart: Chart) -> None:
    """Groups of bars, or one stack a column."""
    places = list(range(len(chart.x)))
    below = [0.0] * len(places)
    wide = 0.8 if chart.kind == "stack" else 0.8 / max(len(chart.series), 1)
    for number, series in enumerate(chart.series):
        values = [value if math.isfinite(value) else 0.0 for value in series.values]
        if chart.kind == "stack":
            axes.bar(places, values, wide, bottom=below, color=colour(series.role), label=_text(series.name))
            below = [a + b for a, b in zip(below, values, strict=True)]
            continue
        at = [place + (number - (len(chart.series) - 1) / 2) * wide for place in places]
        bars = axes.bar(at, values, wide, color=colour(series.role), label=_text(series.name))
        if len(places) <= 8:
            axes.bar_label(bars, labels=[f"{value:.4g}" for value in values], fontsize=7, padding=1)
    every = max(1, math.ceil(len(places) / 12))
    labels = [_text(text[:24]) for text in chart.labels]
    long = max(map(len, labels), default=0) > 8
    axes.set_xticks(
        places[::every], labels[::every], fontsize=7, rotation=60 if long else 0, ha="right" if long else "center"
    )


def matrix_png(matrix: MatrixRecord) -> bytes:
    """The topology matrix as a heat map.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.patches import Rectangle

    rows, columns, cells = grid(matrix)
    figure, axes = _new(f"Topology matrix {matrix.name}")
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            cell = cells.get((row, column))
            status = cell.status if cell else "not run"
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=CELL_COLOURS[status], edgecolor="white"))
            text = "" if cell is None else (str(cell.mismatches) if cell.tokens_compared else cell.status)
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], columns, fontsize=7, rotation=60, ha="right")
    axes.set_yticks([y + 0.5 for y in range(len(rows))], rows, fontsize=7)
    axes.set_xlabel("rollout")
    axes.set_ylabel("training")
    return _bytes(figure)


def grid(matrix: MatrixRecord) -> tuple[list[str], list[str], dict[tuple[str, str], Any]]:
    """Rows (training layouts), columns (rollout layouts), and the cell at each pair of their names."""
    named = [
        ((f"TP{c.train_tp} CP{c.train_cp}{_stock(c)}", f"{c.rollout_engines} x TP{c.rollout_tp} CP{c.rollout_cp}"), c)
        for c in matrix.cells
    ]
    rows = list(dict.fromkeys(name[0] for name, _ in named))
    columns = list(dict.fromkeys(name[1] for name, _ in named))
    return rows, columns, dict(named)


def _stock(cell: MatrixCell) -> str:
    return f", stock {cell.native}" if cell.native else ""


def _new(title: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(_text(title), loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _text(text: str) -> str:
    """Dollars would start matplotlib's mathematics."""
    return text.replace("$", r"\$")


def _bytes(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": "rl-kernel report"})
    return out.getvalue()
