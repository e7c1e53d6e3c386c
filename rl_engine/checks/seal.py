"""The seal: ``COMPLETE`` holds SHA-256 and size of every file, and one root over them that can be kept elsewhere."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

from rl_engine.checks.finding import Finding
from rl_engine.records import paths
from rl_engine.records.codec import RecordError, canonical_digest, decode, encode, parse_json
from rl_engine.records.errors import UserError
from rl_engine.records.files import write_exclusive
from rl_engine.records.reader import RunReader
from rl_engine.records.writer import RunWriter

SCHEMA = "rlkernel.seal.v1"
_BLOCK = 1 << 20
_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class SealedFile:
    """Content of one file."""

    sha256: str
    size: int


@dataclasses.dataclass(frozen=True)
class Seal:
    """``COMPLETE``. ``root`` is the canonical digest of ``files``."""

    schema: str
    root: str
    files: dict[str, SealedFile]


def seal_run(run_dir: Path) -> str:
    """Seal a run whose last state is ``valid``; returns the root.

    Raises:
        UserError: not valid, or sealed already.
    """
    writer = RunWriter.open(run_dir)
    try:
        # A state of `sealed` without COMPLETE is a seal that was interrupted.
        if writer.current_state not in ("valid", "sealed"):
            found = f"a run that is {writer.current_state}"
            raise UserError(found, "a valid run", f"rlk-repro validate --run-dir {run_dir}")
        writer.state("sealed")
        files = hash_files(writer.run_dir)
        seal = Seal(schema=SCHEMA, root=canonical_digest(encode(files)), files=files)
        write_exclusive(writer.run_dir / paths.COMPLETE, _render(seal), "seal")
    finally:
        writer.close()
    return seal.root


def hash_files(run_dir: Path) -> dict[str, SealedFile]:
    """SHA-256 and size of every regular file below ``run_dir`` but ``COMPLETE`` itself; links are refused."""
    found = {}
    for name in paths.list_files(run_dir):
        if name == paths.COMPLETE:
            continue
        hasher, size = hashlib.sha256(), 0
        with paths.open_regular(run_dir, name) as descriptor:
            while block := os.read(descriptor, _BLOCK):
                hasher.update(block)
                size += len(block)
        found[name] = SealedFile(sha256=hasher.hexdigest(), size=size)
    return found


def read_seal(run_dir: Path) -> Seal:
    """``COMPLETE``, exactly as :func:`seal_run` writes it and with a root that is its files'.

    Raises:
        RecordError: any other byte in it.
    """
    data = paths.read_bounded(run_dir, paths.COMPLETE, paths.JSON_LIMIT)
    seal = decode(Seal, parse_json(data, paths.COMPLETE), paths.COMPLETE)
    if seal.schema != SCHEMA:
        raise RecordError(f"{paths.COMPLETE} of schema {seal.schema[:40]!r}", SCHEMA)
    if canonical_digest(encode(seal.files)) != seal.root:
        raise RecordError(f"{paths.COMPLETE}: a root that is not its files'", "an unchanged COMPLETE")
    if data != _render(seal):
        raise RecordError(f"{paths.COMPLETE}: bytes that sealing does not write", "an unchanged COMPLETE")
    return seal


def verify_seal(run_dir: Path, expect_root: str | None = None) -> list[Finding]:
    """Hash everything again. One finding ``seal``, and ``root`` where ``expect_root`` is given."""
    run_dir = RunReader(run_dir).run_dir
    expected = "every file as it was sealed"
    try:
        seal = read_seal(run_dir)
        differences = _differences(seal.files, hash_files(run_dir))
    except RecordError as error:
        findings = [Finding("seal", "FAIL", error.found, expected, "restore the run from a copy")]
        return findings + ([_root_finding(None, expect_root)] if expect_root else [])
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        found = "; ".join(differences[:_SHOWN]) + more
        findings = [Finding("seal", "FAIL", found, expected, "restore the run from a copy")]
    else:
        findings = [Finding("seal", "PASS", f"{len(seal.files)} files, root {seal.root}", expected, "")]
    return findings + ([_root_finding(seal.root, expect_root)] if expect_root else [])


def _root_finding(root: str | None, expect_root: str) -> Finding:
    same = root is not None and root == expect_root.strip().lower()
    hint = "" if same else "this is not the run whose root you kept, or it was sealed again"
    return Finding("root", "PASS" if same else "FAIL", root or "no readable seal", expect_root[:100], hint)


def _differences(sealed: dict[str, SealedFile], actual: dict[str, SealedFile]) -> list[str]:
    """What happened to the files, in words; contents that only changed their names are said so."""
    removed, added = sorted(set(sealed) - set(actual)), sorted(set(actual) - set(sealed))
    changed = sorted(name for name in set(sealed) & set(actual) if sealed[name] != actual[name])
    words: list[str] = []
    for name in list(removed):
        twin = next((other for other in added if actual[other] == sealed[name]), None)
        if twin is not None:
            words.append(f"{name} renamed to {twin}")
            removed.remove(name)
            added.remove(twin)
    for name in list(changed):
        twin = next((o for o in changed if o > name and actual[o] == sealed[name] and actual[name] == sealed[o]), None)
        if twin is not None:
            words.append(f"{name} and {twin} swapped")
            changed.remove(name)
            changed.remove(twin)
    words += [f"{name} removed" for name in removed] + [f"{name} added" for name in added]
    for name in changed:
        before, after = sealed[name].size, actual[name].size
        words.append(f"{name} changed" if before == after else f"{name} changed ({before} bytes sealed, {after} now)")
    return words


def _render(seal: Seal) -> bytes:
    return (json.dumps(encode(seal), sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
