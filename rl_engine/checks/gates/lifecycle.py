"""Gates about the run as a whole: readable records, state, plan, steps, sources, class of evidence."""

from __future__ import annotations

from rl_engine.checks.gates.evidence import Gate, RunEvidence
from rl_engine.records import paths
from rl_engine.records.writer import TRANSITIONS, torn_words

Verdict = tuple[bool, str, str]


def _records(evidence: RunEvidence) -> Verdict:
    files = evidence.reader.files()
    counts = (
        len(evidence.states),
        len(evidence.events),
        len(evidence.steps),
        len(evidence.routes),
        len(evidence.weights),
        len(evidence.environments),
        len(evidence.facts),
        len(evidence.reader.validations()),
        sum(1 for lines in evidence.reader.passes().values() for _ in lines),
    )
    assert evidence.plan and evidence.plan_digest
    if torn := evidence.reader.torn():
        name, (whole, _) = next(iter(torn.items()))
        finished = "finished" in {state.name for state in evidence.states}
        cut = f"nothing repairs a finished run; to cut it: truncate -s {whole} {evidence.reader.run_dir / name}"
        return False, torn_words(torn), cut if finished else "finish it with `run --resume`, which cuts it off"
    return True, f"{len(files)} files, {sum(counts)} records", ""


def _plan(evidence: RunEvidence) -> Verdict:
    for route in evidence.routes:
        if route.plan_digest != evidence.plan_digest:
            return False, f"worker {route.engine}-{route.rank} ran plan {route.plan_digest[:16]}", "run it again"
    return True, f"plan {evidence.plan_digest[:16]} in {len(evidence.routes)} workers", ""


def _state(evidence: RunEvidence) -> Verdict:
    previous: str | None = None
    for record in evidence.states:
        if record.name not in TRANSITIONS[previous]:
            return False, f"{record.name} after {previous or 'nothing'}", "the state file was edited"
        previous = record.name
    if previous not in ("finished", "valid", "invalid", "sealed"):
        reason = evidence.states[-1].reason if evidence.states else None
        return False, f"{previous or 'nothing'}{f' ({reason})' if reason else ''}", "finish it with `run --resume`"
    names = {record.name for record in evidence.states}
    if "finished" not in names:
        return False, f"{previous}, never finished", "finish it with `run --resume`"
    if "sealed" in names and not evidence.reader.sealed:
        found = f"sealed once, and no {paths.COMPLETE}: the seal was taken away, or sealing was interrupted"
        return evidence.sealing, found, "--seal seals it again; compare its root with the one that you kept"
    return True, "finished", ""


def _steps(evidence: RunEvidence) -> Verdict:
    recorded, sampled = [step.step for step in evidence.steps], evidence.reader.sample_steps()
    for position, step in enumerate(recorded):
        if step != position:
            return False, f"steps.jsonl: step {step} where {position} belongs", "finish it with `run --resume`"
    if len(recorded) != evidence.plan.rollouts:
        found = f"steps.jsonl: {len(recorded)} steps of {evidence.plan.rollouts}"
        return False, found, "finish it with `run --resume`"
    if sampled != recorded:
        odd = sorted(set(recorded) ^ set(sampled))
        return False, f"samples: step {odd[0]} missing or unknown", "restore the file"
    return True, f"{len(recorded)} steps", ""


def _sources(evidence: RunEvidence) -> Verdict:
    first: dict[str, object] = {}
    ends = 0
    for record in evidence.environments:
        for source in record.sources:
            if first.setdefault(source.name, source) != source:
                return False, f"{source.name} changed during the run", "do not edit sources while a run is on"
            ends += record.phase == "end"
    if not first or not ends:
        return False, "sources not recorded at start and end", "run it again"
    return True, f"{', '.join(sorted(first))} equal at start and end", ""


def _evidence_class(evidence: RunEvidence) -> Verdict:
    claimed = evidence.plan.evidence
    dirty = {
        source.name
        for record in evidence.environments
        for source in record.sources
        if source.dirty or source.revision is None
    }
    if claimed == "formal" and dirty:
        return False, f"formal claimed, {', '.join(sorted(dirty))} not clean: development", "commit, then run again"
    if claimed not in ("formal", "experimental", "development"):
        return False, claimed[:40], "run it again"
    return True, claimed, ""


LIFECYCLE_GATES: tuple[Gate, ...] = (
    Gate("records", "every file of the run directory complete and of its type", _records, needs=()),
    Gate("plan", "every worker ran the plan of plan.json", _plan),
    Gate("state", "planned, running, finished", _state),
    Gate("steps", "every planned step once, in order, with its samples", _steps),
    Gate("sources", "source trees recorded, equal before and after", _sources),
    Gate("evidence", "a class of evidence that the sources support", _evidence_class, failure="WARN"),
)
