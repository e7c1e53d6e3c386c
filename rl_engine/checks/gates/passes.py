"""The gate about the rollout engines' passes: what their schedulers logged adds up to the samples, token by token."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from rl_engine.checks.gates.evidence import Gate, RunEvidence
from rl_engine.records.types import PassRecord, StepRecord

Verdict = tuple[bool, str, str]
_COUNTS = ("step", "weight_version", "waiting", "prefill", "shared", "discarded", "pages_held")


@dataclasses.dataclass
class _Sums:
    """What one step's passes of one engine computed."""

    keys: int = 0
    finished: list[tuple[int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Log:
    """One attempt of one engine."""

    passes: int = 0
    graphs: int = 0
    preempted: int = 0
    last: int = 0
    problem: str = ""
    steps: dict[int, _Sums] = dataclasses.field(default_factory=lambda: collections.defaultdict(_Sums))


def _passes(evidence: RunEvidence) -> Verdict:
    if not evidence.reader.logs_passes:
        if any(event.kind == "attempt" and event.fields.get("passes") for event in evidence.events):
            return False, "none logged, though the run began to", "restore the folder passes"
        return True, "none logged: a run of an earlier version", ""
    logs = {place: _read(records, evidence.steps) for place, records in evidence.reader.passes().items()}
    engines = {engine for engine, _ in evidence.engines("rollout")}
    attempts = {number for number, _ in evidence.attempts}
    for (attempt, engine), log in sorted(logs.items()):
        if engine not in engines or attempt not in attempts:
            return False, f"passes of engine {engine[:40]} in attempt {attempt}, which there was not", "run it again"
        if log.problem:
            return False, f"engine {engine[:40]}, attempt {attempt}: {log.problem}", "run it again"
        if log.graphs and not evidence.plan.engine.graph_capture_sizes:
            return False, f"engine {engine[:40]}: {log.graphs} passes from graphs, none planned", "run it again"
    first = 0
    for attempt, steps in evidence.attempts:
        reached = first + steps  # at most, by an attempt that ended in the middle of it
        for engine in sorted(engine for number, engine in logs if number == attempt):
            if (last := logs[attempt, engine].last) > reached:
                return False, f"engine {engine[:40]}, attempt {attempt}: never reached step {last}", "run it again"
        for facts in evidence.facts[first:reached]:
            for engine in sorted({*engines, *facts.drawn}):
                keys, samples = facts.drawn.get(engine, (0, []))
                sums = logs.get((attempt, engine), _Log()).steps[facts.step]
                where = f"step {facts.step} of engine {engine[:40]}"
                if sorted(sums.finished) != sorted(samples):
                    return False, f"{where}: {len(sums.finished)} samples finished, not those recorded", "run it again"
                if sums.keys != keys:
                    return False, f"{where}: {sums.keys} tokens passed, its samples have {keys}", "run it again"
        first = reached
    return True, _words(list(logs.values())), ""


def _read(records: Iterable[PassRecord], steps: Sequence[StepRecord]) -> _Log:
    log = _Log()
    for record in records:
        if not _possible(record, log):
            log.problem = log.problem or f"the line of pass {record.first} cannot be"
        elif record.step >= len(steps) or record.weight_version != steps[record.step].weight_version:
            found = f"pass {record.first} of step {record.step} with weights of version {record.weight_version}"
            log.problem = log.problem or found
        log.passes += record.passes
        log.graphs += record.passes * (record.execution == "graph")
        log.preempted += len(record.preempted)
        log.last = record.step
        sums = log.steps[record.step]
        sums.keys += record.passes * record.tokens + record.shared - record.discarded
        sums.finished += record.finished
    return log


def _possible(record: PassRecord, log: _Log) -> bool:
    """Whether the record can follow those of ``log``."""
    if record.passes > 1 and (record.prefill or record.tokens != record.samples):
        return False
    return (
        all(getattr(record, name) >= 0 for name in _COUNTS)
        and record.first == log.passes
        and record.step >= log.last
        and record.passes >= 1
        and max(1, len(record.finished)) <= record.samples <= record.tokens
        and record.prefill <= record.tokens
        and record.pages_held <= record.pages
    )


def _words(logs: list[_Log]) -> str:
    total, graphs = sum(log.passes for log in logs), sum(log.graphs for log in logs)
    return f"{total} passes, {graphs} from graphs, {sum(log.preempted for log in logs)} preemptions"


PASS_GATES: tuple[Gate, ...] = (
    Gate(
        "passes",
        "every token of every sample in one pass of its engine, by the scheduler's log",
        _passes,
        ("records", "state", "steps", "topology", "workers", "identities", "weight_versions"),
        asks=(("rollout", "passes"),),
    ),
)
