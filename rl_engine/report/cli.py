"""The verb ``report``: collects the runs of an output root and writes tables, figures and one HTML page."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from rl_engine.records.codec import printable
from rl_engine.records.errors import UserError
from rl_engine.report import tables
from rl_engine.report.collect import Collection, collect
from rl_engine.report.output import ReportFolder

EXTRA = "python -m pip install 'rl-kernel[report]'"


def main(
    output_root: Path,
    *,
    include_unsealed: bool,
    output: Path | None,
    json_output: bool,
    tensorboard: bool = False,
) -> int:
    """Write the report and say where it is; returns 0, or 2 when no run can be shown.

    Raises:
        UserError: no output root, or an output folder that must not be written to.
    """
    if tensorboard and not _has("tensorboard"):
        raise UserError(
            "no package tensorboard in this environment",
            "tensorboard for --tensorboard",
            "python -m pip install 'rl-kernel[tensorboard]'",
        )
    collection = collect(output_root, include_unsealed)
    if not collection.runs:
        return _nothing(collection, include_unsealed)
    folder = ReportFolder(output or output_root / "report")
    _write_tables(folder, collection)
    missing = _write_page(folder, collection) + _write_figures(folder, collection)
    if tensorboard:
        from rl_engine.report.tensorboard import write_events

        write_events(folder.folder / "tensorboard", collection.runs)
    body = _summary(folder, collection, missing)
    folder.finish(body)
    _say(folder, collection, missing, body, json_output)
    return 0


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _nothing(collection: Collection, include_unsealed: bool) -> int:
    """One line, then the exact command for each run that could be sealed."""
    found = f"no {'readable' if include_unsealed else 'sealed'} run in {printable(str(collection.output_root))}"
    commands = [item.command for item in collection.left_out if item.command]
    hint = "seal what you trust, or --include-unsealed" if commands else "rlk-repro run makes one"
    sys.stderr.write(f"rlk-repro: found {found}, expected at least one; hint: {hint}\n")
    for item in collection.left_out:
        sys.stderr.write(f"  {item.command}\n" if item.command else f"  {item.name}: {item.reason}\n")
    return 2


def _write_tables(folder: ReportFolder, collection: Collection) -> None:
    for table in tables.all_tables(collection):
        folder.write(f"tables/{table.name}.csv", tables.as_csv(table).encode())
        folder.write(f"tables/{table.name}.json", tables.as_json(table).encode())
        folder.write(f"tables/{table.name}.md", tables.as_markdown(table).encode())


def _write_page(folder: ReportFolder, collection: Collection) -> list[str]:
    """report.html; the names of packages that it lacks."""
    if not _has("jinja2"):
        return ["jinja2 (report.html)"]
    from rl_engine.report.page import render

    folder.write("report.html", render(collection).encode())
    return []


def _write_figures(folder: ReportFolder, collection: Collection) -> list[str]:
    """One PNG a figure of the newest experiments; the names of packages that they lack."""
    if not _has("matplotlib"):
        return ["matplotlib (figures/*.png)"]
    from rl_engine.report.charts import price_charts
    from rl_engine.report.page import MOST_EXPERIMENTS, experiment_charts
    from rl_engine.report.png import matrix_png, png

    for name, runs in list(collection.experiments.items())[:MOST_EXPERIMENTS]:
        for chart in experiment_charts(runs):
            folder.write(f"figures/{name}.{chart.key}.png", png(chart))
    for chart in price_charts(collection.prices):
        folder.write(f"figures/{chart.key}.png", png(chart))
    for matrix in collection.matrices:
        folder.write(f"figures/{matrix.matrix_id}.matrix.png", matrix_png(matrix))
    return []


def _summary(folder: ReportFolder, collection: Collection, missing: list[str]) -> dict[str, object]:
    page = folder.folder / "report.html"
    return {
        "report": str(page.resolve()) if "report.html" in folder.files else None,
        "folder": str(folder.folder.resolve()),
        "runs": [
            {
                "run_id": run.run_id,
                "mode": run.mode,
                "sealed": run.sealed,
                "tokens": run.tokens,
                "mismatches": run.mismatches,
            }
            for run in collection.runs
        ],
        "left_out": [{"name": item.name, "reason": item.reason} for item in collection.left_out],
        "missing": missing,
    }


def _say(
    folder: ReportFolder, collection: Collection, missing: list[str], body: dict[str, object], json_output: bool
) -> None:
    for item in collection.left_out:
        sys.stderr.write(f"left out: {item.name}: {item.reason}\n")
    if missing:
        sys.stderr.write(f"not written, for want of {' and '.join(missing)}; {EXTRA} brings them\n")
    if json_output:
        print(json.dumps({**body, "files": sorted(folder.files)}, indent=1))
    else:
        print(f"report: {body['report'] or folder.folder.resolve() / 'tables'}")
