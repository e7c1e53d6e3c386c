"""What an engine logs of its passes: every computed token is in one, and a line is written where something changes."""

from __future__ import annotations

import dataclasses

import pytest

from rl_engine.engines.rollout.builtin.engine import Job, Output, RolloutEngine, fan_out
from rl_engine.engines.rollout.builtin.passes import PassLog
from rl_engine.engines.types import Request
from rl_engine.records.types import PassRecord
from tests.engines.rollout.schedules import VOCABULARY, make_engine, mixed_jobs
from tests.engines.rollout.test_rollout_schedules import TIGHT
from tests.helpers.models import prompts, sampling


def run(engine: RolloutEngine, jobs: list[Job]) -> tuple[list[PassRecord], list[Output]]:
    engine.passes = PassLog()
    outputs = engine.run(jobs)
    return engine.passes.take(), outputs


def computed(records: list[PassRecord]) -> int:
    return sum(line.passes * line.tokens + line.shared - line.discarded for line in records)


def needed(outputs: list[Output]) -> int:
    """Every token but a response's last one, whose keys nobody needs."""
    return sum(output.sample.length - 1 for output in outputs)


@pytest.mark.parametrize("kind", ["cpu", "sdpa", "graphs"])
@pytest.mark.parametrize("tight", [True, False])
def test_the_log_adds_up(kind: str, tight: bool) -> None:
    engine = make_engine(kind, **(TIGHT.settings() if tight else {"max_batch": 3, "chunk": 9}))
    records, outputs = run(engine, list(mixed_jobs()))
    assert computed(records) == needed(outputs)
    names = sorted((output.sample.prompt, output.sample.sample) for output in outputs)
    assert sorted(name for line in records for name in line.finished) == names
    assert sum(line.passes for line in records) == engine.statistics.passes
    assert [line.first for line in records] == [sum(r.passes for r in records[:i]) for i in range(len(records))]
    assert sum(line.prefill for line in records) == engine.statistics.prefill_tokens
    assert sum(len(line.preempted) for line in records) == engine.statistics.preemptions
    admissions = [name for line in records for name in line.admitted]
    assert len(admissions) == len(outputs) + engine.statistics.preemptions and set(admissions) == set(names)
    replayed = sum(line.passes for line in records if line.execution == "graph")
    assert replayed == engine.statistics.replayed and (replayed > 0) == (kind == "graphs")
    assert all(0 < line.pages_held <= line.pages for line in records) or kind == "sdpa"
    assert {line.pages for line in records} == {0} or kind != "sdpa"


def test_sharing_and_preemption_are_in_the_sum() -> None:
    """The control of the sum above: without either it is another."""
    engine = make_engine(**TIGHT.settings())
    records, outputs = run(engine, list(mixed_jobs()))
    for name in ("shared", "discarded"):
        without = [dataclasses.replace(line, **{name: 0}) for line in records]
        assert computed(without) != needed(outputs), name
    assert any(line.waiting for line in records) and any(line.preempted for line in records)


def test_alike_passes_are_one_line() -> None:
    """Four samples of one prompt, of which one ends earlier: a line for the prompt and one for each stretch behind."""
    (prompt,) = prompts(VOCABULARY, (40,))
    long, short = sampling(max_response_len=60), sampling(max_response_len=20)
    jobs = [*(Job(request, 0, long) for request in fan_out(0, prompt, 3)), Job(Request(1, 0, prompt), 0, short)]
    engine = make_engine(page=16, pages=40)
    records, _ = run(engine, jobs)
    assert [line.passes for line in records] == [1, 19, 40]
    first, both, rest = records
    assert first.admitted == ((0, 0), (0, 1), (0, 2), (1, 0)) and first.prefill == first.tokens == 40 + 3 * 8
    assert first.shared == 3 * 32, "the others take two full pages over"
    assert (both.samples, both.finished, both.tokens) == (4, ((1, 0),), 4)
    assert (rest.samples, rest.finished, rest.tokens) == (3, ((0, 0), (0, 1), (0, 2)), 3)
    assert rest.pages_held == 2 + 3 * 5 and rest.pages == 40 and rest.weight_version == 0


def test_taking_empties_the_log_and_numbers_go_on() -> None:
    (prompt,) = prompts(VOCABULARY, (9,))
    engine = make_engine()
    first, _ = run(engine, [Job(Request(0, 0, prompt), 0, sampling(max_response_len=3))])
    assert engine.passes is not None and engine.passes.take() == []
    engine.run([Job(Request(0, 0, prompt), 1, sampling(max_response_len=1))])
    (line,) = engine.passes.take()
    assert (line.first, line.step) == (sum(record.passes for record in first), 1)
