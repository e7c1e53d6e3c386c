"""The engine's calls: stops, caps, filters, cancellation, weight updates, replay, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rl_engine.engines.rollout.builtin import memory
from rl_engine.engines.rollout.builtin.engine import InFlight, Job, Output, RolloutEngine, RolloutSettings, fan_out
from rl_engine.engines.rollout.builtin.log import Pass, ReplayMismatch, SchedulerLog, passes, read_log
from rl_engine.engines.snapshot import export_snapshot
from rl_engine.engines.types import Request, Sample, WeightSnapshot, retained_ids
from tests.engines.rollout.schedules import (
    POSITIONS,
    VOCABULARY,
    alone,
    assert_same,
    make_engine,
    mixed_jobs,
    poison,
    small_weights,
)
from tests.helpers.models import copy_weights, joined, operators, prompts, requests, sampling, train_engine
from tests.helpers.numeric import assert_bitwise

PROMPT = prompts(VOCABULARY, (20,))[0]
TIGHT: dict[str, object] = {"max_batch": 4, "chunk": 16, "page": 8, "pages": 12}


def draw(engine: RolloutEngine | None = None, stop_strings: tuple[str, ...] = (), **changes: object) -> Sample:
    """One sample of :data:`PROMPT`."""
    settings = sampling(**{"max_response_len": 12, **changes})
    return (engine or make_engine()).generate([Request(0, 0, PROMPT)], 0, settings, stop_strings=stop_strings)[0]


def test_a_stop_token_ends_the_response_and_belongs_to_it() -> None:
    whole = draw()
    assert whole.finish_reason == "length" and len(whole.response_tokens) == 12
    stopped = draw(stop_tokens=(int(whole.response_tokens[4]), -5))
    assert stopped.finish_reason == "stop"
    assert_bitwise(stopped.response_tokens, whole.response_tokens[:5], "tokens")
    assert_bitwise(stopped.logprobs, whole.logprobs[:5], "logprobs")


def test_a_stop_string_may_lie_over_two_tokens() -> None:
    whole = draw()
    first, second = (str(token) for token in whole.response_tokens[5:7])
    stopped = draw(stop_strings=(f"{first[-1]}.{second[:2]}",))
    assert stopped.finish_reason == "stop"
    text = "".join(f"{token}." for token in stopped.response_tokens)
    assert f"{first[-1]}.{second[:2]}" in text
    assert_bitwise(stopped.response_tokens, whole.response_tokens[: len(stopped.response_tokens)], "tokens")
    assert draw(stop_strings=("no number",)).finish_reason == "length"
    prompt_only = f"{PROMPT[-2]}.{PROMPT[-1]}."
    assert len(draw(stop_strings=(prompt_only,)).response_tokens) == 12, "the prompt is not searched"


def test_response_of_one_token_and_up_to_the_last_position() -> None:
    assert len(draw(max_response_len=1).response_tokens) == 1
    assert draw(max_response_len=POSITIONS - len(PROMPT)).length == POSITIONS


@pytest.mark.parametrize(
    ("request_", "changes", "words"),
    [
        (Request(3, 0, ()), {}, "prompt 3 has no token"),
        (Request(3, 0, PROMPT), {"max_response_len": 141}, "with 141 response tokens it exceeds 160 positions"),
        (Request(3, 0, PROMPT), {"max_response_len": 0}, "asks for 0 response tokens"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(request_: Request, changes: dict[str, object], words: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=words):
        engine.generate([Request(0, 0, PROMPT), request_], 0, sampling(**changes))
    assert engine.unfinished == 0, "a refusal queues nothing"


def test_a_sample_longer_than_the_pool_is_refused() -> None:
    engine = make_engine(page=8, pages=3)
    assert len(draw(engine, max_response_len=5).response_tokens) == 5
    with pytest.raises(ValueError, match="may grow to 25 cached tokens: the pool holds 24"):
        draw(engine, max_response_len=6)


def test_stop_strings_need_a_decode() -> None:
    engine = RolloutEngine(copy_weights(small_weights()), operators(), POSITIONS, RolloutSettings())
    with pytest.raises(ValueError, match="no decode to compare"):
        draw(engine, stop_strings=("x",))
    with pytest.raises(ValueError, match="an empty stop string"):
        draw(make_engine(), stop_strings=("",))


def test_retained_sets_contain_their_token_and_the_trainer_agrees() -> None:
    """top-k, then top-p: the set travels with its digest, and scoring over it gives the same bits."""
    engine = make_engine()
    settings = sampling(max_response_len=8, temperature=0.8, top_k=40, top_p=0.9)
    outputs = engine.run([Job(request, 0, settings, raw=True) for request in requests([PROMPT, PROMPT[:7]], 2)])
    for output in outputs:
        sample = output.sample
        assert sample.retained is not None and len(sample.retained) == 8
        sets = [retained_ids(row, VOCABULARY) for row in sample.retained]
        assert all(
            1 <= len(ids) <= 40 and token in ids for ids, token in zip(sets, sample.response_tokens, strict=True)
        )
        digests = output.retained_digests(VOCABULARY)
        assert digests is not None and len(set(digests)) > 1 and all(len(digest) == 32 for digest in digests)
        assert output.raw_logprobs is not None
        assert sample.logprobs.mean() > output.raw_logprobs.mean(), "fewer columns leave more for each"
    samples = [output.sample for output in outputs]
    scored = train_engine(small_weights(), temperature=0.8).score(samples)
    assert_bitwise(joined([s.logprobs for s in samples]), joined(scored), "rollout and trainer")
    whole = [dataclasses.replace(s, retained=None) for s in samples]
    raw = joined([output.raw_logprobs for output in outputs if output.raw_logprobs is not None])
    assert_bitwise(raw, joined(train_engine(small_weights(), temperature=1.0).score(whole)), "raw logprobs")


def test_raw_logprobs_at_temperature_one_are_the_processed_ones() -> None:
    output = make_engine().run([Job(Request(0, 0, PROMPT), 0, sampling(), raw=True)])[0]
    assert output.raw_logprobs is not None
    assert_bitwise(output.raw_logprobs, output.sample.logprobs, "raw")


def test_samples_of_a_prompt_differ_and_come_in_order() -> None:
    samples = make_engine().generate(fan_out(4, PROMPT, 5), 0, sampling())
    assert [(s.prompt, s.sample) for s in samples] == [(4, n) for n in range(5)]
    assert len({s.response_tokens.tobytes() for s in samples}) == 5


def test_progress_counts_samples() -> None:
    seen: list[tuple[int, int]] = []
    engine = make_engine(max_batch=2)
    engine.generate(fan_out(0, PROMPT, 5), 0, sampling(), lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_cancel_while_queued_and_half_drawn() -> None:
    engine = make_engine(max_batch=1)
    first, second = (engine.add(Job(request, 0, sampling())) for request in fan_out(0, PROMPT, 2))
    engine.step()
    assert engine.cancel(second) and engine.cancel(first)
    assert not engine.cancel(first) and not engine.cancel(99)
    assert engine.unfinished == 0 and engine.step() == []
    engine.memory.check()
    assert_same_sample(draw(engine), draw())


def test_generate_leaves_samples_of_others_alone() -> None:
    engine, job = make_engine(max_batch=3), mixed_jobs()[0]
    number = engine.add(job)
    draw(engine)
    outputs = engine.step()
    while engine.unfinished:
        outputs += engine.step()
    assert [output.number for output in outputs] == [number]
    assert_same(outputs[0], alone()[0], "added before generate")


def test_an_error_leaves_an_engine_that_works() -> None:
    engine = make_engine(**TIGHT)
    engine.add(mixed_jobs()[1])

    def broken(_: list[int]) -> str:
        raise RuntimeError("decode is broken")

    decode, engine.decode = engine.decode, broken
    with pytest.raises(RuntimeError, match="decode is broken"):
        draw(engine, stop_strings=("x",))
    assert engine.unfinished == 0
    engine.decode = decode
    engine.memory.check()
    poison(engine)
    assert_same(engine.run([mixed_jobs()[0]])[0], alone()[0], "after the error")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(fan_out(0, PROMPT, 8), 0, sampling(), interrupt)
    assert engine.unfinished == 0


def assert_same_sample(found: Sample, expected: Sample) -> None:
    assert_bitwise(found.response_tokens, expected.response_tokens, "tokens")
    assert_bitwise(found.logprobs, expected.logprobs, "logprobs")


def updated() -> WeightSnapshot:
    """Weight version 1: another seed's."""
    return export_snapshot(copy_weights(small_weights(1)), 1)


@pytest.mark.parametrize("policy", ["finish", "restart"])
@pytest.mark.parametrize("at", [0, 1, 4, 9, 14])
def test_an_update_in_flight_never_mixes_versions(policy: InFlight, at: int) -> None:
    """Every sample is wholly of version 0 or wholly of version 1; sharing and preemption go on all the while."""
    engine = make_engine(**TIGHT)
    numbers = [engine.add(job) for job in mixed_jobs()]
    outputs: dict[int, Output] = {}
    begun: list[int] = []
    for tick in range(400):
        if tick == at:
            begun = [s.number for s in (*engine.scheduler.running, *engine.scheduler.waiting) if s.responses]
            engine.load_weights(updated(), policy)
            assert engine.version == 1
        poison(engine)
        outputs.update({output.number: output for output in engine.step()})
        engine.memory.check()
        if not engine.unfinished and tick > at:
            break
    assert sorted(outputs) == numbers
    for index, number in enumerate(numbers):
        output = outputs[number]
        version = output.sample.weight_version
        assert set(output.versions.tolist()) == {version}
        assert len(output.versions) == len(output.sample.response_tokens)
        assert_same(output, alone("cpu", version)[index], f"job {index} at version {version}")
        if number in begun:
            assert version == (0 if policy == "finish" else 1)
            assert output.restarted == (policy == "restart")
    if at == 4:
        assert begun and {output.sample.weight_version for output in outputs.values()} >= {1}


def test_the_two_versions_draw_differently() -> None:
    """The control of the test above."""
    pairs = zip(alone("cpu", 0), alone("cpu", 1), strict=True)
    assert all(not np.array_equal(a.sample.logprobs, b.sample.logprobs) for a, b in pairs)


def eventful(engine: RolloutEngine) -> list[Output]:
    """Arrivals, a cancellation and an update in the middle of a tight pool."""
    outputs: list[Output] = []
    for tick in range(400):
        if tick < len(mixed_jobs()):
            engine.add(mixed_jobs()[tick])
        if tick == 5:
            engine.cancel(1)
        if tick == 8:
            engine.load_weights(updated(), "finish")
        outputs += engine.step()
        if not engine.unfinished and tick > 8:
            break
    return outputs


def test_a_log_can_be_replayed(tmp_path: Path) -> None:
    """Decision by decision: the same log and the same bits, from its file."""
    engine = make_engine(**TIGHT)
    outputs = eventful(engine)
    kinds = {action[0] for entry in passes(engine.log.entries) for action in entry.actions}
    assert kinds >= {"admit", "compute", "preempt"}, kinds
    engine.log.write(tmp_path / "log.jsonl")
    entries = read_log(tmp_path / "log.jsonl")
    assert entries == engine.log.entries
    again = make_engine(**TIGHT)
    replayed = again.replay(mixed_jobs(), entries, {1: updated()})
    assert again.log.entries == entries
    assert [output.number for output in replayed] == [output.number for output in outputs]
    for a, b in zip(replayed, outputs, strict=True):
        assert_same(a, b, f"sample {a.number}")


def test_a_log_of_another_run_is_refused() -> None:
    """The control: other decisions, or jobs that grow to other lengths, do not pass for a replay."""
    engine = make_engine(**TIGHT)
    eventful(engine)
    entries = engine.log.entries
    place, entry = next((i, e) for i, e in enumerate(entries) if isinstance(e, Pass) and len(e.actions) > 1)
    kind, number, start, count = entry.actions[-1]
    for wrong in ((kind, number, start + 1, count), (kind, 50, start, count), ("preempt", number, start, 0)):
        changed = [*entries]
        changed[place] = dataclasses.replace(entry, actions=(*entry.actions[:-1], wrong))
        with pytest.raises(ReplayMismatch):
            make_engine(**TIGHT).replay(mixed_jobs(), changed, {1: updated()})
    with pytest.raises(ReplayMismatch):
        make_engine(**TIGHT).replay(mixed_jobs()[:2], entries, {1: updated()})


def test_a_log_that_lost_its_beginning_is_not_written(tmp_path: Path) -> None:
    engine = make_engine(log_entries=3)
    draw(engine)
    assert len(engine.log.entries) == 3
    with pytest.raises(ReplayMismatch, match="entries are gone: raise log_entries above 3"):
        engine.log.write(tmp_path / "log.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"entry": "Added", "number": 1}\n{"entry": "Guess"}\n')
    with pytest.raises(ReplayMismatch, match=r"line 2 of bad\.jsonl"):
        read_log(tmp_path / "bad.jsonl")
    assert SchedulerLog(5).entries == []


def test_native_mode_runs_without_sharing_and_preemption() -> None:
    """The dense cache: samples come and go, rows move; nothing is shared or thrown away, whatever the pool's size."""
    engine = make_engine("sdpa", max_batch=3, chunk=16, pages=1)
    outputs = engine.run(list(mixed_jobs()))
    assert engine.statistics.shared_tokens == engine.statistics.preemptions == 0
    assert all(output.sample.response_tokens.size for output in outputs)
    engine.memory.check()
    again = make_engine("sdpa", max_batch=3, chunk=16).run(list(mixed_jobs()))
    for a, b in zip(outputs, again, strict=True):
        assert_same(a, b, "the same schedule again")
    for a, b in zip(outputs, alone("sdpa"), strict=True):
        length = min(len(a.sample.logprobs), len(b.sample.logprobs), 1)
        close = np.abs(a.sample.logprobs[:length] - b.sample.logprobs[:length])
        assert close.max() < 0.1, "bf16 noise at most in the first token's logprob"


@pytest.mark.parametrize("kind", ["cpu", "sdpa"])
def test_a_cache_of_no_fixed_size_grows_on_the_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is preempted, nothing is lost when the tensors move, and the bits stay."""
    expected = make_engine(kind, page=8, max_batch=3).run(list(mixed_jobs()))
    monkeypatch.setattr(memory, "EXPECTED", 0)
    engine = make_engine(kind, page=8, max_batch=3)
    engine.add(mixed_jobs()[5])
    before = engine.memory.cache.k[0].shape
    outputs = engine.run(list(mixed_jobs()))
    assert engine.memory.cache.k[0].shape != before
    engine.memory.check()
    assert engine.statistics.preemptions == 0
    for a, b in zip(outputs, expected, strict=True):
        if kind == "cpu":
            assert_same(a, b, "grown")
        else:
            assert a.sample.prompt == b.sample.prompt and len(a.sample.response_tokens) > 0
