"""What committed run records show: ``python -m tools.certified RUN_DIR ...`` adds records, ``tools.docs`` the page."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from rl_engine.checks.seal import verify_seal
from rl_engine.config.topology import GUIDE_MATRIX
from rl_engine.records.codec import decode, encode, parse_json
from rl_engine.records.errors import UserError
from rl_engine.report import tables
from rl_engine.report.collect import RunView, collect

EVIDENCE = Path(__file__).resolve().parents[1] / "docs/evidence"
BACKENDS = ("cpu", "cuda", "rocm")
STACKS = ("builtin", "megatron-vllm", "vime")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One sealed run, small enough to commit. Layout numbers are TP, CP, rollout engines, rollout TP, rollout CP."""

    run_id: str
    mode: str
    profile: str
    stack: str
    backend: str
    device: str
    model: str
    layout: tuple[int, ...]
    steps: int
    samples: int
    tokens: int
    mismatches: int
    max_abs_dlogp: float
    gates_passed: int
    gates: int
    contract: str
    torch: str
    source: str
    dirty: bool
    evidence: str
    date: str
    plan_digest: str
    seal_root: str


def from_run(run: RunView) -> Evidence:
    """The record of a sealed and valid run.

    Raises:
        UserError: a run that is not sealed or not valid.
    """
    if not run.sealed or tables.verdict_word(run) != "valid":
        raise UserError(f"{run.run_id}, which is not a valid sealed run", "validate --seal first", "seal it")
    topology, findings = run.plan.topology, [item for item in run.findings if not item.recorded]
    worker = next(record for record in run.environments if record.role == "train")
    source = next(item for item in worker.sources if item.name == "rl_kernel")
    shape = run.plan.model
    return Evidence(
        run_id=run.run_id,
        mode=run.mode,
        profile=run.plan.profile,
        stack=run.plan.stack,
        backend=run.plan.backend,
        device=tables.device_words(run),
        model=f"{shape.num_layers} layers of {shape.hidden_size}" if shape else "not recorded",
        layout=(
            topology.train_tp,
            topology.train_cp,
            topology.rollout_engines,
            topology.rollout_tp,
            topology.rollout_cp,
        ),
        steps=len(run.steps),
        samples=sum(step.samples for step in run.steps),
        tokens=run.tokens,
        mismatches=run.mismatches,
        max_abs_dlogp=max(step.max_abs_dlogp for step in run.steps),
        gates_passed=sum(finding.status == "PASS" for finding in findings),
        gates=len(findings),
        contract=worker.contract_id,
        torch=worker.versions.get("torch", "not recorded"),
        source=(source.revision or "unknown")[:12],
        dirty=source.dirty,
        evidence=run.plan.evidence,
        date=run.started[:10],
        plan_digest=run.plan_digest,
        seal_root=run.root,
    )


def records() -> list[Evidence]:
    """Every committed record, oldest first."""
    found = [decode(Evidence, parse_json(path.read_text(), path.name), path.name) for path in EVIDENCE.glob("*.json")]
    return sorted(found, key=lambda item: (item.date, item.run_id))


def page(note: str) -> str:
    """What ran, and what did not."""
    found = records()
    parts = ["# What is certified\n", note, _HEAD]
    rows = [
        (
            f"{item.date}",
            f"{item.mode}",
            f"{item.profile} ({item.model})",
            f"{item.stack}, {item.device}",
            _layout(item.layout),
            f"{item.steps} steps, {item.samples} samples",
            f"{item.mismatches:,} of {item.tokens:,}",
            f"{item.gates_passed} of {item.gates}",
            f"`{item.source}`{' (dirty)' if item.dirty else ''}, {item.evidence}",
            f"`{item.seal_root[:16]}`",
        )
        for item in found
    ]
    head = ("Date", "Mode", "Profile", "Engines, device", "Layout", "Amount", "Differ", "Gates", "Source", "Seal")
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    parts.append("\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n")
    parts.append(_not_run(found))
    return "\n".join(parts)


def _layout(layout: tuple[int, ...]) -> str:
    tp, cp, engines, rollout_tp, rollout_cp = layout
    return f"TP{tp} CP{cp} -> {engines} x TP{rollout_tp} CP{rollout_cp}"


def _not_run(found: list[Evidence]) -> str:
    """Everything that the interface names and no record covers."""
    exact = [item for item in found if item.mode == "consistency" and item.mismatches == 0]
    backends = {item.backend for item in exact}
    stacks = {item.stack for item in exact}
    lines = ["## Not run\n", "No committed record covers these. They may work; nothing here says so.\n"]
    lines += [f"- backend `{name}`" for name in BACKENDS if name not in backends]
    lines += [f"- stack `{name}`" for name in STACKS if name not in stacks]
    ran = {((item.layout[0], item.layout[1]), (item.layout[3], item.layout[4])) for item in exact}
    missing = [pair for pair in GUIDE_MATRIX if pair not in ran]
    shown = "; ".join(f"TP{a} CP{b} -> TP{c} CP{d}" for (a, b), (c, d) in missing)
    lines.append(f"- {len(missing)} of the {len(GUIDE_MATRIX)} layouts of the reference matrix: {shown}")
    longest = max((item.steps for item in exact), default=0)
    lines.append(f"- runs of more than {longest} steps (the reference experiment has 200)")
    lines.append("- models other than those in the table, and several nodes")
    return "\n".join(lines) + "\n"


_HEAD = """Each row is one sealed run whose small record is committed under `docs/evidence`. *Differ* counts response
tokens whose logprob has other bits in the rollout engine and in the trainer: consistency must be 0, native is the
control. A row holds for its model, layout, device and versions, and says nothing about others. The tests cover more
(every layout of `tests/parallel`, for one), but on random models; they are not listed here.
"""


def main(argv: list[str]) -> int:
    """Adds a record for each run directory given."""
    for argument in argv:
        folder = Path(argument).resolve()
        assert verify_seal(folder)[0].status == "PASS", argument
        run = next(run for run in collect(folder.parent, include_unsealed=False).runs if run.run_id == folder.name)
        path = EVIDENCE / f"{run.run_id}.json"
        path.write_text(json.dumps(encode(from_run(run)), indent=1) + "\n")
        sys.stderr.write(f"written: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
