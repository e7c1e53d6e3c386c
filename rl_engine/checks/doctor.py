"""``doctor``: is this machine ready for the profile? A list of checks; one that crashes is a finding itself."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence

from rl_engine.checks import doctor_inputs, doctor_machine, doctor_software
from rl_engine.checks.finding import Finding
from rl_engine.config.document import profile_line
from rl_engine.config.paths import PATH_NAMES
from rl_engine.config.resolve import ResolvedPlan

Check = Callable[[ResolvedPlan], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    doctor_inputs.paths,
    doctor_software.interpreter,
    doctor_software.versions,
    doctor_software.torch_works,
    doctor_software.ray_works,
    doctor_software.plugins,
    doctor_machine.gpus,
    doctor_machine.shared_gpu,
    doctor_machine.shared_memory,
    doctor_machine.disk,
    doctor_machine.memory,
    doctor_machine.threads,
    doctor_machine.compiler,
    doctor_inputs.checkouts,
    doctor_inputs.checkpoint,
    doctor_inputs.prompts,
    doctor_inputs.qualification,
)


def examine(resolved: ResolvedPlan, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Every finding about one plan."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check(resolved))
        except Exception as error:  # a broken machine must not break its doctor
            what = f"the check failed: {type(error).__name__}: {' '.join(str(error).split())}"
            findings.append(Finding(check.__name__, "FAIL", what, "a check that can be made", "report this message"))
    return findings


def main(resolved: Sequence[ResolvedPlan], *, json_output: bool) -> int:
    """Prints paths and findings of the last plan (consistency, in a pair); 1 when any check failed, else 0."""
    subject = resolved[-1]
    findings = examine(subject)
    failed = sum(finding.status == "FAIL" for finding in findings)
    if json_output:
        body = {
            "profile": profile_line(subject),
            "paths": [dataclasses.asdict(value) for value in subject.values if value.name in PATH_NAMES],
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "failed": failed,
        }
        sys.stdout.write(json.dumps(body, indent=1, allow_nan=False) + "\n")
    else:
        sys.stdout.write(_text(subject, findings, failed))
    return 1 if failed else 0


def _text(subject: ResolvedPlan, findings: Sequence[Finding], failed: int) -> str:
    lines = [profile_line(subject), ""]
    for value in subject.values:
        if value.name in PATH_NAMES:
            source = f"{value.source}: {value.origin}" if value.origin else value.source
            lines.append(f"  {value.name:<18} {value.value or 'not set'}  [{source}]")
    lines.append("")
    for finding in findings:
        lines.append(f"[{finding.status}] {finding.name}: found {finding.found}, expected {finding.expected}")
        if finding.status != "PASS" and finding.hint:
            lines.append(f"       hint: {finding.hint}")
    warned = sum(finding.status == "WARN" for finding in findings)
    lines.append(f"\n{len(findings)} checks: {failed} failed, {warned} warning{'' if warned == 1 else 's'}")
    return "\n".join(lines) + "\n"
