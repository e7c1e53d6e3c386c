"""Reading of a run directory that may come from a stranger: bounded, strict, link-free, never writing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from rl_engine.numerics.digest import map_digest
from rl_engine.records import paths
from rl_engine.records.codec import RecordError, canonical_digest, decode, parse_json
from rl_engine.records.errors import UserError
from rl_engine.records.samples import decode_samples, split_lines
from rl_engine.records.types import (
    EnvironmentRecord,
    EventRecord,
    PassRecord,
    RouteFile,
    SampleBatch,
    StateRecord,
    StepRecord,
    ValidationRecord,
    WeightsRecord,
)

T = TypeVar("T")

_SAMPLES = re.compile(r"step-([0-9]{5,9})\.(safetensors|jsonl)")
_PASSES = re.compile(r"(.+?)(?:\.attempt-([1-9][0-9]{0,8}))?\.jsonl")
_WEIGHTS = re.compile(r"(0|[1-9][0-9]{0,8})\.json")
_NUMBERED = {kind: re.compile(rf"{kind}-([0-9]{{4,9}})\.json") for kind in ("environment", "validation")}


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """``plan.json``: the plan as the caller's JSON object, and its canonical digest (verified)."""

    digest: str
    plan: dict[str, Any]


class RunReader:
    """Everything in one run directory, decoded strictly on each call.

    Every method raises :class:`RecordError` for a missing, damaged, oversized or linked file. A last line without its
    end, which a crash or a writer at work leaves, is read past: :meth:`torn` tells of it.
    """

    def __init__(self, run_dir: Path | str) -> None:
        """Raises UserError unless ``run_dir`` is a directory with a ``plan.json``."""
        path = Path(run_dir)
        if not path.is_dir():
            raise UserError(f"{path}, which is no directory", "a run directory", "give the run_dir that `run` printed")
        self.run_dir = path.resolve()
        if not (self.run_dir / paths.PLAN).exists():
            raise UserError(f"no plan.json in {path}", "a run directory", "give the run_dir that `run` printed")

    @property
    def run_id(self) -> str:
        """The directory's own name."""
        return self.run_dir.name

    @property
    def sealed(self) -> bool:
        """Whether ``COMPLETE`` is there."""
        return (self.run_dir / paths.COMPLETE).exists()

    def files(self) -> list[str]:
        """Every file as a sorted relative path; links and special files are refused."""
        try:
            return paths.list_files(self.run_dir)
        except OSError as error:
            raise RecordError(f"{self.run_id}: {error.strerror}", "a readable run directory") from error

    def torn(self) -> dict[str, tuple[int, int]]:
        """(bytes of whole lines, bytes of a half-written one after them) of every file of lines that has one."""
        logs = [f"{paths.PASSES_DIR}/{name}" for name in self._folder(paths.PASSES_DIR)]
        names = [paths.STATE, paths.EVENTS, paths.STEPS, *logs]
        tails = {name: paths.torn_tail(self.run_dir, name) for name in names if (self.run_dir / name).exists()}
        return {name: tail for name, tail in tails.items() if tail[1]}

    def plan(self) -> PlanFile:
        """``plan.json`` with its digest checked."""
        record = decode(PlanFile, self._json(paths.PLAN), paths.PLAN)
        try:
            actual = canonical_digest(record.plan)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{paths.PLAN}: {error}", "a plan of plain JSON values") from error
        if actual != record.digest:
            raise RecordError(f"{paths.PLAN}: a plan of digest {actual}", f"{record.digest[:64]}, as recorded in it")
        return record

    def states(self) -> list[StateRecord]:
        """``state.jsonl`` in order."""
        return self._lines(StateRecord, paths.STATE)

    def events(self) -> list[EventRecord]:
        """``events.jsonl`` in order."""
        return self._lines(EventRecord, paths.EVENTS)

    def steps(self) -> list[StepRecord]:
        """``steps.jsonl`` in order."""
        return self._lines(StepRecord, paths.STEPS)

    def sample_steps(self) -> list[int]:
        """Steps that have a file in ``samples/``, sorted; a file of another name there is a RecordError."""
        found: dict[int, set[str]] = {}
        for name in self._folder(paths.SAMPLES_DIR):
            match = _SAMPLES.fullmatch(name)
            if match is None or paths.samples_name(int(match[1]), match[2]) != f"{paths.SAMPLES_DIR}/{name}":
                raise RecordError(f"samples/{name[:80]}", "step-NNNNN.safetensors and step-NNNNN.jsonl")
            found.setdefault(int(match[1]), set()).add(match[2])
        return sorted(found)

    def samples(self, step: int) -> SampleBatch:
        """The samples of a step."""
        tensors = paths.read_bounded(self.run_dir, paths.samples_name(step, "safetensors"), paths.TENSOR_LIMIT)
        lines = paths.read_bounded(self.run_dir, paths.samples_name(step, "jsonl"), paths.JSON_LIMIT)
        return decode_samples(step, tensors, lines, f"samples/step-{step:05d}")

    def routes(self) -> list[RouteFile]:
        """Every route file, by name."""
        return [record for _, record in self.attempt_routes()]

    def attempt_routes(self) -> list[tuple[int, RouteFile]]:
        """(attempt, its route file) of every route file, by name."""
        found = []
        for name in self._folder(paths.ROUTES_DIR):
            record = decode(RouteFile, self._json(f"{paths.ROUTES_DIR}/{name}"), f"routes/{name}")
            stem = f"{record.engine}-{record.rank}"
            match = re.fullmatch(re.escape(stem) + r"(\.attempt-([1-9][0-9]{0,8}))?\.json", name)
            if match is None:
                raise RecordError(f"routes/{name[:80]} of {stem[:80]}", "the worker that its name says")
            found.append((int(match[2] or 0), record))
        return found

    @property
    def logs_passes(self) -> bool:
        """Whether the run is one that logs its engines' passes: earlier versions did not."""
        return (self.run_dir / paths.PASSES_DIR).exists()

    def passes(self) -> dict[tuple[int, str], Iterator[PassRecord]]:
        """(attempt, engine) of every file in ``passes/``, with its lines, which are read as they are asked for."""
        found = {}
        for name in self._folder(paths.PASSES_DIR):
            match = _PASSES.fullmatch(name)
            if match is None:
                raise RecordError(f"passes/{name[:80]}", "<engine>.jsonl or <engine>.attempt-<number>.jsonl")
            found[int(match[2] or 0), match[1]] = self._passes(f"{paths.PASSES_DIR}/{name}")
        return found

    def _passes(self, name: str) -> Iterator[PassRecord]:
        lines = paths.read_lines(self.run_dir, name, paths.TENSOR_LIMIT, paths.LINE_LIMIT)
        for number, line in enumerate(lines, 1):
            yield decode(PassRecord, parse_json(line, f"{name} line {number}"), f"{name} line {number}")

    def weights(self) -> dict[int, WeightsRecord]:
        """Every weights file by version."""
        found = {}
        for name in self._folder(paths.WEIGHTS_DIR):
            match = _WEIGHTS.fullmatch(name)
            if match is None:
                raise RecordError(f"weights/{name[:80]}", "<version>.json")
            found[int(match[1])] = self.weights_version(int(match[1]))
        return dict(sorted(found.items()))

    def weights_version(self, version: int) -> WeightsRecord:
        """One weights file, its version and map digest checked."""
        name = paths.weights_name(version)
        record = decode(WeightsRecord, self._json(name), name)
        if record.version != version:
            raise RecordError(f"{name} of version {record.version}", str(version))
        if map_digest(record.tensors) != record.digest:
            raise RecordError(f"{name}: digest {record.digest[:64]}", map_digest(record.tensors))
        return record

    def environments(self) -> list[EnvironmentRecord]:
        """Every environment record in order of its number."""
        return [decode(EnvironmentRecord, self._json(name), name) for name in self._numbered("environment")]

    def validations(self) -> list[ValidationRecord]:
        """Every validation in order of its number."""
        return [decode(ValidationRecord, self._json(name), name) for name in self._numbered("validation")]

    def log_tail(self, limit: int = 65536) -> str:
        """The last ``limit`` bytes of ``run.log``, empty where there is none."""
        if not (self.run_dir / paths.LOG).exists():
            return ""
        with paths.open_regular(self.run_dir, paths.LOG) as descriptor, open(descriptor, "rb", closefd=False) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - limit))
            return file.read(limit).decode("utf-8", "replace")

    def _numbered(self, kind: str) -> list[str]:
        try:
            names = [entry.name for entry in self.run_dir.iterdir() if _NUMBERED[kind].fullmatch(entry.name)]
        except OSError as error:
            raise RecordError(f"{self.run_id}: {error.strerror}", "a readable run directory") from error
        return sorted(names, key=lambda name: (len(name), name))

    def _folder(self, folder: str) -> list[str]:
        # Temporary files of a write that a crash interrupted are no records.
        return [
            name
            for name in paths.list_folder(self.run_dir, folder)
            if not (name.startswith(".") and name.endswith(".partial"))
        ]

    def _json(self, name: str) -> Any:
        return parse_json(paths.read_bounded(self.run_dir, name, paths.JSON_LIMIT), name)

    def _lines(self, cls: type[T], name: str) -> list[T]:
        data = paths.read_bounded(self.run_dir, name, paths.JSON_LIMIT)
        lines = split_lines(data[: data.rfind(b"\n") + 1], name)
        return [
            decode(cls, parse_json(line, f"{name} line {number}"), f"{name} line {number}")
            for number, line in enumerate(lines, 1)
        ]
