"""Validation of a run directory: every gate, the seal, and a rescore in a fresh process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from rl_engine.checks.finding import Finding
from rl_engine.checks.gates import GATES
from rl_engine.checks.gates.evidence import NOT_JUDGED, RunEvidence, run_gate
from rl_engine.checks.rescore import REDRAW, RESCORE, rescore_finding, rescore_findings, wanted_steps
from rl_engine.checks.seal import seal_run, verify_seal
from rl_engine.config.engines import EVIDENCE, SIDES
from rl_engine.records.codec import RecordError, encode
from rl_engine.records.environment import utc_now
from rl_engine.records.errors import UserError, printable
from rl_engine.records.reader import RunReader
from rl_engine.records.statistics import merge_statistics
from rl_engine.records.types import FindingRecord, Status, ValidationRecord
from rl_engine.records.writer import RunWriter

# A run in one of these states may still be written by its orchestrator: validation then only looks.
LIVE = ("planned", "running")

__all__ = ["LIVE", "conclusions", "judge", "main", "passed", "record_validation", "rescore_finding", "run_validation"]


def run_validation(run_dir: Path | str) -> list[Finding]:
    """Every gate on one run, in order; nothing is written.

    Raises:
        UserError: ``run_dir`` is not a run directory at all.
    """
    return _judge(RunEvidence(RunReader(run_dir)))


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What the gates say of one run's files, and in words what that shows and does not show."""

    findings: tuple[Finding, ...]
    certifies: tuple[str, ...]
    does_not_certify: tuple[str, ...]


def judge(reader: RunReader) -> Judgement:
    """Every gate on one run, as :func:`run_validation`; nothing is written."""
    evidence = RunEvidence(reader)
    findings = _judge(evidence)
    try:
        certifies, does_not = conclusions(evidence, findings)
    except RecordError as error:
        certifies, does_not = (), (f"anything: {error.found}",)
    return Judgement(tuple(findings), certifies, does_not)


def passed(findings: Sequence[Finding]) -> bool:
    """Whether no finding failed."""
    return all(finding.status != "FAIL" for finding in findings)


def record_validation(run_dir: Path | str, findings: Sequence[Finding]) -> Path:
    """Write ``validation-NNNN.json`` and the state ``valid`` or ``invalid``; returns the file's path.

    Raises:
        UserError: the run is sealed, still running, or too damaged to be written to.
    """
    return _record(RunEvidence(RunReader(run_dir)), findings)


def _record(evidence: RunEvidence, findings: Sequence[Finding]) -> Path:
    reader, states = evidence.reader, evidence.states
    if not states or states[-1].name in LIVE:
        name = states[-1].name if states else "without a state"
        raise UserError(f"a run that is {name}", "a run that ended", "wait for it, or `rlk-repro stop` it")
    writer = RunWriter.open(reader.run_dir)
    certifies, does_not = conclusions(evidence, findings)
    record = ValidationRecord(
        time=utc_now(),
        run_id=reader.run_id,
        plan_digest=evidence.plan_digest,
        passed=passed(findings),
        findings=tuple(FindingRecord(f.name, cast(Status, f.status), f.found, f.expected, f.hint) for f in findings),
        certifies=certifies,
        does_not_certify=does_not,
    )
    try:
        path = writer.validation(record)
        failed = [finding.name for finding in findings if finding.status == "FAIL"]
        writer.state("invalid" if failed else "valid", ", ".join(failed) or None)
    finally:
        writer.close()
    return path


def conclusions(evidence: RunEvidence, findings: Sequence[Finding]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``(certifies, does_not_certify)`` in plain words."""
    limits = [
        "other devices, software versions, models or topologies than those recorded",
        "that the model learns, or that its rewards are right",
        "who wrote these files: keep the root that sealing prints elsewhere, and compare with --expect-root",
    ]
    names = {finding.name: finding.status for finding in findings}
    again = {f.name: f.found for f in findings if f.name in (RESCORE, REDRAW) and f.status == "PASS"}
    if names.get("rescore") != "PASS":
        limits.append("that a fresh process computes the same logprobs from the recorded tokens (use --rescore)")
    elif evidence.plan.mode == "consistency":
        limits.append("logprobs and draws of the steps that no fresh process computed again")
    if names.get("evidence") == "WARN" or evidence.plan.evidence != "formal":
        limits.append("clean sources on a tested topology: this is not formal evidence")
    for side in SIDES:
        kinds = ", ".join(kind for kind in EVIDENCE[side] if not evidence.declares(side, kind))
        if kinds:
            name = printable(evidence.plan.engines.of(side)[:40])
            limits.append(f"what the {side} engine {name} does not declare: {kinds}")
    if not passed(findings):
        failed = ", ".join(name for name, status in names.items() if status == "FAIL")
        return (), ("anything: these gates failed: " + failed, *limits)
    total = merge_statistics(facts.summary for facts in evidence.facts)
    if evidence.plan.mode == "consistency":
        first = f"all {total.tokens_compared} response tokens have the same fp32 logprob bits in rollout and trainer"
    else:
        first = f"a native control: {total.mismatches} of {total.tokens_compared} logprobs differ in bits"
        limits.append("equality of rollout and trainer, which native mode does not aim at")
    scored = ", each scored by the trainer itself" if evidence.declares("train", "routes") else ""
    shown = [
        first,
        f"{len(evidence.steps)} steps of {evidence.plan.global_batch_size} samples{scored}",
    ]
    routed = [side for side in SIDES if evidence.declares(side, "routes")]
    if routed:
        where = "both sides" if len(routed) == 2 else f"the {routed[0]} side"
        shown.append(f"every planned operator ran through its planned provider on {where}, with measured calls")
    if evidence.declares("rollout", "weights"):
        shown.append("every rollout rank loaded exactly the bits that the trainer exported, version by version")
    shown += [f"a fresh process computed the same bits from the recorded tokens: {text}" for text in again.values()]
    return tuple(shown), tuple(limits)


def main(
    run_dir: Path | str,
    *,
    seal: bool = False,
    rescore: bool | str | int | None = None,
    expect_root: str | None = None,
    json_output: bool = False,
) -> int:
    """The verb ``validate``: print every finding, write what may be written, seal when asked; returns 0 or 1.

    ``rescore`` True (or ``chosen``) means the step that the records' digest chooses, ``all`` every step whose weights
    are there, a number that step. A sealed run is only read.

    Raises:
        UserError: no run directory, or a step of which the weights are not there.
    """
    reader = RunReader(run_dir)
    wanted = "chosen" if rescore is True else rescore
    if wanted is not None and wanted is not False:
        wanted_steps(reader, wanted)
    evidence = RunEvidence(reader, sealing=seal)
    findings = _judge(evidence)
    if wanted is not None and wanted is not False:
        findings += rescore_findings(run_dir, wanted)
    if reader.sealed:
        findings += verify_seal(reader.run_dir, expect_root)
    elif expect_root and not seal:
        findings.append(Finding("root", "FAIL", "not sealed", expect_root[:100], "add --seal"))
    root, written = "", ""
    if not reader.sealed:
        try:
            written = str(_record(evidence, findings))
        except (UserError, OSError) as error:
            findings.append(Finding("recording", "WARN", f"{error}"[:300], "a run that can be written to", ""))
        if seal:
            root = _seal(reader.run_dir, findings, written, expect_root)
    _print(evidence, findings, root, written, json_output)
    return 0 if passed(findings) else 1


def _judge(evidence: RunEvidence) -> list[Finding]:
    findings: list[Finding] = []
    failed: set[str] = set()
    for gate in GATES:
        finding = run_gate(gate, evidence, failed)
        # Not judged counts as failed for what builds on it.
        if finding.status == "FAIL" or finding.found.startswith(NOT_JUDGED):
            failed.add(gate.name)
        findings.append(finding)
    return findings


def _seal(run_dir: Path, findings: list[Finding], written: str, expect_root: str | None) -> str:
    """Seal a run that passed; appends what came of it to ``findings`` and returns the root."""
    expected = "a valid run, sealed"
    if not passed(findings) or not written:
        findings.append(Finding("seal", "FAIL", "not sealed", expected, "repair the failed gates first"))
        return ""
    try:
        root = seal_run(run_dir)
    except (UserError, OSError) as error:
        findings.append(Finding("seal", "FAIL", str(error)[:300], expected, ""))
        return ""
    findings += verify_seal(run_dir, expect_root)
    return root


def _print(evidence: RunEvidence, findings: Sequence[Finding], root: str, written: str, json_output: bool) -> None:
    try:
        certifies, does_not = conclusions(evidence, findings)
    except RecordError as error:
        certifies, does_not = (), (f"anything: {error.found}",)
    if json_output:
        body = {
            "run_dir": str(evidence.reader.run_dir),
            "passed": passed(findings),
            "findings": [encode(finding) for finding in findings],
            "certifies": list(certifies),
            "does_not_certify": list(does_not),
            "validation": written or None,
            "root": root or None,
        }
        print(json.dumps(body, indent=1))
        return
    blocked = [finding.name for finding in findings if finding.found.startswith(NOT_JUDGED)]
    for finding in findings:
        if finding.name in blocked:
            continue
        print(f"[{finding.status}] {finding.name}: found {finding.found}, expected {finding.expected}")
        if finding.status != "PASS" and finding.hint:
            print(f"       hint: {finding.hint}")
    if blocked:
        print(f"[WARN] {NOT_JUDGED} for the failures above: {', '.join(blocked)}")
    for title, lines in (("certifies", certifies), ("does not certify", does_not)):
        for line in lines:
            print(f"{title}: {line}")
    if root:
        print(f"root: {root}")
