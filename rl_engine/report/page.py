"""The self-contained HTML page: what the template shows, computed from the collection."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_engine import __version__
from rl_engine.records.matrix import MatrixRecord
from rl_engine.report import svg, verdict
from rl_engine.report.charts import Chart, delta_charts, phase_charts, price_charts, step_charts
from rl_engine.report.collect import Collection, RunView
from rl_engine.report.numbers import shown
from rl_engine.report.png import grid
from rl_engine.report.tables import Table, environments_table, providers_table
from rl_engine.report.why import cause_html

ASSETS = Path(__file__).with_name("assets")
MOST_EXPERIMENTS = 12  # drawn on the page, newest first; the tables hold every run
PAGE_LIMIT = 6_000_000  # bytes: a page that opens on a phone
MOST_LEDGER = 8  # runs beside one another in the gate ledger
MOST_ROWS = 60  # runs in the page's list

GROUPS = (
    ("Is it exact?", "Rollout against trainer, within each run.", ("mismatches", "max-dlogp", "dlogp-histogram",
     "dlogp-position", "kl")),
    ("Does it learn?", "The two runs of a pair sample other tokens after the first update, so these may part.",
     ("reward", "entropy", "length", "truncated", "grad-norm")),
    ("What does it cost?", "Wall-clock, as recorded by the driver and the workers.",
     ("rollout-speed", "train-speed", "seconds", "seconds-native", "seconds-consistency")),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a data table: the text shown, and the value in full where it is a number."""

    text: str
    value: str = ""


def render(collection: Collection) -> str:
    """The page; figures of the oldest experiments are left out where it would become too large for a phone.

    Raises:
        ImportError: jinja2 is not installed.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    template = environment.from_string((ASSETS / "page.html.j2").read_text(encoding="utf-8"))
    shown_experiments = min(MOST_EXPERIMENTS, len(collection.experiments))
    while True:
        page = template.render(_context(collection, shown_experiments))
        if len(page.encode()) < PAGE_LIMIT or shown_experiments == 0:
            return page
        shown_experiments //= 2


def experiment_charts(runs: Sequence[RunView]) -> list[Chart]:
    """Every figure of one experiment."""
    return [*step_charts(runs), *phase_charts(runs), *delta_charts(runs)]


def _context(collection: Collection, most: int) -> dict[str, Any]:
    from markupsafe import Markup

    script = (ASSETS / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    groups = list(collection.experiments.items())[:most]
    experiments = [_experiment(number, name, runs) for number, (name, runs) in enumerate(groups, 1)]
    prices = [_figure(chart, "prices") for chart in price_charts(collection.prices)]
    newest = sorted(collection.runs, key=lambda run: run.started, reverse=True)
    return {
        "css": Markup((ASSETS / "page.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": f"sha256-{digest}",
        "hero": verdict.hero(collection),
        "sections": _sections(collection, experiments, bool(prices)),
        "runs": [_run_row(run) for run in newest[:MOST_ROWS]],
        "more_runs": _more(len(collection.runs), len(collection.experiments), most),
        "experiments": experiments,
        "matrices": [_matrix(matrix) for matrix in collection.matrices],
        "prices": {"charts": prices, "text": _machines(collection.prices.machines)},
        "ledger": _ledger(collection.runs),
        "meaning": _meaning(collection.runs),
        "environments": _data(environments_table(collection.runs)),
        "left_out": collection.left_out,
        "made": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "root": str(collection.output_root),
    }


def _sections(collection: Collection, experiments: list[dict[str, Any]], prices: bool) -> list[tuple[str, str]]:
    found = [("verdict", "Verdict"), ("runs", "Runs")]
    found += [(item["anchor"], item["short"]) for item in experiments[:3]]
    if collection.matrices:
        found.append(("matrix", "Matrix"))
    if prices:
        found.append(("prices", "Prices"))
    found += [("gates", "Gates"), ("meaning", "Meaning")]
    return [*found, ("left-out", "Left out")] if collection.left_out else found


def _more(runs: int, experiments: int, drawn: int) -> str:
    parts = []
    if runs > MOST_ROWS:
        parts.append(f"The {MOST_ROWS} newest of {runs} runs.")
    if experiments > drawn:
        parts.append(f"Figures below are of the {drawn} newest of {experiments} experiments.")
    return " ".join([*parts, "Every run is in tables/runs.csv."]) if parts else ""


def _machines(machines: tuple[str, ...]) -> str:
    return "Measured on: " + "; ".join(machines) if machines else ""


def _run_row(run: RunView) -> dict[str, Any]:
    from rl_engine.report import tables

    word = tables.verdict_word(run)
    return {
        "id": run.run_id,
        "mode": run.mode,
        "tokens": shown(run.tokens),
        "mismatches": shown(run.mismatches),
        "largest": shown(max((step.max_abs_dlogp for step in run.steps), default=0.0)),
        "reward": shown(tables.reward_mean(run), 3),
        "speed": shown(tables.rollout_speed(run)),
        "seconds": shown(tables.step_seconds(run), 3),
        "validation": word,
        "validation_state": {"valid": "good", "invalid": "bad"}.get(word, "warn"),
        "seal": "sealed" if run.sealed else "not sealed",
        "seal_state": "good" if run.sealed else "warn",
        "evidence": run.plan.evidence,
        "layout": tables.topology_words(run),
    }


def _experiment(number: int, name: str, runs: tuple[RunView, ...]) -> dict[str, Any]:
    """One experiment's section: its figures in groups, the causes and the providers."""
    from markupsafe import Markup

    anchor = f"experiment-{number}"
    charts = {chart.key: chart for chart in experiment_charts(runs)}
    groups = []
    for title, text, keys in GROUPS:
        drawn = [_figure(charts[key], anchor) for key in keys if key in charts]
        if drawn:
            groups.append({"title": title, "text": text, "charts": drawn})
    modes = [run.mode for run in runs]
    title = "Native against consistency" if len(set(modes)) > 1 else f"{modes[0].capitalize()} run"
    return {
        "anchor": anchor,
        "name": name,
        "title": f"{title} ({runs[0].plan.profile}, {len(runs[0].steps)} steps)",
        "short": "Figures" if number == 1 else f"Figures {number}",
        "groups": groups,
        "causes": [{"mode": run.mode, "html": Markup(cause_html(run))} for run in runs],
        "providers": _providers(runs),
    }


def _figure(chart: Chart, anchor: str) -> dict[str, Any]:
    from markupsafe import Markup

    columns = (chart.x_name or "run", *(series.name for series in chart.series))
    rows = [
        [Cell(chart.labels[index]), *(_number(series.values[index]) for series in chart.series)]
        for index in range(len(chart.x))
    ]
    return {
        "id": f"{anchor}-{chart.key}",
        "key": chart.key,
        "title": chart.title,
        "says": chart.says,
        "label": svg.label(chart),
        "legend": chart.series,
        "svg": Markup(svg.draw(chart)),
        "note": chart.note,
        "table": {"columns": columns, "rows": rows, "numeric": list(range(1, len(columns)))},
    }


def _number(value: float) -> Cell:
    return Cell("", "") if math.isnan(value) else Cell(shown(value), repr(value))


def _data(table: Table) -> dict[str, Any]:
    """A whole table for the page."""
    numeric = [
        index
        for index in range(len(table.columns))
        if table.rows and all(isinstance(row[index], int | float | None) for row in table.rows)
    ]
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    return {"columns": table.columns, "rows": rows, "numeric": numeric}


def _cell(cell: object) -> Cell:
    if cell is None:
        return Cell("")
    if isinstance(cell, bool):
        return Cell("yes" if cell else "no")
    return Cell(shown(cell), repr(cell)) if isinstance(cell, int | float) else Cell(str(cell))


def _providers(runs: Sequence[RunView]) -> dict[str, Any]:
    """Operators by row; provider and calls of every run and side by column."""
    columns = [(run, side) for run in runs for side in ("rollout", "train")]
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for row in providers_table(runs).rows:
        run_id, _, side, operator, provider, planned, dtype, execution, _, calls = row
        mark = "" if provider == planned else f" (planned: {planned})"
        words = f"{provider}{mark}, {shown(int(calls or 0))} calls, {dtype}, {execution}"
        found.setdefault(str(operator), {}).setdefault((str(run_id), str(side)), []).append(words)
    names = {run.run_id: run.mode if len({r.mode for r in runs}) == len(runs) else run.run_id for run in runs}
    rows = [
        [Cell(operator), *(Cell("; ".join(found[operator].get((run.run_id, side), []))) for run, side in columns)]
        for operator in sorted(found)
    ]
    return {"columns": ("operator", *(f"{names[r.run_id]} {side}" for r, side in columns)), "rows": rows, "numeric": []}


def _matrix(matrix: MatrixRecord) -> dict[str, Any]:
    rows, columns, cells = grid(matrix)
    states = {"equal": "good", "differs": "bad", "failed": "bad", "control": "warn", "refused": "warn", "not run": ""}

    def cell(row: str, column: str) -> dict[str, str]:
        item = cells.get((row, column))
        if item is None:
            return {"state": "", "text": "", "word": ""}
        text = shown(item.mismatches) if item.tokens_compared else "-"
        return {"state": states[item.status], "text": text, "word": item.status}

    judged = [item for item in matrix.cells if item.status != "control"]
    equal = sum(item.status == "equal" for item in judged)
    return {
        "title": f"{matrix.name}: {equal} of {len(judged)} layouts agree with the first in every bit",
        "text": f"{matrix.matrix_id}, {matrix.time}, {matrix.device}. Reference: {matrix.reference or 'none'}. "
        "Compared: tokens, logprobs, gradient norms and weights.",
        "columns": columns,
        "rows": [{"name": row, "cells": [cell(row, column) for column in columns]} for row in rows],
        "details": [
            f"TP{c.train_tp} CP{c.train_cp} with {c.rollout_engines} x TP{c.rollout_tp} CP{c.rollout_cp}: {c.detail}"
            for c in matrix.cells
            if c.status not in ("equal", "control") and c.detail
        ],
    }


def _ledger(runs: Sequence[RunView]) -> dict[str, Any]:
    """Gates by row, the newest runs by column; failures of every run in words."""
    chosen = sorted(runs, key=lambda run: run.started, reverse=True)[:MOST_LEDGER]
    chosen = sorted(chosen, key=lambda run: (run.experiment, run.mode != "native"))
    names = list(dict.fromkeys(finding.name for run in chosen for finding in run.findings))
    known = {(run.run_id, finding.name): finding for run in chosen for finding in run.findings}
    marks = {"PASS": ("good", "✓ pass"), "FAIL": ("bad", "✗ FAIL"), "WARN": ("warn", "! warning")}

    def cell(run: RunView, name: str) -> dict[str, str]:
        finding = known.get((run.run_id, name))
        if finding is None:
            return {"state": "", "mark": "-", "found": "not judged"}
        state, mark = marks[finding.status]
        if finding.recorded and finding.status != "FAIL":
            state, mark = "", f"{finding.status.lower()} as recorded"
        return {"state": state, "mark": mark, "found": finding.found[:160]}

    return {
        "heads": [{"mode": run.mode, "id": run.run_id} for run in chosen],
        "rows": [{"name": name, "cells": [cell(run, name) for run in chosen]} for name in names],
        "failed": [
            f"{run.run_id}: {f.name}: found {f.found}, expected {f.expected}"
            for run in runs
            for f in run.findings
            if f.status == "FAIL"
        ],
    }


def _meaning(runs: Sequence[RunView]) -> dict[str, list[str]]:
    shows = dict.fromkeys(line for run in runs for line in run.certifies)
    shows_not = dict.fromkeys(line for run in runs for line in run.does_not_certify)
    unsealed = sum(not run.sealed for run in runs)
    extra = (
        [f"that {unsealed} of these runs were not changed after they ended: they are not sealed"] if unsealed else []
    )
    return {"shows": list(shows), "shows_not": [*extra, *shows_not]}
