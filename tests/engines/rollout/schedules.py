"""Schedules: ways to cut the same samples into passes. None of them may change a bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from rl_engine.engines.rollout.builtin.engine import Job, Output, RolloutEngine, RolloutSettings, fan_out
from rl_engine.engines.rollout.builtin.memory import PagedMemory
from rl_engine.engines.types import Request
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.ops import Operators, uniform
from tests.helpers.graphs import LateGraphs, RememberedGraphs, WordsSample
from tests.helpers.models import copy_weights, prompts, qwen3, sampling
from tests.helpers.numeric import assert_bitwise

VOCABULARY = 1501
POSITIONS = 160
GRAPHS = {"graphs": RememberedGraphs, "late": LateGraphs}


@functools.cache
def small_weights(seed: int = 0) -> ModelWeights:
    """One layer of hidden 1024: wide enough for a wrong order to show."""
    return random_weights(qwen3(layers=1, vocabulary=VOCABULARY), seed)


def providers(kind: str) -> Operators:
    """``cpu``, or ``sdpa``: the same with torch's attention alone; ``graphs`` and ``late``: with a sampler that takes
    words."""
    ops = Operators({**uniform("cpu"), "attention": "stock"} if kind == "sdpa" else uniform("cpu"))
    if kind in GRAPHS:
        ops._providers["sample"] = WordsSample()
    return ops


def make_engine(kind: str = "cpu", seed: int = 0, **settings: object) -> RolloutEngine:
    """An engine on a copy of :func:`small_weights`; ``decode`` joins ids with dots. With ``graphs`` or ``late`` it
    replays passes of every size that :class:`RememberedGraphs` or :class:`LateGraphs` captured."""
    weights = copy_weights(small_weights(seed))
    decode = lambda ids: "".join(f"{token}." for token in ids)  # noqa: E731
    device = GRAPHS[kind]() if kind in GRAPHS else None
    if device is not None:
        settings = {"graph_sizes": tuple(range(1, 65)), **settings}
    chosen = RolloutSettings(**settings)  # type: ignore[arg-type]
    engine = RolloutEngine(weights, providers(kind), POSITIONS, chosen, decode=decode, graph_device=device)
    if device is not None:
        device.engine = engine
    return engine


@functools.cache
def mixed_jobs() -> tuple[Job, ...]:
    """Prompts that share beginnings within and across prompts, three kinds of sampling, responses of 1 to 9 tokens."""
    long, other, lone = prompts(VOCABULARY, (70, 33, 1))
    plain = sampling(max_response_len=7, stop_tokens=tuple(range(3, 200)))
    filtered = sampling(max_response_len=9, temperature=0.7, top_k=90, top_p=0.8)
    return (
        *(Job(request, 0, plain, raw=True) for request in fan_out(0, long, 2)),
        *(Job(request, 0, filtered, raw=True) for request in fan_out(1, (*long[:48], *other[:9]), 2)),
        Job(Request(2, 0, long[:16]), 5, plain),
        Job(Request(3, 0, lone), 0, sampling(max_response_len=1)),
        Job(Request(4, 7, other), 0, dataclasses.replace(filtered, top_k=-1, top_p=0.5)),
    )


@functools.cache
def alone(kind: str = "cpu", seed: int = 0) -> tuple[Output, ...]:
    """Every job in an engine of its own, its prompt in one piece."""
    return tuple(make_engine(kind, seed).run([job])[0] for job in mixed_jobs())


@dataclasses.dataclass(frozen=True)
class Schedule:
    """``arrivals`` and ``cancels`` are passes, one per job (None: never cancelled); ``slack`` pages beyond the longest
    sample make the pool, None one that is large enough."""

    engines: int
    arrivals: tuple[int, ...]
    cancels: tuple[int | None, ...]
    max_batch: int
    chunk: int
    page: int
    budget: int
    slack: int | None
    share_prefixes: bool

    def settings(self) -> dict[str, object]:
        longest = max(-(-job.cached_tokens // self.page) for job in mixed_jobs())
        return {
            "max_batch": self.max_batch,
            "chunk": self.chunk,
            "page": self.page,
            "budget": self.max_batch + self.budget,
            "pages": None if self.slack is None else longest + self.slack,
            "share_prefixes": self.share_prefixes,
        }


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Arrivals in any order, small pools, every chunk and page size of interest."""
    jobs = len(mixed_jobs())
    return Schedule(
        engines=draw(st.integers(1, 2)),
        arrivals=tuple(draw(st.lists(st.integers(0, 12), min_size=jobs, max_size=jobs))),
        cancels=tuple(draw(st.lists(st.sampled_from([None, None, None, 2, 5, 9]), min_size=jobs, max_size=jobs))),
        max_batch=draw(st.integers(1, 8)),
        chunk=draw(st.sampled_from([1, 7, 64, 10**6])),
        page=draw(st.sampled_from([8, 16, 64])),
        budget=draw(st.sampled_from([0, 1, 30, 10**6])),
        slack=draw(st.sampled_from([None, 0, 0, 1, 4])),
        share_prefixes=draw(st.booleans()),
    )


def poison(engine: RolloutEngine) -> None:
    """NaN into every page whose content is worthless: one that was used before reads like a fresh one."""
    memory = engine.memory
    if isinstance(memory, PagedMemory) and memory.pool._free:
        free = torch.tensor(memory.pool._free)
        for tensor in (*memory.cache.k, *memory.cache.v):
            tensor[free] = torch.nan


def play(
    schedule: Schedule,
    kind: str = "cpu",
    seed: int = 0,
    jobs: Sequence[Job] | None = None,
    engines: list[RolloutEngine] | None = None,
) -> dict[int, Output]:
    """Outputs by job of those not cancelled, :func:`mixed_jobs` or as many others; the books of the pool are checked
    after every pass. ``engines`` takes what was played on."""
    outputs: dict[int, Output] = {}
    for rank in range(schedule.engines):
        engine = make_engine(kind, seed, **schedule.settings())
        mine = [i for i in range(len(mixed_jobs())) if i % schedule.engines == rank]
        outputs.update(_play_engine(engine, schedule, mine, jobs or mixed_jobs()))
        if engines is not None:
            engines.append(engine)
    return outputs


def _play_engine(
    engine: RolloutEngine, schedule: Schedule, mine: Sequence[int], jobs: Sequence[Job]
) -> dict[int, Output]:
    numbers: dict[int, int] = {}
    outputs: dict[int, Output] = {}
    tick = 0
    while tick <= max(schedule.arrivals) or engine.unfinished:
        for index in mine:
            if schedule.arrivals[index] == tick:
                numbers[engine.add(jobs[index])] = index
        for number, index in list(numbers.items()):
            if schedule.cancels[index] == tick:
                engine.cancel(number)
        poison(engine)
        for output in engine.step():
            outputs[numbers[output.number]] = output
        engine.memory.check()
        tick += 1
        assert tick < 5000, "no progress"
    cancelled = engine.statistics.cancelled
    assert len(outputs) + cancelled == len(mine), "a sample was lost"
    return outputs


def assert_same(found: Output, expected: Output, what: str) -> None:
    """Tokens, logprobs, raw logprobs, retained sets and the reason of the end, bit for bit."""
    a, b = found.sample, expected.sample
    assert (a.prompt, a.sample, a.finish_reason) == (b.prompt, b.sample, b.finish_reason), what
    assert_bitwise(a.response_tokens, b.response_tokens, f"{what}: tokens")
    assert_bitwise(a.logprobs, b.logprobs, f"{what}: logprobs")
    assert (found.raw_logprobs is None) == (expected.raw_logprobs is None)
    if found.raw_logprobs is not None and expected.raw_logprobs is not None:
        assert_bitwise(found.raw_logprobs, expected.raw_logprobs, f"{what}: raw logprobs")
    assert found.retained_digests(VOCABULARY) == expected.retained_digests(VOCABULARY), what
    assert a.retained is None or all(np.array_equal(x, y) for x, y in zip(a.retained, b.retained or (), strict=True))
