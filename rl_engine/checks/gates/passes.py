"""The gate about the rollout engines' passes: what their schedulers logged adds up to the samples, token by token."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from rl_engine.checks.gates.evidence import Gate, RunEvidence
from rl_engine.records.types import PassRecord

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
    problem: str = ""
    steps: dict[int, _Sums] = dataclasses.field(default_factory=lambda: collections.defaultdict(_Sums))


def _passes(evidence: RunEvidence) -> Verdict:
    if not evidence.reader.logs_passes:
        return True, "none logged: a run of an earlier version", ""
    logs = {place: _read(records) for place, records in evidence.reader.passes().items()}
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
        for facts in evidence.facts[first : first + steps]:
            for engine, (keys, samples) in sorted(facts.drawn.items()):
                sums = logs.get((attempt, engine), _Log()).steps[facts.step]
                where = f"step {facts.step} of engine {engine[:40]}"
                if sorted(sums.finished) != sorted(samples):
                    return False, f"{where}: {len(sums.finished)} samples finished, not those recorded", "run it again"
                if sums.keys != keys:
                    return False, f"{where}: {sums.keys} tokens passed, its samples have {keys}", "run it again"
        first += steps
    return True, _words(list(logs.values())), ""


def _read(records: Iterable[PassRecord]) -> _Log:
    log = _Log()
    for record in records:
        possible = record.first == log.passes and record.passes >= 1 <= record.samples <= record.tokens
        possible &= record.prefill <= record.tokens and record.pages_held <= record.pages
        if not possible or any(getattr(record, name) < 0 for name in _COUNTS):
            log.problem = log.problem or f"the line of pass {record.first} cannot be"
        log.passes += record.passes
        log.graphs += record.passes * (record.execution == "graph")
        log.preempted += len(record.preempted)
        sums = log.steps[record.step]
        sums.keys += record.passes * record.tokens + record.shared - record.discarded
        sums.finished += record.finished
    return log


def _words(logs: list[_Log]) -> str:
    total, graphs = sum(log.passes for log in logs), sum(log.graphs for log in logs)
    return f"{total} passes, {graphs} from graphs, {sum(log.preempted for log in logs)} preemptions"


PASS_GATES: tuple[Gate, ...] = (
    Gate(
        "passes",
        "every token of every sample in one pass of its engine, by the scheduler's log",
        _passes,
        ("records", "state", "steps", "topology", "workers", "identities"),
    ),
)
