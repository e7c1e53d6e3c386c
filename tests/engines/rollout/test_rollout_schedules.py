"""Bits of a sample do not depend on how the work was cut, shared, preempted or cancelled."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.engines.rollout.schedules import (
    Schedule,
    alone,
    assert_same,
    make_engine,
    mixed_jobs,
    play,
    schedules,
)
from tests.helpers.models import differing

QUIET = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
JOBS = len(mixed_jobs())
TIGHT = Schedule(
    engines=1,
    arrivals=(3, 0, 0, 1, 0, 2, 0),
    cancels=(None,) * JOBS,
    max_batch=7,
    chunk=7,
    page=8,
    budget=30,
    slack=0,
    share_prefixes=True,
)


def check(schedule: Schedule) -> None:
    for index, output in play(schedule).items():
        assert_same(output, alone()[index], f"job {index}")


@seed(0)
@settings(QUIET, max_examples=30)
@given(schedules())
def test_bits_do_not_depend_on_the_schedule(schedule: Schedule) -> None:
    check(schedule)


@pytest.mark.slow
@settings(QUIET, max_examples=500)
@given(schedules())
def test_bits_do_not_depend_on_500_schedules(schedule: Schedule) -> None:
    check(schedule)


@pytest.mark.parametrize("chunk", [1, 7, 64, 10**6])
@pytest.mark.parametrize("page", [8, 16, 64])
def test_every_chunk_and_page_size_with_the_smallest_pool(chunk: int, page: int) -> None:
    check(dataclasses.replace(TIGHT, chunk=chunk, page=page))


def test_the_tight_schedule_preempts_and_shares() -> None:
    """The cases that the other tests are about do happen."""
    outputs = play(TIGHT)
    assert sum(output.preempted for output in outputs.values()) > 3
    assert sum(output.shared_tokens for output in outputs.values()) > 50
    unshared = play(dataclasses.replace(TIGHT, share_prefixes=False))
    assert sum(output.shared_tokens for output in unshared.values()) == 0


def test_cancelled_neighbours_are_not_noticed() -> None:
    whole = play(TIGHT)
    for gone in range(JOBS):
        cancels = tuple(4 if index == gone else None for index in range(JOBS))
        for index, output in play(dataclasses.replace(TIGHT, cancels=cancels)).items():
            assert_same(output, whole[index], f"job {index} beside cancelled {gone}")


def test_stock_attention_depends_on_the_schedule() -> None:
    """The control: the same samples and schedules, with torch's attention in the place of ours."""
    expected, different = alone("sdpa"), 0
    for chunk in (1, 7, 64):
        for index, output in play(dataclasses.replace(TIGHT, chunk=chunk), "sdpa").items():
            found, wanted = output.sample.logprobs, expected[index].sample.logprobs
            length = min(len(found), len(wanted))
            different += differing(found[:length], wanted[:length])
    assert different > 10


def test_samples_of_a_prompt_compute_its_pages_once() -> None:
    """Samples that start in the same pass share pages that the pass itself fills."""
    job = mixed_jobs()[0]
    jobs = [dataclasses.replace(job, request=dataclasses.replace(job.request, sample=s)) for s in range(4)]
    shared, own = make_engine(page=16), make_engine(page=16, share_prefixes=False)
    for a, b in zip(shared.run(jobs), own.run(jobs), strict=True):
        assert_same(a, b, "shared")
    assert len(job.request.tokens) == 70
    assert shared.statistics.shared_tokens == 3 * 64
    assert own.statistics.prefill_tokens == 4 * 70
    assert shared.statistics.prefill_tokens == 70 + 3 * 6
    assert shared.statistics.passes == own.statistics.passes
