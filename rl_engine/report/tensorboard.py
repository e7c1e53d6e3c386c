"""Steps as TensorBoard scalars, for people who keep all their runs there. Opt-in: the package is no dependency."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_engine.records.errors import UserError
from rl_engine.records.types import StepRecord
from rl_engine.report.collect import RunView
from rl_engine.report.tables import total_seconds

SKIPPED = ("step", "seconds", "grad_norm_hex")


def write_events(folder: Path, runs: Sequence[RunView]) -> None:
    """One sub-folder a run, replaced as a whole; the wall time of a step is the run's start plus its steps' seconds.

    Raises:
        UserError: a link, or files that are no event files, where a run's folder should be.
        ImportError: tensorboard is not installed.
    """
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for run in runs:
        target = folder / run.run_id
        _clear(target)
        writer = EventFileWriter(str(target))
        time = _start(run)
        for step in run.steps:
            time += total_seconds(step)
            writer.add_event(_event(step, time))
        writer.close()


def _clear(target: Path) -> None:
    """Removes the event files of an earlier report."""
    for path in (target.parent, target):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise UserError(f"{path.name}, which is no folder", "a folder of the report", "remove it")
    target.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if not path.name.startswith("events.out.tfevents") or path.is_symlink() or not path.is_file():
            raise UserError(f"{path.name} in {target.name}", "event files only", "remove it")
        path.unlink()


def _start(run: RunView) -> float:
    try:
        return datetime.datetime.fromisoformat(run.started).timestamp()
    except ValueError:
        return 0.0


def _event(step: StepRecord, time: float) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    columns = [field.name for field in dataclasses.fields(step) if field.name not in SKIPPED]
    values = {name: float(getattr(step, name)) for name in columns}
    values |= {f"seconds/{name}": value for name, value in dataclasses.asdict(step.seconds).items()}
    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return Event(wall_time=time, step=step.step, summary=summary)
