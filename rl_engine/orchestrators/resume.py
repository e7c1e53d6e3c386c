"""Runs that are already there: found by directory or id, and checked before they go on."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

from rl_engine.config.plan import Plan
from rl_engine.config.preflight import check_files
from rl_engine.orchestrators.actors import SOURCE_ROOT
from rl_engine.records.codec import decode
from rl_engine.records.environment import installed_versions
from rl_engine.records.errors import UserError
from rl_engine.records.lock import is_live
from rl_engine.records.pair import pair_path
from rl_engine.records.reader import RunReader
from rl_engine.records.sources import source_record

ARMS = ("native", "consistency")
_MODEL_FILES = (".json", ".jinja", ".txt", ".model")


@dataclasses.dataclass(frozen=True)
class Found:
    """One run, or the two of a pair (native first), with their plans. ``name`` is the run's or the pair's id."""

    name: str
    folder: Path
    readers: tuple[RunReader, ...]
    plans: tuple[Plan, ...]

    @property
    def path(self) -> Path:
        """What :func:`find` finds them by, from any working directory."""
        return self.folder / self.name


def find(run: str, output_root: Path | None) -> Found:
    """The run of a directory or id; for a pair's id both runs. An id is looked up below ``output_root``.

    Raises:
        UserError: nothing there, damaged records, or a directory that was moved or copied.
    """
    if not run.strip() or "\0" in run:
        raise UserError(f"run {run!r}", "a run directory or run id", "give the run_dir that `run` printed")
    bases = [Path(os.path.abspath(run))]
    if output_root is not None and os.sep not in run:
        bases.append(output_root / run)
    for base in bases:
        folders = [base] if (base / "plan.json").exists() else [base.with_name(f"{base.name}-{arm}") for arm in ARMS]
        if all((folder / "plan.json").exists() for folder in folders):
            return _found(base, folders)
    looked = " and ".join(map(str, bases))
    raise UserError(f"no run {run} (looked at {looked})", "a run directory, or the id of a run or pair", "check RUN")


def _found(base: Path, folders: list[Path]) -> Found:
    readers = tuple(RunReader(folder) for folder in folders)
    plans = []
    for reader in readers:
        plan = decode(Plan, reader.plan().plan, "plan.json")
        if not _same_place(plan.run_dir, reader.run_dir):
            raise UserError(
                f"{reader.run_dir} of a run that was made in {plan.run_dir}",
                "a run directory where it was made",
                "move it back: a run goes on only there",
            )
        plans.append(plan)
    return Found(base.name, base.parent.resolve(), readers, tuple(plans))


def _same_place(text: str, folder: Path) -> bool:
    try:
        return Path(text).resolve() == folder
    except (OSError, ValueError):  # a stranger's plan may name what is no path
        return False


def check_resumable(found: Found) -> None:
    """That these runs can go on with the bits of an uninterrupted run.

    Raises:
        UserError: finished, being written, of a stack that cannot, without its inputs, or begun with other software.
    """
    if all("finished" in {state.name for state in reader.states()} for reader in found.readers):
        pair = found.plans[0].pair_id
        unjudged = len(found.plans) == 2 and pair is not None and not pair_path(found.folder, pair).exists()
        if not unjudged:
            hint = f"rlk-repro validate {found.readers[-1].run_dir}"
            raise UserError(f"{found.name}, which has finished", "an interrupted run", hint)
    for reader, plan in zip(found.readers, found.plans, strict=True):
        if plan.stack != "builtin":
            raise UserError(
                f"{reader.run_id} of stack {plan.stack}", "a run of stack builtin", "that stack resumes its own runs"
            )
        if is_live(reader.run_dir):
            raise UserError(
                f"{reader.run_dir} being written by another process",
                "a run that no process works on",
                f"rlk-repro attach {reader.run_dir}, or rlk-repro stop",
            )
        check_files(plan)
        _check_software(reader)


def input_digests(plan: Plan) -> dict[str, str]:
    """SHA-256 of what a run reads besides its weights, which have digests of their own: prompts, and the model's
    configuration and tokenizer."""
    model = hashlib.sha256()
    for path in sorted(Path(plan.model_root).iterdir()):
        if path.suffix in _MODEL_FILES and path.is_file():
            model.update(f"{path.name}\0{_digest(path)}\0".encode())
    prompts = "generated" if plan.data.path is None else _digest(Path(plan.data.path))
    return {"prompts": prompts, "tokenizer": model.hexdigest()}


def check_inputs_unchanged(reader: RunReader, digests: dict[str, str]) -> None:
    """That an earlier attempt read the same files.

    Raises:
        UserError: it did not.
    """
    for event in reader.events():
        if event.kind == "inputs" and event.fields != digests:
            what = next((name for name in digests if event.fields.get(name) != digests[name]), "input")
            raise UserError(
                f"other {what} than {reader.run_id} began with", "the same files", "restore them, or start a new run"
            )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_software(reader: RunReader) -> None:
    """Same sources and versions as the attempts before: gates and bits both rest on it."""
    records = reader.environments()
    if not records:
        return
    now = source_record("rl_kernel", SOURCE_ROOT)
    for record in records:
        for source in record.sources:
            if source.name == now.name and source != now:
                earlier = f"{source.revision} {source.diff_hash or 'clean'}"
                raise UserError(
                    f"sources at {now.revision} {now.diff_hash or 'clean'}",
                    f"those that {reader.run_id} began with: {earlier}",
                    "check them out again, or start a new run",
                )
    versions, first = installed_versions(), records[0].versions
    for name in sorted(set(versions) | set(first)):
        if versions.get(name) != first.get(name):
            raise UserError(
                f"{name} {versions.get(name, 'not installed')}",
                f"{first.get(name, 'none')}, which {reader.run_id} began with",
                "install that version, or start a new run",
            )
