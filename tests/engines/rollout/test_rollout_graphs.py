"""Captured decode passes: which may be replayed, how they are padded, when graphs are dropped. On a CPU, where a replay
computes on the memory that the capture saw (``tests/gpu/test_gpu_model.py`` has the same on a GPU)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from rl_engine.engines.rollout.builtin.engine import Job, Output, RolloutEngine, RolloutSettings, _gpu, fan_out
from rl_engine.engines.rollout.builtin.graphs import (
    Block,
    CaptureFailed,
    Common,
    DecodeGraphs,
    Inputs,
    captured_sizes,
)
from rl_engine.engines.rollout.builtin.memory import PagedMemory
from rl_engine.engines.snapshot import export_snapshot
from rl_engine.ops import Operators, uniform
from rl_engine.ops.sample import NonFiniteLogits
from tests.engines.rollout.schedules import (
    Schedule,
    alone,
    assert_same,
    make_engine,
    mixed_jobs,
    play,
    schedules,
    small_weights,
)
from tests.engines.rollout.test_rollout_schedules import TIGHT
from tests.helpers.models import differing, joined, prompts, rollout_logprobs, sampling

QUIET = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
PLAIN = sampling(max_response_len=14)


def plain_jobs() -> list[Job]:
    """Seven samples without filters, of several seeds and steps, that end at different lengths."""
    first, second, third = prompts(1501, (40, 9, 1))
    return [
        *(Job(request, 0, PLAIN) for request in fan_out(0, first, 3)),
        *(Job(r, 3, dataclasses.replace(PLAIN, seed=2**32 - 5, max_response_len=6)) for r in fan_out(1, second, 2)),
        *(Job(request, 0, dataclasses.replace(PLAIN, max_response_len=20)) for request in fan_out(2, third, 2)),
    ]


def check(found: list[Output], expected: list[Output]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b, f"sample {b.number}")


def without_graphs(jobs: list[Job] | None = None, **changes: object) -> list[Output]:
    return make_engine(**changes).run(plain_jobs() if jobs is None else jobs)


def test_replayed_passes_have_the_same_bits() -> None:
    engine = make_engine("graphs")
    check(engine.run(plain_jobs()), without_graphs())
    passes = engine.statistics
    assert passes.replayed > passes.passes // 2 and passes.captured == len(engine.graphs.captured) > 1
    engine.memory.check()


@seed(1)
@settings(QUIET, max_examples=10)
@given(schedules())
def test_bits_do_not_depend_on_the_schedule(schedule: Schedule) -> None:
    """Arrivals, cancellations, preemption, filters, every page size: beside samples alone and without graphs."""
    for index, output in play(schedule, "graphs").items():
        assert_same(output, alone()[index], f"job {index}")


@functools.cache
def stopped_jobs() -> tuple[Job, ...]:
    """:func:`plain_jobs` that often end before their length, by a token or by a text, or ask for raw logprobs."""
    first, second, third = plain_jobs()[0], plain_jobs()[3], plain_jobs()[5]
    stops = dataclasses.replace(first.sampling, stop_tokens=tuple(range(3, 150)))
    return (
        *(dataclasses.replace(job, sampling=stops) for job in plain_jobs()[:2]),
        dataclasses.replace(plain_jobs()[2], raw=True),
        dataclasses.replace(second, sampling=dataclasses.replace(second.sampling, stop_tokens=tuple(range(700, 900)))),
        plain_jobs()[4],
        dataclasses.replace(third, stop_strings=("17", "4.")),
        plain_jobs()[6],
    )


def play_both(schedule: Schedule, kind: str) -> list[RolloutEngine]:
    """:func:`stopped_jobs`, with graphs and without: the same outputs from the same decisions."""
    engines, others = list[RolloutEngine](), list[RolloutEngine]()
    found, expected = (play(schedule, k, jobs=stopped_jobs(), engines=e) for k, e in ((kind, engines), ("cpu", others)))
    assert found.keys() == expected.keys()
    for index, output in found.items():
        assert_same(output, expected[index], f"job {index}")
        assert (output.waited, output.preempted) == (expected[index].waited, expected[index].preempted)
    assert [engine.log.entries for engine in engines] == [engine.log.entries for engine in others]
    return engines


@seed(2)
@settings(QUIET, max_examples=12)
@given(schedules(), st.sampled_from(["graphs", "late"]))
def test_foreseen_passes_are_those_that_are_decided(schedule: Schedule, kind: str) -> None:
    """Arrivals, cancellations, preemption, ends that nobody could foresee: the logs are equal, entry by entry."""
    play_both(schedule, kind)


@pytest.mark.parametrize("late", [False, True], ids=["shared at once", "shared later"])
def test_passes_are_foreseen_under_ends_and_preemption(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """The cases that the test above is about do happen."""
    init = PagedMemory.__init__

    def shares(self: PagedMemory, *options: object) -> None:
        init(self, *options[:4], late)

    monkeypatch.setattr(PagedMemory, "__init__", shares)
    roomy = dataclasses.replace(TIGHT, slack=None, budget=10**6)
    for schedule, least in ((TIGHT, 3), (roomy, 8), (dataclasses.replace(roomy, share_prefixes=False), 8)):
        (engine,) = play_both(schedule, "late")
        assert least < engine.statistics.foreseen <= engine.statistics.passes
    reasons = [o.sample.finish_reason for o in play(roomy, "late", jobs=stopped_jobs()).values()]
    assert set(reasons) == {"stop", "length"}


def test_a_foreseen_pass_needs_the_stop_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where those are not looked at before a foreseen pass, samples go on."""
    jobs, of = list(stopped_jobs()[:2]), Common.of
    expected = make_engine("late").run(jobs)
    assert "stop" in {o.sample.finish_reason for o in expected}
    monkeypatch.setattr(Common, "of", lambda *batch: dataclasses.replace(of(*batch), stops=frozenset()))
    lengths = [
        [len(o.sample.response_tokens) for o in outputs] for outputs in (make_engine("late").run(jobs), expected)
    ]
    assert sum(lengths[0]) > sum(lengths[1])


def test_nothing_is_foreseen_where_a_sample_may_not_go_on() -> None:
    """By length, a cancellation or a reload the next pass is decided anew."""
    engine, other = (make_engine(kind) for kind in ("late", "cpu"))
    for each in (engine, other):
        for job in plain_jobs()[:3]:
            each.add(job)
        for _ in range(5):
            each.step()
        assert each.cancel(1)
        each.step()
        each.load_weights(export_snapshot(small_weights(1), 1))
    check(engine.step(), other.step())
    assert engine.log.entries == other.log.entries and engine.statistics.foreseen > 3
    short = make_engine("late")
    short.run([dataclasses.replace(plain_jobs()[0], sampling=dataclasses.replace(PLAIN, max_response_len=3))])
    assert short.statistics.foreseen == 1, "the first of three is drawn by the prefill, the second by a decode"


def test_a_tight_pool_replays_and_preempts() -> None:
    """The cases that the test above is about do happen; decisions are those of an engine without graphs."""
    outputs, expected = play(TIGHT, "graphs"), play(TIGHT)
    assert [o.preempted for o in outputs.values()] == [o.preempted for o in expected.values()]
    assert sum(o.preempted for o in outputs.values()) > 3
    engine = make_engine("graphs", **TIGHT.settings())
    engine.run(list(mixed_jobs()))
    assert engine.statistics.replayed > 5


def test_decisions_are_those_of_an_engine_without_graphs() -> None:
    """The scratch page is beside the pool, whether that grows or not."""
    for pages in (None, 11):
        with_graphs, without = (make_engine(kind, page=8, pages=pages) for kind in ("graphs", "cpu"))
        for engine in (with_graphs, without):
            engine.run(plain_jobs())
        assert with_graphs.log.entries == without.log.entries
        assert with_graphs.memory.limit() == without.memory.limit()


@pytest.mark.parametrize("sizes", [(7,), (2, 4), (1, 2, 3, 4, 5, 6, 7), (64,)], ids=str)
def test_padding_changes_no_bit(sizes: tuple[int, ...]) -> None:
    engine = make_engine("graphs", graph_sizes=sizes)
    check(engine.run(plain_jobs()), without_graphs())
    assert engine.statistics.replayed > 0 and set(engine.graphs.captured) <= set(sizes)


def test_padding_writes_to_the_scratch_page_alone() -> None:
    """Every page that a sample ever had is as it would be without padding."""
    padded, exact = (make_engine("graphs", graph_sizes=sizes) for sizes in ((64,), (3,)))
    for engine in (padded, exact):
        engine.run(plain_jobs()[:3])
    pages = [p for p in range(padded.memory.pool.pages) if p != padded.memory.scratch]
    for a, b in zip(padded.memory.cache.k, exact.memory.cache.k, strict=True):
        assert a.shape == b.shape and torch.equal(a[pages].view(torch.int16), b[pages].view(torch.int16))
    assert not torch.isnan(padded.memory.cache.k[0][padded.memory.scratch, :, :, 0]).any(), "nothing was padded"


def test_what_is_captured() -> None:
    assert captured_sizes((), 64) == ()
    assert captured_sizes((3, 1, 3), 64) == (1, 3)
    assert captured_sizes((3, 5, 6, 7), 64) == (3, 5, 7)
    assert captured_sizes(range(1, 49), 64) == (1, 2, 4, 8, 16, 32, 48)
    assert captured_sizes(range(1, 513), 5) == (1, 2, 4, 5)
    assert captured_sizes((4, 16, 128, 256), 64) == (4, 16, 128)
    assert captured_sizes(range(1, 513), 512) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def test_passes_that_are_launched() -> None:
    """Prefill and mixed passes, larger batches, an engine on a CPU; a graph is captured the second time."""
    engine = make_engine("graphs", chunk=16)
    taken: list[tuple[list[tuple[int, int]], bool]] = []
    take = engine.graphs.take

    def seen(work: list) -> bool:
        taken.append(([(count, sequence.remaining) for sequence, count in work], take(work)))
        return taken[-1][1]

    engine.graphs.take = seen
    check(engine.run(plain_jobs()), without_graphs())
    assert all(yes == all(pair == (1, 1) for pair in work) for work, yes in taken)
    assert {yes for _, yes in taken} == {True, False}
    assert any({(1, 1)} < set(work) for work, _ in taken), "no mixed pass"
    decodes = sum(yes for _, yes in taken) + engine.statistics.foreseen
    assert engine.statistics.replayed < decodes, "the first of a kind is launched"
    few = make_engine("graphs", graph_sizes=(1, 2))
    check(few.run(plain_jobs()), without_graphs())
    assert few.statistics.replayed < few.statistics.passes // 2
    ordinary = RolloutEngine(small_weights().clone(), make_engine().ops, 160, RolloutSettings(graph_sizes=(1, 2, 3)))
    assert ordinary.graphs is None and ordinary.memory.scratch is None


def test_who_captures() -> None:
    """One rank with the contract's operators of a GPU, nobody else."""
    gpu, ours, stock = torch.device("cuda", 0), Operators(uniform("cpu")), Operators(uniform("stock"))
    host = Operators(uniform("cpu"))
    ours.names.update(uniform("gpu"))  # what they can do is asked by name
    made: list[torch.device] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_engine.engines.rollout.builtin.cuda_graphs.CudaGraphDevice", made.append)
        for ops, device, mesh in (
            (ours, torch.device("cpu"), None),
            (stock, gpu, None),
            (host, gpu, None),
            (ours, gpu, SimpleNamespace(size=2)),
        ):
            assert _gpu(ops, device, mesh) is None and not made
        for mesh in (None, SimpleNamespace(size=1)):
            _gpu(ours, gpu, mesh)
        assert made == [gpu, gpu]


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="a graph of 0 samples"):
        RolloutSettings(graph_sizes=(1, 0))


def test_replayed_calls_are_counted_apart() -> None:
    """As many calls as without graphs, those of replays as such; a capture counts none."""
    engine, other = make_engine("graphs", graph_sizes=tuple(range(1, 8))), make_engine()
    for each in (engine, other):
        each.run(plain_jobs())
    graph = {(r.operator, r.rows): r.calls for r in engine.ops.routes() if r.execution == "graph"}
    assert graph and sum(graph.values()) > sum(r.calls for r in other.ops.routes()) // 3
    for route in other.ops.routes():
        same = [
            r for r in engine.ops.routes() if (r.operator, r.rows, r.dtype) == (route.operator, route.rows, route.dtype)
        ]
        if route.operator not in ("sample", "selected_logp", "lm_head"):  # graphs draw for all groups at once
            assert sum(r.calls for r in same) == route.calls, route
    assert {r.provider for r in engine.ops.routes()} == {"cpu"}


def reloaded(engine: RolloutEngine) -> list[Output]:
    """Samples of the first weights, then of others."""
    first = engine.run(plain_jobs()[:3])
    engine.load_weights(export_snapshot(small_weights(1), 1))
    return first + engine.run(plain_jobs()[:3])


def test_new_weights_elsewhere_drop_the_graphs() -> None:
    engine = make_engine("graphs")
    check(reloaded(engine), reloaded(make_engine()))
    assert engine.statistics.captured > len(set(engine.graphs.captured)), "captured again"


def grown(engine: RolloutEngine) -> list[Output]:
    """Samples that begin one after another while the others go on, so that the pool grows under them."""
    outputs: list[Output] = []
    for job in plain_jobs():
        engine.add(job)
        for _ in range(4):
            outputs += engine.step()
    while engine.unfinished:
        outputs += engine.step()
    return sorted(outputs, key=lambda output: output.number)


def test_a_pool_that_grows_drops_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_engine.engines.rollout.builtin.memory.EXPECTED", 1)
    engine = make_engine("graphs", page=8)
    check(grown(engine), grown(make_engine(page=8)))
    assert engine.statistics.replayed > 10


def test_wider_tables_move_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    new = DecodeGraphs._new_inputs
    monkeypatch.setattr(DecodeGraphs, "_new_inputs", lambda self, width: new(self, 1 if width == 64 else width))
    engine = make_engine("graphs", page=8)
    check(engine.run(plain_jobs()), without_graphs())
    assert engine.graphs._inputs.width == 8 and engine.statistics.replayed > 10


def stale_addresses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeGraphs, "addresses", lambda self: ())


def stale_tables(patch: pytest.MonkeyPatch) -> None:
    begin = Inputs._begin

    def once(self: Inputs, row: int, sequence: object, table: list[int]) -> None:
        begin(self, row, sequence, table)
        self.block.host["tables"][row, : len(table)] = table
        self._written[row] = 10**6

    patch.setattr(Inputs, "_begin", once)


def stale_rows(patch: pytest.MonkeyPatch) -> None:
    """A row does not notice that another sample has it."""
    begin = Inputs._begin

    def first(self: Inputs, row: int, sequence: object, table: list[int]) -> None:
        words = self.block.host["words"][row].copy()
        begin(self, row, sequence, table)
        if words.any():
            self.block.host["words"][row] = words

    patch.setattr(Inputs, "_begin", first)


def pads_on_live_pages(patch: pytest.MonkeyPatch) -> None:
    init = Inputs.__init__

    def live(self: Inputs, device: object, rows: int, width: int, page: int, scratch: int) -> None:
        init(self, device, rows, width, page, scratch + 1)

    patch.setattr(Inputs, "__init__", live)


def stale_pages(patch: pytest.MonkeyPatch) -> None:
    """A foreseen pass does not notice that a page begins."""
    advance = Inputs.advance
    patch.setattr(Inputs, "advance", lambda self, count: advance(self, count)[:0])


def stale_tokens(patch: pytest.MonkeyPatch) -> None:
    """A foreseen pass computes the tokens of the pass before again."""
    complete = Inputs.complete

    def same(self: Inputs, ids: list[int], opened: list[int], tables: list[list[int]]) -> None:
        complete(self, self.block.host["ids"][: len(ids)].tolist(), opened, tables)

    patch.setattr(Inputs, "complete", same)


def unstaged(patch: pytest.MonkeyPatch) -> None:
    """Inputs are written where a pass in flight may still read them."""
    init = Block.__init__
    patch.setattr(Block, "__init__", lambda self, device, shapes, staged=False: init(self, device, shapes))


def run(engine: RolloutEngine) -> list[Output]:
    return engine.run(plain_jobs())


@pytest.mark.parametrize(
    ("control", "scene", "changes"),
    [
        (stale_addresses, reloaded, {}),
        (stale_addresses, grown, {"page": 8}),
        (stale_tables, run, {"page": 8}),
        (stale_rows, run, {}),
        (pads_on_live_pages, run, {"graph_sizes": (64,)}),
        (stale_pages, run, {"page": 8}),
        (stale_tokens, run, {}),
        (unstaged, run, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_without_the_care_bits_change(
    monkeypatch: pytest.MonkeyPatch,
    control: Callable[[pytest.MonkeyPatch], None],
    scene: Callable[[RolloutEngine], list[Output]],
    changes: dict[str, object],
) -> None:
    """The controls: addresses kept over a reload or a growing pool, tables or rows not written anew, padding on a page
    of a sample, foreseen passes without what was not known yet, inputs written while a pass may read them. What a stale
    address reads may be a page that nobody wrote, which is NaN."""
    monkeypatch.setattr("rl_engine.engines.rollout.builtin.memory.EXPECTED", 1)
    expected = scene(make_engine(**{k: v for k, v in changes.items() if k != "graph_sizes"}))
    control(monkeypatch)
    engine = make_engine("late", **changes)
    try:
        found = scene(engine)
    except NonFiniteLogits:
        return
    finally:
        assert engine.statistics.replayed > 0
    values = [rollout_logprobs([output.sample for output in outputs]) for outputs in (found, expected)]
    assert differing(values[0], values[1]) > 5


def test_a_nan_is_refused() -> None:
    engine = make_engine("graphs")
    engine.run(plain_jobs()[:2])
    for weight in engine.weights:
        if weight.name == "model.norm.weight":
            weight.value.fill_(torch.nan)
    with pytest.raises(NonFiniteLogits, match="no token can be drawn"):
        engine.run(plain_jobs()[2:4])
    assert engine.unfinished == 0


def test_a_capture_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("graphs")

    def fails(run: Callable[[], None]) -> Callable[[], None]:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    engine.graphs.device.capture = fails
    with pytest.raises(CaptureFailed, match=r"a decode pass of 4 samples could not be captured as a graph \(operation"):
        engine.run(plain_jobs()[:3])
    assert engine.unfinished == 0 and engine.statistics.replayed == 0


def test_at_most_so_many_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_engine.engines.rollout.builtin.graphs.MOST", 1)
    engine = make_engine("graphs")
    check(engine.run(plain_jobs()), without_graphs())
    assert len(engine.graphs._graphs) == 1 and engine.statistics.replayed > 5


def test_a_log_is_replayed_with_graphs() -> None:
    jobs = plain_jobs()
    first = make_engine("graphs", max_batch=3)
    expected = first.run(jobs)
    again = make_engine("graphs", max_batch=3)
    check(sorted(again.replay(jobs, first.log.entries), key=lambda output: output.number), expected)


def test_samples_of_several_seeds_and_steps_draw_in_one_graph() -> None:
    engine = make_engine("graphs")
    engine.run(plain_jobs())
    kinds = set(engine.graphs._graphs)
    assert kinds and {kind.temperature for kind in kinds} == {1.0}
    assert np.isfinite(joined([o.sample.logprobs for o in engine.run(plain_jobs())])).all()
