"""A section for the HTML report: causes, metrics and five figures as inline SVG (no script, no file beside)."""

from __future__ import annotations

import dataclasses
import html
from statistics import NormalDist

import numpy as np

from rl_engine.diagnose.causes import CAUSES
from rl_engine.diagnose.doctor import Diagnosis
from rl_engine.diagnose.frame import Frame
from rl_engine.diagnose.metrics import Metrics

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 420, 236, 58, 36, 34
COLOURS = ("#4f86e8", "#d9822b")  # both readable on white and on black


@dataclasses.dataclass(frozen=True)
class Series:
    """One line, row of points or row of bars; x and y of equal length."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Figure:
    """Data of one figure. ``kind`` is ``line``, ``points`` or ``bars``; ``labels`` name bars where x is a category."""

    name: str
    title: str
    x_label: str
    y_label: str
    kind: str
    series: tuple[Series, ...]
    labels: tuple[str, ...] = ()


def figures(diagnosis: Diagnosis) -> tuple[Figure, ...]:
    """Gap against position, by sample, by worker (where known), histogram and QQ plot; empty without tokens."""
    frame = diagnosis.frame
    if not len(frame):
        return ()
    out = [_by_position(frame), _by_sample(frame)]
    workers = _by_worker(frame)
    return (*out, *([workers] if workers else []), _histogram(frame), _quantile_plot(frame))


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(v) for v in values)


def _by_position(frame: Frame) -> Figure:
    edges = np.unique(np.quantile(frame.position, np.linspace(0, 1, 41)))
    bins = np.clip(np.searchsorted(edges, frame.position, side="right") - 1, 0, max(len(edges) - 2, 0))
    count = np.bincount(bins)
    held = count > 0  # quantiles of few positions leave bins without a token

    def mean(values: np.ndarray) -> tuple[float, ...]:
        return _floats(np.bincount(bins, weights=values)[held] / count[held])

    x = mean(frame.position.astype(np.float64))
    series = (Series("mean |gap|", x, mean(np.abs(frame.gap))), Series("mean gap", x, mean(frame.gap)))
    return Figure("position", "Gap against position", "absolute position", "nats", "line", series)


def _by_sample(frame: Frame) -> Figure:
    mean, count = frame.per_sample(np.abs(frame.gap))
    shown = np.flatnonzero(count > 0)
    if len(shown) > 400:
        shown = shown[:: -(-len(shown) // 400)]
    series = (Series("mean |gap|", _floats(shown.astype(np.float64)), _floats(mean[shown])),)
    return Figure("sample", "Gap by sample", "sample", "mean |gap|, nats", "points", series)


def _by_worker(frame: Frame) -> Figure | None:
    samples = frame.log.samples
    codes, names = (samples.engine, samples.engine_names)
    if codes is None or len(np.unique(codes)) < 2:
        codes, names = (samples.rank, samples.rank_names)
    if codes is None:
        return None
    worker = codes[frame.sample]
    unique, inverse = np.unique(worker, return_inverse=True)
    unique, keep = unique[:32], inverse < 32
    mean = np.bincount(inverse[keep], weights=np.abs(frame.gap[keep])) / np.maximum(np.bincount(inverse[keep]), 1)
    labels = tuple(names[c] if 0 <= c < len(names) else str(c) for c in unique)
    series = (Series("mean |gap|", _floats(np.arange(len(unique), dtype=np.float64)), _floats(mean)),)
    return Figure("worker", "Gap by worker", "", "mean |gap|, nats", "bars", series, labels)


def _histogram(frame: Frame) -> Figure:
    reach = max(float(np.quantile(np.abs(frame.gap), 0.995)), 1e-9)
    count, edges = np.histogram(np.clip(frame.gap, -reach, reach), bins=61, range=(-reach, reach))
    series = (Series("tokens", _floats((edges[1:] + edges[:-1]) / 2), _floats(np.log10(count + 1.0))),)
    return Figure("histogram", "Distribution of the gap", "gap, nats", "log10(tokens + 1)", "bars", series)


def _quantile_plot(frame: Frame) -> Figure:
    share = (np.arange(101) + 0.5) / 101
    normal = np.array([NormalDist().inv_cdf(float(s)) for s in share])
    spread = float(frame.gap.std()) or 1.0
    series = (
        Series("gap", _floats(normal), _floats(np.quantile(frame.gap, share))),
        Series("normal", _floats(normal), _floats(normal * spread + float(frame.gap.mean()))),
    )
    return Figure("qq", "QQ plot against a normal", "normal quantile", "gap, nats", "line", series)


def _number(value: float) -> str:
    return f"{value:.3g}"


def svg(figure: Figure) -> str:
    """One figure as an inline SVG element that follows the page's width and text colour."""
    xs = [x for s in figure.series for x in s.x] or [0.0]
    ys = [y for s in figure.series for y in s.y] or [0.0]
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = min(0.0, *ys), max(0.0, *ys)
    span_x, span_y = (high_x - low_x) or 1.0, (high_y - low_y) or 1.0
    if figure.kind == "bars":
        low_x, span_x = low_x - 0.5 * span_x / max(len(xs), 1), span_x * (1 + 1 / max(len(xs), 1))

    def place(x: float, y: float) -> tuple[float, float]:
        px = LEFT + (x - low_x) / span_x * (WIDTH - LEFT - 10)
        py = HEIGHT - BOTTOM - (y - low_y) / span_y * (HEIGHT - BOTTOM - TOP)
        return px, py

    title = html.escape(figure.title)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{title}" font-family="sans-serif" font-size="12" fill="currentColor">',
        f'<text x="0" y="14" font-size="13" font-weight="600">{title}</text>',
        *_legend(figure),
    ]
    zero = place(low_x, 0.0)[1]
    for y in sorted({low_y, 0.0, high_y, (low_y + high_y) / 2 if low_y == 0 else 0.0}):
        at, strength = place(low_x, y)[1], "0.7" if y == 0 else "0.15"
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{at:.1f}" y2="{at:.1f}" stroke="currentColor" '
            f'stroke-opacity="{strength}"/>'
        )
        parts.append(f'<text x="{LEFT - 4}" y="{at + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    if not figure.labels:
        for x, anchor in ((min(xs), "start"), (max(xs), "end")):
            at = place(x, 0)[0]
            parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 18}" text-anchor="{anchor}">{_number(x)}</text>')
    middle = (LEFT + WIDTH) / 2
    label = html.escape(f"{figure.x_label} ({figure.y_label})" if figure.x_label else figure.y_label)
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{label}</text>')
    for i, series in enumerate(figure.series):
        parts += _marks(figure, series, COLOURS[i % 2], place, zero)
    return "".join([*parts, "</svg>"])


def _legend(figure: Figure) -> list[str]:
    """Names of the lines, right of the title; none for a single one."""
    if len(figure.series) < 2:
        return []
    parts, x = [], WIDTH - 10.0
    for i, series in reversed(list(enumerate(figure.series))):
        parts.append(f'<text x="{x:.0f}" y="14" text-anchor="end">{html.escape(series.name)}</text>')
        x -= 7.6 * len(series.name) + 4
        parts.append(f'<rect x="{x - 10:.0f}" y="6" width="9" height="9" fill="{COLOURS[i % 2]}"/>')
        x -= 24
    return parts


def _marks(figure: Figure, series: Series, colour: str, place: object, zero: float) -> list[str]:
    points = [place(x, y) for x, y in zip(series.x, series.y, strict=True)]  # type: ignore[operator]
    title = f"<title>{html.escape(series.name)}</title>"
    if figure.kind == "line":
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return [f'<polyline fill="none" stroke="{colour}" points="{path}">{title}</polyline>']
    if figure.kind == "points":
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{colour}"/>' for x, y in points]
    wide = max(1.0, (WIDTH - LEFT - 10) / max(len(points), 1) * 0.8)
    out = []
    for i, (x, y) in enumerate(points):
        top, tall = min(y, zero), max(abs(zero - y), 0.5)
        name = f"<title>{html.escape(figure.labels[i])}</title>" if figure.labels else ""
        out.append(
            f'<rect x="{x - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
            f'fill="{colour}">{name}</rect>'
        )
        if figure.labels and len(points) <= 8:
            text = html.escape(figure.labels[i][:12])
            out.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{text}</text>')
    return out


def section(diagnosis: Diagnosis, metrics: Metrics, heading: str = "Why it differs") -> str:
    """The section as an HTML fragment (``<section>``), every logged text escaped; an empty heading is left out."""
    rows = "".join(
        f"<tr><td>{html.escape(CAUSES[f.cause].title)}</td><td>{f.score:.2f}</td>"
        f"<td>{html.escape(f.evidence.detail)}</td><td>{html.escape(CAUSES[f.cause].hint)}</td></tr>"
        for f in diagnosis.reported
    )
    numbers = (
        ("compared tokens", f"{metrics.compared}"),
        ("equal bits", f"{metrics.equal:.2%}"),
        ("mean |gap|", f"{metrics.mean_abs:.3g}"),
        ("largest |gap|", f"{metrics.max_abs:.3g}"),
        ("k1", f"{metrics.k1:.3g}"),
        ("k3", f"{metrics.k3:.3g}"),
        ("chi2", f"{metrics.chi2:.3g}"),
        ("effective sample size", f"{metrics.ess:.2%}"),
        (f"clip fraction ({metrics.clip:g})", f"{metrics.clip_fraction:.2%}"),
    )
    table = "".join(f"<tr><td>{html.escape(name)}</td><td>{value}</td></tr>" for name, value in numbers)
    drawings = "".join(svg(figure) for figure in figures(diagnosis))
    title = f"<h2>{html.escape(heading)}</h2>" if heading else ""
    return (
        f'<section class="diagnose">{title}<p>{html.escape(diagnosis.log.source)}</p>'
        f"<table><tr><th>cause</th><th>score</th><th>evidence</th><th>next check</th></tr>{rows}</table>"
        f"<table>{table}</table><div>{drawings}</div></section>"
    )
