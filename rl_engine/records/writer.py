"""Writing of a run directory: exclusive creation, append-only, flushed step by step, closed by the seal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from rl_engine.numerics.digest import map_digest
from rl_engine.records import kept as kept_weights
from rl_engine.records import paths
from rl_engine.records.codec import RecordError, canonical_digest, canonical_json, encode
from rl_engine.records.environment import utc_now
from rl_engine.records.errors import UserError
from rl_engine.records.files import append_durable, cut_torn_tail, require_folder, write_atomic, write_exclusive
from rl_engine.records.lock import RunLock, being_written
from rl_engine.records.private import FOLDER_MODE, check_place
from rl_engine.records.process import living, process_fields
from rl_engine.records.reader import RunReader
from rl_engine.records.redact import redact_text, redact_variables, secret_values
from rl_engine.records.samples import encode_samples
from rl_engine.records.types import (
    STATE_NAMES,
    EnvironmentRecord,
    EventRecord,
    EventValue,
    PassRecord,
    RouteFile,
    RouteRecord,
    SampleBatch,
    StateName,
    StateRecord,
    StepRecord,
    ValidationRecord,
    WeightsRecord,
)

_END: frozenset[str] = frozenset({"failed", "interrupted"})
# What may follow each state; None stands for a new run.
TRANSITIONS: dict[str | None, frozenset[str]] = {
    None: frozenset({"planned"}),
    "planned": frozenset({"running"}) | _END,
    "running": frozenset({"finished"}) | _END,
    "failed": frozenset({"running", "invalid"}),
    "interrupted": frozenset({"running", "failed", "invalid"}),
    "finished": frozenset({"valid", "invalid"}),
    "valid": frozenset({"valid", "invalid", "sealed"}),
    "invalid": frozenset({"valid", "invalid", "running"}),
    # Without COMPLETE, sealing was interrupted: the run is open again.
    "sealed": frozenset({"valid", "invalid"}),
}
SILENT_END = "its process ended without a word"
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")


class RunWriter:
    """The one writer of a run directory; not shared between processes.

    It holds the directory's lock from creation until the run ends (``finished``, ``failed``, ``interrupted``) or
    :meth:`close`.

    A step counts as finished when its line is in ``steps.jsonl``: call :meth:`samples` and :meth:`weights` first and
    :meth:`step` last. Any OSError (a full disk) leaves every earlier line and file intact.
    """

    def __init__(
        self, run_dir: Path, plan_digest: str, states: Sequence[StateRecord], next_step: int, lock: RunLock
    ) -> None:
        self.run_dir = run_dir
        self.plan_digest = plan_digest
        self._state: str | None = states[-1].name if states else None
        self._attempts = sum(record.name == "running" for record in states)
        self._next_step = next_step
        self._lock = lock

    @classmethod
    def create(cls, run_dir: Path, plan_json: Mapping[str, Any] | str, plan_digest: str) -> RunWriter:
        """Make a new run directory with ``plan.json`` and the state ``planned``.

        Args:
            run_dir: must not exist; its last component must be a valid run id. Parents are made. Only this user may
                enter it, since samples are texts.
            plan_json: the plan as a JSON object (parsed, or its text).
            plan_digest: ``codec.canonical_digest`` of that object.

        Raises:
            UserError: the directory exists, its name is not one plain path component, or another user laid a folder
                above it where everyone may write.
            ValueError: the digest is not the plan's.
        """
        body = json.loads(plan_json) if isinstance(plan_json, str) else dict(plan_json)
        if canonical_digest(body) != plan_digest:
            raise ValueError(f"plan digest {plan_digest} is not the canonical digest {canonical_digest(body)}")
        run_dir = Path(os.path.abspath(run_dir))
        paths.check_component(run_dir.name, "run id")
        check_place(run_dir)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        try:
            run_dir.mkdir(FOLDER_MODE)
        except FileExistsError:
            raise UserError(
                f"{run_dir} already there", "a run directory that does not exist yet", "choose another --run-id"
            ) from None
        for folder in (paths.SAMPLES_DIR, paths.ROUTES_DIR, paths.WEIGHTS_DIR, paths.PASSES_DIR):
            (run_dir / folder).mkdir(FOLDER_MODE)
        lock = RunLock(run_dir)
        lock.acquire()
        writer = cls(run_dir, plan_digest, (), 0, lock)
        for name in (paths.EVENTS, paths.STEPS, paths.LOG):
            append_durable(run_dir / name, b"")
        writer.state("planned")
        # Last: a folder without a plan is no run directory yet, so a crash in here leaves none that is incomplete.
        stored = json.dumps({"digest": plan_digest, "plan": body}, sort_keys=True, indent=1, allow_nan=False)
        write_exclusive(run_dir / paths.PLAN, (stored + "\n").encode(), "plan")
        return writer

    @classmethod
    def open(cls, run_dir: Path, *, repair: bool = False) -> RunWriter:
        """Continue an existing run.

        Args:
            repair: a line torn by a crash is cut off, and recorded as an event. For who goes on with the run; whoever
                only looks leaves it as it is.

        Raises:
            UserError: no run directory, a sealed one, one with damaged records, one being written by a process, or one
                with a torn line that is to stay.
        """
        reader = RunReader(run_dir)
        if reader.sealed:
            raise _sealed(reader.run_dir)
        # Before any repair: the torn line of a live run is a line being written.
        lock = RunLock(reader.run_dir)
        lock.acquire()
        try:
            if not lock.held and _works(reader):
                raise being_written(reader.run_dir)
            if not repair and (torn := reader.torn()):
                raise UserError(torn_words(torn), "whole lines", "`run --resume` or `stop` removes them")
            return cls._repaired(reader, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def take_over(
        cls, run_dir: Path, end: Literal["interrupted", "failed"] = "interrupted", reason: str = SILENT_END
    ) -> RunWriter:
        """Continue an unfinished run whose process is gone: what a crash left half-written is removed, and a run that
        had no time to say how it ended gets ``end`` and ``reason``.

        Raises:
            UserError: as :meth:`open`, or a run that has finished.
        """
        writer = cls.open(run_dir, repair=True)
        try:
            if "finished" in {record.name for record in RunReader(run_dir).states()}:
                raise UserError(f"a run that is {writer._state}", "an unfinished run", "rlk-repro validate judges it")
            kept = (kept_weights.FOLDER,) if (writer.run_dir / kept_weights.FOLDER).exists() else ()
            for folder in (".", paths.SAMPLES_DIR, paths.ROUTES_DIR, paths.WEIGHTS_DIR, *kept):
                for entry in (writer.run_dir / folder).iterdir():
                    if entry.name.startswith(".") and entry.name.endswith(".partial"):
                        entry.unlink()
            if writer._state == "running":
                writer._set_state(end, reason)
        except BaseException:
            writer.close()
            raise
        return writer

    @classmethod
    def _repaired(cls, reader: RunReader, lock: RunLock) -> RunWriter:
        for folder in (paths.SAMPLES_DIR, paths.ROUTES_DIR, paths.WEIGHTS_DIR):
            require_folder(reader.run_dir / folder)
        torn = {name: cut_torn_tail(reader.run_dir / name) for name in reader.torn()}
        writer = cls(reader.run_dir, reader.plan().digest, reader.states(), len(reader.steps()), lock)
        for name, removed in torn.items():
            writer.event("torn_line_removed", file=name, bytes=removed)
        return writer

    @property
    def log_path(self) -> Path:
        """``run.log``; text goes through :meth:`log`, which redacts, or through ``redact.redact_text``."""
        return self.run_dir / paths.LOG

    @property
    def current_state(self) -> str | None:
        """The last state written."""
        return self._state

    @property
    def attempts(self) -> int:
        """How often the run has begun to run."""
        return self._attempts

    @property
    def next_step(self) -> int:
        """The first step without a line in ``steps.jsonl``."""
        return self._next_step

    def state(self, name: str, reason: str | None = None) -> None:
        """Append a state; only the transitions of ``TRANSITIONS`` are possible, repeating the present one is silent."""
        if name not in STATE_NAMES:
            raise ValueError(f"unknown state {name!r}")
        if name == self._state and name not in ("valid", "invalid"):
            return
        if name not in TRANSITIONS[self._state]:
            raise ValueError(f"a run that is {self._state} cannot become {name}")
        if name == "running":
            self._lock.acquire()
        self._set_state(name, reason)
        if name in _END or name == "finished":
            self.close()
        elif name == "running":
            self._attempts += 1
            number, fields = self._attempts - 1, process_fields()
            self.event("attempt", number=number, next_step=self._next_step, passes=True, scoring=True, **fields)

    def _set_state(self, name: str, reason: str | None) -> None:
        text = None if reason is None else redact_text(reason, secret_values())
        self._append(paths.STATE, StateRecord(time=utc_now(), name=cast(StateName, name), reason=text))
        self._state = name

    def close(self) -> None:
        """Give the directory's lock back."""
        self._lock.release()

    def event(self, kind: str, **fields: EventValue | list[Any]) -> None:
        """Append a typed event; text values are redacted."""
        if not _KIND.fullmatch(kind):
            raise ValueError(f"event kind {kind!r} is not a lower-case identifier")
        clean = {name: _clean(value) for name, value in fields.items()}
        self._append(paths.EVENTS, EventRecord(time=utc_now(), kind=kind, fields=clean))

    def log(self, text: str) -> None:
        """Append text to ``run.log`` with secrets removed; not fsynced."""
        self._check_open()
        clean = redact_text(text if text.endswith("\n") else text + "\n", secret_values())
        append_durable(self.log_path, clean.encode("utf-8", "backslashreplace"), sync=False)

    def step(self, record: StepRecord) -> None:
        """Append a finished step, durably. Steps come in order, each with its samples already written."""
        if record.step != self._next_step:
            raise ValueError(f"step {record.step} where {self._next_step} is next")
        if not (self.run_dir / paths.samples_name(record.step, "safetensors")).exists():
            raise ValueError(f"step {record.step} has no samples yet")
        self._append(paths.STEPS, record)
        self._next_step += 1

    def samples(self, step: int, batch: SampleBatch) -> None:
        """Write the samples of the step in progress; an unfinished attempt is replaced, a finished step never."""
        self._check_open()
        if step != self._next_step:
            raise ValueError(f"samples of step {step} where {self._next_step} is next")
        tensors, lines = encode_samples(step, batch)
        write_atomic(self.run_dir / paths.samples_name(step, "jsonl"), lines)
        write_atomic(self.run_dir / paths.samples_name(step, "safetensors"), tensors)

    def routes(self, engine: str, rank: int, records: Sequence[RouteRecord]) -> None:
        """Write what one worker counted so far; the counts grow with this attempt's steps, every attempt has its own
        file."""
        self._check_open()
        body = RouteFile(plan_digest=self.plan_digest, engine=engine, rank=rank, routes=tuple(records))
        attempt = max(self._attempts - 1, 0)
        write_atomic(self.run_dir / paths.routes_name(engine, rank, attempt), _document(body))

    def passes(self, engine: str, records: Sequence[PassRecord]) -> None:
        """Append what one rollout engine's scheduler did; every attempt has its own file."""
        self._check_open()
        name = paths.passes_name(engine, max(self._attempts - 1, 0))
        lines = "".join(canonical_json(encode(record)) + "\n" for record in records)
        append_durable(self.run_dir / name, lines.encode())

    def confirm(self, record: StepRecord, batch: SampleBatch) -> None:
        """Compare a finished step that was computed again with what is recorded of it; only times may differ.

        Raises:
            RecordError: another sample, logprob or sum.
        """
        reader = RunReader(self.run_dir)
        untimed = dict.fromkeys(("seconds", "train_tokens_per_s", "rollout_tokens_per_gpu_s"))
        earlier, now = (encode(step) | untimed for step in (reader.steps()[record.step], record))
        tensors, lines = encode_samples(record.step, batch)
        differing = [name for name in now if now[name] != earlier[name]]
        if encode_samples(record.step, reader.samples(record.step)) != (tensors, lines):
            differing.insert(0, "samples")
        if differing:
            raise RecordError(
                f"step {record.step} computed again with other {', '.join(differing)[:200]}",
                "the recorded bits",
                "the resumed run left the recorded path; start a new run",
            )

    def weights(self, version: int, digests: Mapping[str, str]) -> str:
        """Write the digests of one version; returns the digest of the map.

        Raises:
            RecordError: the version is already there with other digests (a resumed run that took another path).
        """
        self._check_open()
        record = WeightsRecord(version=version, digest=map_digest(digests), tensors=dict(digests))
        if (self.run_dir / paths.weights_name(version)).exists():
            earlier = RunReader(self.run_dir).weights_version(version)
            if earlier != record:
                raise RecordError(
                    f"weights {version} with digest {record.digest}",
                    f"{earlier.digest}, recorded earlier",
                    "the resumed run left the recorded path; start a new run",
                )
            return record.digest
        write_exclusive(self.run_dir / paths.weights_name(version), _document(record), "weights file")
        return record.digest

    def environment(self, record: EnvironmentRecord) -> None:
        """Write the next ``environment-NNNN.json``; variables pass the allow-list again, whoever collected them."""
        body = encode(record)
        body["variables"] = redact_variables(record.variables)
        self._numbered("environment", body)

    def validation(self, record: ValidationRecord) -> Path:
        """Write the next ``validation-NNNN.json`` and return its path."""
        return self._numbered("validation", encode(record))

    def _numbered(self, kind: str, body: Any) -> Path:
        self._check_open()
        number = 0
        while (self.run_dir / paths.numbered_name(kind, number)).exists():
            number += 1
        path = self.run_dir / paths.numbered_name(kind, number)
        write_exclusive(path, _document(body), f"{kind} file")
        return path

    def _append(self, name: str, record: Any) -> None:
        self._check_open()
        append_durable(self.run_dir / name, (canonical_json(encode(record)) + "\n").encode())

    def _check_open(self) -> None:
        if (self.run_dir / paths.COMPLETE).exists():
            raise _sealed(self.run_dir)


def torn_words(torn: Mapping[str, tuple[int, int]]) -> str:
    """What ``RunReader.torn`` found."""
    return ", ".join(f"{name}: {tail} bytes after its last whole line" for name, (_, tail) in torn.items())


def _works(reader: RunReader) -> bool:
    """Whether the process of the last attempt lives and has not said that it ended: all that can be asked where a file
    system has no locks."""
    begun = [event.fields for event in reader.events() if event.kind == "attempt"]
    open_ = reader.states()[-1:] and reader.states()[-1].name in ("planned", "running")
    return bool(open_ and begun and begun[-1].get("pid") != os.getpid() and living(begun[-1]))


def _sealed(run_dir: Path) -> UserError:
    return UserError(f"{run_dir} sealed (COMPLETE is there)", "a run still open for writing", "start a new run")


def _document(record: Any) -> bytes:
    return (json.dumps(encode(record), sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _clean(value: Any) -> EventValue:
    if isinstance(value, str):
        return redact_text(value, secret_values())
    if isinstance(value, (list, tuple)):
        return tuple(redact_text(item, secret_values()) if isinstance(item, str) else item for item in value)
    return cast(EventValue, value)
