"""Gates about weights: versions, replicas, updates."""

from __future__ import annotations

import math

from rl_engine.checks.gates.evidence import Gate, RunEvidence

Verdict = tuple[bool, str, str]


def _versions(evidence: RunEvidence) -> Verdict:
    if sorted(evidence.weights) != list(range(len(evidence.steps) + 1)):
        return False, f"weights of versions {sorted(evidence.weights)[:20]}", "one version before each step, one after"
    for step, facts in zip(evidence.steps, evidence.facts, strict=True):
        if step.weight_version != step.step:
            return False, f"step {step.step} trained on version {step.weight_version}", "every step trains on its own"
        for sample in facts.samples:
            if sample.weight_version != step.weight_version:
                return False, f"step {step.step}: a sample of version {sample.weight_version}", "run it again"
    names = {frozenset(record.tensors) for record in evidence.weights.values()}
    if len(names) != 1 or not all(names):
        return False, "versions with different tensor names", "run it again"
    return True, f"{len(evidence.weights)} versions, every sample of the one trained", ""


def _replicas(evidence: RunEvidence) -> Verdict:
    loaded: dict[tuple[object, object, object], object] = {}
    for event in evidence.events:
        if event.kind != "weights_loaded":
            continue
        engine, rank, version = (event.fields.get(name) for name in ("engine", "rank", "version"))
        record = evidence.weights.get(version) if isinstance(version, int) else None
        if record is None or event.fields.get("digest") != record.digest:
            return False, f"{engine}-{rank} loaded other weights as version {version}", "run it again"
        loaded[(engine, rank, version)] = record.digest
    for engine, rank in sorted(evidence.engines("rollout")):
        for step in evidence.steps:
            if (engine, rank, step.weight_version) not in loaded:
                return False, f"{engine}-{rank}: no word of version {step.weight_version}", "run it again"
    return True, f"{len(loaded)} loads, each of the exported bits", ""


def _gradients(evidence: RunEvidence) -> Verdict:
    for step in evidence.steps:
        norm = step.grad_norm
        if not math.isfinite(norm) or norm < 0 or step.grad_norm_hex != norm.hex():
            return False, f"step {step.step}: gradient norm {norm} ({step.grad_norm_hex[:40]})", "run it again"
    return True, f"{len(evidence.steps)} finite norms", ""


def _updates(evidence: RunEvidence) -> Verdict:
    distinct = len({record.digest for record in evidence.weights.values()})
    positive = sum(step.grad_norm > 0 for step in evidence.steps)
    found = f"{distinct} distinct weights, {positive} positive gradient norms"
    if not evidence.plan.require_updates:
        return True, f"{found} (not required)", ""
    return distinct >= 2 and positive >= 1, found, "more samples per prompt, or prompts with mixed rewards"


WEIGHT_GATES: tuple[Gate, ...] = (
    Gate("weight_versions", "each sample drawn from the version that trained on it", _versions, ("records", "steps")),
    Gate(
        "replicas",
        "every engine rank loaded exactly the exported bits",
        _replicas,
        ("records", "topology"),
        asks=(("rollout", "weights"),),
    ),
    Gate("gradients", "finite gradient norms, recorded exactly", _gradients),
    Gate("updates", "with --require-updates: 2 distinct weights and a positive gradient norm", _updates),
)
