"""Validation of a run directory: every gate, the seal, and a rescore in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from rl_engine.checks.finding import Finding
from rl_engine.checks.gates import GATES
from rl_engine.checks.gates.evidence import NOT_JUDGED, RunEvidence, locate, run_gate
from rl_engine.checks.seal import seal_run, verify_seal
from rl_engine.numerics.bits import compare_bits
from rl_engine.records import paths
from rl_engine.records.codec import RecordError, encode
from rl_engine.records.environment import utc_now
from rl_engine.records.errors import UserError
from rl_engine.records.reader import RunReader
from rl_engine.records.samples import check_arrays, load_tensors
from rl_engine.records.statistics import merge_statistics
from rl_engine.records.types import FindingRecord, Status, ValidationRecord
from rl_engine.records.writer import RunWriter

# A run in one of these states may still be written by its orchestrator: validation then only looks.
_LIVE = ("planned", "running")
_RESCORE_SECONDS = 6 * 3600
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def run_validation(run_dir: Path | str) -> list[Finding]:
    """Every gate on one run, in order; nothing is written.

    Raises:
        UserError: ``run_dir`` is not a run directory at all.
    """
    return _judge(RunEvidence(RunReader(run_dir)))


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
    if not states or states[-1].name in _LIVE:
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
    if names.get("rescore") != "PASS":
        limits.append("that a fresh process computes the same logprobs from the recorded tokens (use --rescore)")
    if names.get("evidence") == "WARN" or evidence.plan.evidence != "formal":
        limits.append("clean sources on a tested topology: this is not formal evidence")
    if not passed(findings):
        failed = ", ".join(name for name, status in names.items() if status == "FAIL")
        return (), ("anything: these gates failed: " + failed, *limits)
    total = merge_statistics(facts.summary for facts in evidence.facts)
    if evidence.plan.mode == "consistency":
        first = f"all {total.tokens_compared} response tokens have the same fp32 logprob bits in rollout and trainer"
    else:
        first = f"a native control: {total.mismatches} of {total.tokens_compared} logprobs differ in bits"
        limits.append("equality of rollout and trainer, which native mode does not aim at")
    shown = [
        first,
        f"{len(evidence.steps)} steps of {evidence.plan.global_batch_size} samples, each scored by the trainer itself",
        "every planned operator ran through its planned provider on both sides, with measured calls",
        "every rollout rank loaded exactly the bits that the trainer exported, version by version",
    ]
    if names.get("rescore") == "PASS":
        shown.append("a fresh process computed the same logprob bits from the recorded tokens")
    return tuple(shown), tuple(limits)


def rescore_finding(run_dir: Path | str, step: int) -> Finding:
    """Recompute one step's logprobs in a fresh process and compare them as bits with the recorded ones.

    The child is this interpreter with this package, never a path out of the run directory; ``-P`` keeps modules in the
    working directory (which may be a stranger's run) out of its reach.
    """
    expected = f"the recorded train logprobs of step {step}, bit for bit"
    reader = RunReader(run_dir)
    try:
        batch = reader.samples(step)
        with tempfile.TemporaryDirectory(prefix="rlk-rescore-") as folder:
            out = Path(folder) / "rescore.safetensors"
            command = [sys.executable, "-P", "-m", "rl_engine.engines.train.rescore", "--run-dir", str(reader.run_dir)]
            command += ["--step", str(step), "--out", str(out)]
            # Relative entries would lead into the working directory again.
            inherited = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_PACKAGE_ROOT), *inherited])}
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_RESCORE_SECONDS,
                check=False,
                env=environment,
            )
            if done.returncode != 0:
                lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
                text = f"exit {done.returncode}: {lines[-1][:300] if lines else 'no message'}"
                return Finding("rescore", "FAIL", text, expected, " ".join(command[:-2]))
            data = paths.read_bounded(out.parent, out.name, paths.TENSOR_LIMIT)
        arrays = load_tensors(data, "rescore")
        check_arrays(arrays, {"train_logprob": np.float32}, "rescore")
    except (UserError, OSError, subprocess.TimeoutExpired) as error:
        return Finding("rescore", "FAIL", str(error)[:300], expected, "run `validate` without --rescore first")
    result = compare_bits(arrays["train_logprob"], batch.train_logprob)
    if result.equal:
        compared = int(np.count_nonzero(batch.loss_mask))
        return Finding("rescore", "PASS", f"{compared} logprobs of step {step} equal", expected, "")
    where = f" ({locate(batch, result.first_index[0])})" if result.first_index else ""
    hint = "sources, model or machine are not those of the run; see `compare` and environment-*.json"
    return Finding("rescore", "FAIL", f"{result.reason}{where}", expected, hint)


def main(
    run_dir: Path | str,
    *,
    seal: bool = False,
    rescore: bool | int | None = None,
    expect_root: str | None = None,
    json_output: bool = False,
) -> int:
    """The verb ``validate``: print every finding, write what may be written, seal when asked; returns 0 or 1.

    ``rescore`` True means step 0, a number that step. A sealed run is only read.

    Raises:
        UserError: no run directory.
    """
    reader = RunReader(run_dir)
    evidence = RunEvidence(reader, sealing=seal)
    findings = _judge(evidence)
    if rescore is not None and rescore is not False:
        findings.append(rescore_finding(run_dir, 0 if rescore is True else int(rescore)))
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
