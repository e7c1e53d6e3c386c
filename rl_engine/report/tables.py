"""The report's tables and their three spellings: CSV, JSON and Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence

from rl_engine.config.options import FUSED_OPERATORS
from rl_engine.records.codec import encode, printable
from rl_engine.records.matrix import MatrixRecord
from rl_engine.records.types import StepRecord, StepSeconds
from rl_engine.report.collect import Collection, RunView
from rl_engine.report.numbers import shown
from rl_engine.report.prices import PriceRow, Prices

Cell = str | int | float | bool | None
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run a text that starts with one of these
_STEP = tuple(field.name for field in dataclasses.fields(StepRecord) if field.name != "seconds")
_SECONDS = tuple(field.name for field in dataclasses.fields(StepSeconds))


@dataclasses.dataclass(frozen=True)
class Table:
    """One table. ``name`` becomes the file's name; rows are as long as ``columns``."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def all_tables(collection: Collection) -> list[Table]:
    """Every table that has rows."""
    runs = collection.runs
    found = [
        runs_table(runs),
        steps_table(runs),
        gates_table(runs),
        providers_table(runs),
        environments_table(runs),
        matrix_table(collection.matrices),
        prices_table(collection.prices),
        left_out_table(collection),
    ]
    return [table for table in found if table.rows]


def total_seconds(step: StepRecord) -> float:
    """Wall-clock seconds of a step."""
    return math.fsum(dataclasses.astuple(step.seconds))


def mean_abs(run: RunView) -> float:
    """Mean |train - rollout| over all tokens of a run."""
    return math.fsum(s.mean_abs_dlogp * s.tokens_compared for s in run.steps) / run.tokens if run.tokens else 0.0


def step_seconds(run: RunView) -> float:
    """Mean seconds of a step; NaN without one."""
    return math.fsum(map(total_seconds, run.steps)) / len(run.steps) if run.steps else math.nan


def rollout_speed(run: RunView) -> float:
    """Response tokens per second of generation, all ranks together; NaN without a step."""
    seconds = math.fsum(step.seconds.rollout for step in run.steps)
    return run.tokens / seconds if seconds > 0 else math.nan


def reward_mean(run: RunView) -> float:
    """Mean reward over the steps; NaN without one."""
    return math.fsum(step.reward_mean for step in run.steps) / len(run.steps) if run.steps else math.nan


def topology_words(run: RunView) -> str:
    """``TP2 CP1 -> 2 x TP1 CP1``: training, then rollout engines."""
    t = run.plan.topology
    return f"TP{t.train_tp} CP{t.train_cp} -> {t.rollout_engines} x TP{t.rollout_tp} CP{t.rollout_cp}"


def verdict_word(run: RunView) -> str:
    """``valid`` or ``invalid`` as the gates judge the files now; ``not finished`` where they cannot yet."""
    if not run.findings:
        return "not finished"
    return "invalid" if any(finding.status == "FAIL" for finding in run.findings) else "valid"


def runs_table(runs: Sequence[RunView]) -> Table:
    """One row a run."""
    columns = ("run", "mode", "sealed", "validation", "evidence", "profile", "topology", "device", "steps", "tokens")
    columns += ("mismatches", "max_abs_dlogp", "mean_abs_dlogp", "reward_mean", "rollout_tokens_per_s")
    columns += ("seconds_per_step", "peak_bytes", "started", "plan_digest", "seal_root")
    rows = [
        (
            run.run_id,
            run.mode,
            run.sealed,
            verdict_word(run),
            run.plan.evidence,
            run.plan.profile,
            topology_words(run),
            device_words(run),
            len(run.steps),
            run.tokens,
            run.mismatches,
            max((step.max_abs_dlogp for step in run.steps), default=0.0),
            mean_abs(run),
            reward_mean(run),
            rollout_speed(run),
            step_seconds(run),
            run.peak_bytes,
            run.started,
            run.plan_digest,
            run.root or None,
        )
        for run in runs
    ]
    return Table("runs", "Runs", columns, tuple(rows))


def device_words(run: RunView) -> str:
    """Devices of the run's workers, each once."""
    devices = [record.device for record in run.environments if record.role != "driver"]
    return ", ".join(dict.fromkeys(devices)) or "not recorded"


def steps_table(runs: Sequence[RunView]) -> Table:
    """Every column of every ``steps.jsonl``."""
    columns = ("run", "mode", *_STEP, *(f"seconds_{name}" for name in _SECONDS))
    rows = [
        (
            run.run_id,
            run.mode,
            *(getattr(step, name) for name in _STEP),
            *(getattr(step.seconds, name) for name in _SECONDS),
        )
        for run in runs
        for step in run.steps
    ]
    return Table("steps", "Steps", columns, tuple(rows))


def gates_table(runs: Sequence[RunView]) -> Table:
    """Every gate of each run, judged for this report, or as recorded by the run's last validation."""
    columns = ("run", "mode", "gate", "status", "judged", "found", "expected", "hint")
    rows = [
        (run.run_id, run.mode, f.name, f.status, "as recorded" if f.recorded else "here", f.found, f.expected, f.hint)
        for run in runs
        for f in run.findings
    ]
    return Table("gates", "Gates", columns, tuple(rows))


def providers_table(runs: Sequence[RunView]) -> Table:
    """Measured calls by run, side, operator and provider, summed over workers."""
    columns = ("run", "mode", "side", "operator", "provider", "planned", "dtype", "execution", "workers", "calls")
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        planned = {"train": dict(run.plan.providers.train), "rollout": dict(run.plan.providers.rollout)}
        found: dict[tuple[str, ...], tuple[int, set[tuple[str, int]]]] = {}
        for file in run.routes:
            for route in file.routes:
                key = (route.side, route.operator, route.provider, route.dtype, route.execution)
                calls, workers = found.get(key, (0, set()))
                found[key] = (calls + route.calls, workers | {(file.engine, file.rank)})
        for (side, operator, provider, dtype, execution), (calls, workers) in sorted(found.items()):
            parts = FUSED_OPERATORS.get(operator, (operator,))
            plan = ", ".join(sorted({planned[side].get(part, "nothing") for part in parts}))
            rows.append((run.run_id, run.mode, side, operator, provider, plan, dtype, execution, len(workers), calls))
    return Table("providers", "Providers that ran", columns, tuple(rows))


def environments_table(runs: Sequence[RunView]) -> Table:
    """Where each process ran, at its start."""
    columns = ("run", "role", "engine", "rank", "host", "device", "driver", "python", "torch", "threads", "contract")
    columns += ("source", "dirty", "peak_bytes", "peak_device_bytes")
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        peaks = {
            (event.fields.get("engine"), event.fields.get("rank")): event.fields
            for event in run.events
            if event.kind == "worker_memory"
        }
        for record in run.environments:
            peak = peaks.get((record.engine, record.rank), {})
            if record.phase != "start":
                continue
            source = next((item for item in record.sources if item.name == "rl_kernel"), None)
            rows.append(
                (
                    run.run_id,
                    record.role,
                    record.engine,
                    record.rank,
                    record.host,
                    record.device,
                    record.driver,
                    record.python,
                    record.versions.get("torch"),
                    record.threads.intra_op if record.threads else None,
                    record.contract_id,
                    source.revision if source else None,
                    source.dirty if source else None,
                    *(
                        size if isinstance(size, int) else None
                        for size in (peak.get("peak_pss_bytes"), peak.get("peak_device_bytes"))
                    ),
                )
            )
    return Table("environments", "Machines and versions", columns, tuple(rows))


def matrix_table(matrices: Sequence[MatrixRecord]) -> Table:
    """Every cell of every topology matrix."""
    columns = ("matrix", "name", "train_tp", "train_cp", "rollout_tp", "rollout_cp", "rollout_engines", "native")
    columns += ("status", "run", "steps", "tokens", "mismatches", "detail")
    rows = [
        (
            matrix.matrix_id,
            matrix.name,
            cell.train_tp,
            cell.train_cp,
            cell.rollout_tp,
            cell.rollout_cp,
            cell.rollout_engines,
            cell.native,
            cell.status,
            cell.run_id,
            cell.steps,
            cell.tokens_compared,
            cell.mismatches,
            cell.detail,
        )
        for matrix in matrices
        for cell in matrix.cells
    ]
    return Table("matrix", "Topology matrix", columns, tuple(rows))


def prices_table(prices: Prices) -> Table:
    """Every contestant of every case; ``speed`` is times as fast as ``against``."""
    columns = tuple(field.name for field in dataclasses.fields(PriceRow))
    return Table("prices", "Price list", columns, tuple(dataclasses.astuple(row) for row in prices.rows))


def left_out_table(collection: Collection) -> Table:
    """What is in the output root and not in the report."""
    rows = tuple((item.name, item.reason, item.command) for item in collection.left_out)
    return Table("left-out", "Not in this report", ("name", "reason", "command"), rows)


# -- spellings


def as_csv(table: Table) -> str:
    """RFC 4180 with full precision. A text that a spreadsheet would take for a formula gets a leading quote."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(table.columns)
    for row in table.rows:
        writer.writerow(["" if cell is None else _plain(cell) for cell in row])
    return out.getvalue()


def _plain(cell: Cell) -> Cell:
    if isinstance(cell, str):
        return "'" + cell if cell.startswith(_FORMULA) else cell
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return repr(cell) if isinstance(cell, float) else cell


def as_json(table: Table) -> str:
    """A list of objects in the records' codec: floats in full, NaN and infinities as strings."""
    rows = [dict(zip(table.columns, map(encode, row), strict=True)) for row in table.rows]
    return json.dumps({"table": table.name, "title": table.title, "rows": rows}, indent=1, allow_nan=False) + "\n"


def as_markdown(table: Table) -> str:
    """A pipe table with rounded numbers; texts cannot break out of their cell or become markup."""
    lines = [f"## {table.title}", "", _row(table.columns), _row(["---"] * len(table.columns))]
    lines += [_row([_word(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _word(cell: Cell) -> str:
    if cell is None:
        return ""
    if not isinstance(cell, str):
        return shown(cell)
    text = printable(cell).replace("\\", "\\\\")
    for letter in "|`*_<>[]#":
        text = text.replace(letter, "\\" + letter)
    return text.replace("&", "&amp;")
