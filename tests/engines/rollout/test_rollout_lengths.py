"""Lengths at every limit, and many samples at once in far too little memory."""

from __future__ import annotations

import dataclasses
import random

import pytest

from rl_engine.engines.rollout.builtin.engine import Job, Output, RolloutEngine, RolloutSettings
from rl_engine.engines.rollout.builtin.memory import PagedMemory
from rl_engine.engines.types import Request
from rl_engine.numerics.contract import Contract
from tests.engines.rollout.schedules import VOCABULARY, assert_same, make_engine, poison, small_weights
from tests.helpers.models import copy_weights, joined, operators, prompts, rollout_logprobs, sampling, train_engine
from tests.helpers.numeric import assert_bitwise

BLOCK, SPLIT = Contract().kv_block, Contract().kv_split
NEW = 3


def check_lengths(lengths: tuple[int, ...], **settings: object) -> None:
    """Rollout in chunks over pages equals whole samples in training form; unused pages hold NaN."""
    positions = max(lengths) + NEW
    pages = -(-(positions - 1) // settings["page"])  # type: ignore[operator]
    engine = RolloutEngine(
        copy_weights(small_weights()),
        operators(),
        positions,
        RolloutSettings(pages=pages, **settings),  # type: ignore[arg-type]
    )
    job = Job(Request(0, 0, (1,)), 0, sampling(max_response_len=NEW))
    for number, tokens in enumerate(prompts(VOCABULARY, lengths, seed=1)):
        engine.add(dataclasses.replace(job, request=Request(number, 0, tokens)))
    outputs: list[Output] = []
    while engine.unfinished:
        poison(engine)
        outputs += engine.step()
        engine.memory.check()
    samples = [output.sample for output in sorted(outputs, key=lambda output: output.number)]
    assert [len(s.prompt_tokens) for s in samples] == list(lengths)
    trainer = train_engine(small_weights(), positions=positions, fold_tokens=512)
    assert_bitwise(rollout_logprobs(samples), joined(trainer.score(samples)), str(settings))


@pytest.mark.parametrize("chunk", [1, 7, 64, 10**6])
@pytest.mark.parametrize("page", [8, 16, 64])
def test_lengths_around_pages_and_blocks(chunk: int, page: int) -> None:
    lengths = sorted({1, page - 1, page, page + 1, BLOCK - 1, BLOCK, BLOCK + 1})
    check_lengths(tuple(lengths), chunk=chunk, page=page)


@pytest.mark.parametrize(("chunk", "page"), [(10**6, 64), (333, 16)])
def test_lengths_around_splits(chunk: int, page: int) -> None:
    check_lengths((SPLIT - 1, SPLIT, SPLIT + 1), chunk=chunk, page=page)


@pytest.mark.parametrize(("chunk", "page"), [(500, 8), pytest.param(7, 64, marks=pytest.mark.slow)])
def test_three_splits_and_one(chunk: int, page: int) -> None:
    check_lengths((3 * SPLIT + 1,), chunk=chunk, page=page)


def test_200_requests_in_far_too_few_pages(record_property: pytest.RecordProperty) -> None:
    """None is lost, none is mixed up, nobody starves, memory stays what it was; 5 % are cancelled on the way."""
    rng = random.Random(3)
    beginning = prompts(VOCABULARY, (17,))[0]
    jobs = []
    for number in range(200):
        own = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 24)))
        tokens = beginning + own if number % 3 == 0 else own
        jobs.append(Job(Request(number, 0, tokens), 0, sampling(max_response_len=rng.randrange(1, 11))))
    tight = make_engine(page=8, pages=14, max_batch=32, chunk=16, budget=64)
    assert isinstance(tight.memory, PagedMemory)
    cache = tight.memory.cache
    addresses = [tensor.data_ptr() for tensor in (*cache.k, *cache.v)]
    numbers = [tight.add(job) for job in jobs]
    gone = set(rng.sample(numbers, 10))
    outputs: dict[int, Output] = {}
    passes = 0
    while tight.unfinished:
        if passes % 4 == 0 and passes // 4 < 10:
            tight.cancel(sorted(gone)[passes // 4])
        outputs.update({output.number: output for output in tight.step()})
        passes += 1
    tight.memory.check()
    assert [tensor.data_ptr() for tensor in (*cache.k, *cache.v)] == addresses, "the pool has grown"
    assert tight.memory.available() == 14
    assert len(outputs) + tight.statistics.cancelled == 200
    roomy = make_engine(max_batch=64)
    for output in roomy.run(jobs):
        if output.number in outputs:
            assert_same(outputs[output.number], output, f"request {output.number}")
    assert roomy.statistics.preemptions == 0
    assert tight.statistics.preemptions > 20
    assert tight.statistics.shared_tokens > 100
    order = [outputs[number].waited for number in sorted(outputs)]
    worst = tight.statistics.worst_wait
    record_property("worst_wait_passes", worst)
    record_property("passes", passes)
    assert worst == max(order) < passes
    # First come, first served: the last to arrive waits longest, and nobody waits for those behind.
    assert sorted(order[:20])[-1] < sorted(order[-20:])[0]
