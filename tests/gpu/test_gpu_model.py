"""A whole model on one GPU: the trainer's logprobs are the rollout's in every bit, gradients and updates depend on no
packing, values are close to fp64. Controls put torch's own operators, or sums in halves, in place of ours."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.engines.rollout.builtin.engine import Job, RolloutEngine, RolloutSettings
from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.engines.types import Request, Sample, canonical
from rl_engine.models.config import ModelConfig
from rl_engine.models.decoder import Decoder
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.ops import Operators, uniform
from rl_engine.ops.operators import WrongDevice
from rl_engine.ops.weight import Weight
from tests.engines import double_precision
from tests.helpers.gpu import differing as differing_on_gpu
from tests.helpers.gpu import needs_gpu
from tests.helpers.models import (
    differing,
    joined,
    llama,
    prompts,
    qwen3,
    requests,
    rollout_logprobs,
    sampling,
    train_settings,
)
from tests.helpers.numeric import assert_bitwise, assert_close

pytestmark = [pytest.mark.gpu, needs_gpu]

DEVICE = torch.device("cuda", 0)
SIZES = {"layers": 3, "intermediate": 1536}
FAMILIES: dict[str, ModelConfig] = {
    "qwen3": qwen3(**SIZES, head_dim=128, vocabulary=32_771),
    "qwen3 tied": qwen3(**SIZES, head_dim=128, vocabulary=32_768, tied=True),
    "llama": llama(**SIZES, vocabulary=32_000),
    "llama tied": llama(**SIZES, vocabulary=32_771, tied=True, kv_heads=4),
}
PROMPTS = (7, 1, 170, 1045)  # the last is longer than a KV split
POSITIONS = 1100
SAMPLING = sampling(max_response_len=24, stop_tokens=tuple(range(3, 1500)))
FEW = 64  # rows up to which a library may split the inner axis
CUTS = ((300, 16), (37, 64), (1, 64))  # tokens of a chunk, of a page
TABLE_ROWS = (8, 64, 2048)
ADVANTAGES = [1.0, -1.0, 0.5, -2.0, 1.0, 1.5, -0.7]


def operators(**changed: str) -> Operators:
    """Triton everywhere, except for the operators named."""
    return Operators({**uniform("triton"), **changed})


def stock() -> Operators:
    """torch's own operators where torch has one, Triton's sampler and optimizer."""
    return Operators(uniform("stock", update="triton"))


def split() -> Operators:
    """A control: a linear layer that sums two halves of its inner axis apart where rows are few, as libraries may."""
    from rl_engine.ops.linear.triton import TritonLinear

    class Split(TritonLinear):
        def forward(self, x: Tensor, weight: Weight, residual: Tensor | None) -> Tensor:
            if x.shape[0] > FEW:
                return super().forward(x, weight, residual)
            halves = zip(x.float().chunk(2, 1), weight.value.float().chunk(2, 1), strict=True)
            first, second = (a @ b.T for a, b in halves)
            branch = first + second
            return (branch if residual is None else residual.float() + branch).bfloat16()

    ops = operators()
    ops._providers["linear"] = Split()
    return ops


def controls(config: ModelConfig) -> list[Callable[[], Operators]]:
    """torch's own operators are one only at head_dim 128: at 64 they agree in all forms of these sizes."""
    return [split, stock] if config.head_dim == 128 else [split]


def rollout(weights: ModelWeights, ops: Operators, **settings: Any) -> RolloutEngine:
    return RolloutEngine(weights.clone(), ops, POSITIONS, RolloutSettings(**settings))


def trainer(weights: ModelWeights, ops: Operators, **settings: Any) -> TrainEngine:
    return TrainEngine(weights.clone(), ops, POSITIONS, train_settings(**{"lr": 3e-5, **settings}))


def asked(config: ModelConfig) -> list[Request]:
    """Seven requests: two samples of each short prompt, one of the long one."""
    return requests(prompts(config.vocabulary, PROMPTS), 2)[:-1]


@dataclasses.dataclass(frozen=True)
class Scene:
    """A family's weights on the GPU, and what its rollout engine drew with them."""

    config: ModelConfig
    weights: ModelWeights
    samples: list[Sample]

    @property
    def whole(self) -> list[Sample]:
        """The samples with everything behind their first token as response, so that every token has a logprob."""
        joint = [np.concatenate([s.prompt_tokens, s.response_tokens]) for s in self.samples]
        return [
            dataclasses.replace(s, prompt_tokens=tokens[:1], response_tokens=tokens[1:])
            for s, tokens in zip(self.samples, joint, strict=True)
        ]


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request: pytest.FixtureRequest) -> Scene:
    config = FAMILIES[request.param]
    weights = random_weights(config, 0, device=DEVICE)
    return Scene(config, weights, rollout(weights, operators(), chunk=400).generate(asked(config), 0, SAMPLING))


def test_samples_are_ragged(scene: Scene) -> None:
    lengths = {len(s.response_tokens) for s in scene.samples}
    assert len(lengths) > 2, lengths
    assert 1400 < sum(s.length for s in scene.samples) < 1700


def test_trainer_has_the_rollouts_logprobs(scene: Scene) -> None:
    """Whatever the packing; the controls' differ."""
    reported = rollout_logprobs(scene.samples)
    for packing in ({}, {"fold_tokens": 100}, {"max_tokens": 1100}, {"max_tokens": 10_000}):
        scores = joined(trainer(scene.weights, operators(), **packing).score(scene.samples))
        assert_bitwise(scores, reported, f"packing {packing}")
    for control in controls(scene.config):
        drawn = rollout(scene.weights, control(), chunk=400).generate(asked(scene.config), 0, SAMPLING)
        scores = joined(trainer(scene.weights, control()).score(drawn))
        assert differing(scores, rollout_logprobs(drawn)) > 0.3 * scores.size, f"{control.__name__} agreed by chance"


def paged_logprobs(
    weights: ModelWeights, ops: Operators, samples: list[Sample], chunk: int, page: int
) -> np.ndarray[Any, Any]:
    """fp32, every token but the first of each sample: all samples together through a cache in pages of ``page``,
    ``chunk`` tokens of each at a time."""
    decoder = Decoder(weights, ops, POSITIONS)
    tokens = [torch.from_numpy(np.concatenate([s.prompt_tokens, s.response_tokens]).astype(np.int64)) for s in samples]
    config, pages = weights.config, sum(-(-len(t) // page) for t in tokens)
    cache = ops.new_cache(config.layers, config.kv_heads, config.head_dim, pages, page, DEVICE)
    handles, starts = [cache.join() for _ in tokens], [0] * len(tokens)
    found: list[list[Tensor]] = [[] for _ in tokens]
    with torch.no_grad():
        while live := [i for i, t in enumerate(tokens) if starts[i] < len(t) - 1]:
            counts = [min(chunk, len(tokens[i]) - 1 - starts[i]) for i in live]
            parts = [slice(starts[i], starts[i] + n) for i, n in zip(live, counts, strict=True)]
            batch = cache.batch([handles[i] for i in live], [starts[i] for i in live], counts)
            hidden = decoder.hidden(
                torch.cat([tokens[i][part] for i, part in zip(live, parts, strict=True)]),
                batch.positions,
                lambda layer, q, k, v, batch=batch: ops.attention_cached(q, k, v, cache, layer, batch),
            )
            following = [tokens[i][part.start + 1 : part.stop + 1] for i, part in zip(live, parts, strict=True)]
            logp = decoder.raw_logprobs(hidden, torch.cat(following).to(DEVICE))
            for i, values in zip(live, logp.split(counts), strict=True):
                found[i].append(values)
                starts[i] += len(values)
    return torch.cat([torch.cat(values) for values in found]).cpu().numpy()


def test_training_prefill_and_decode_are_one_arithmetic(scene: Scene) -> None:
    """Every token of every sample: packed, in chunks through the cache, and one by one through it."""

    def forms(ops: Callable[[], Operators], cuts: Sequence[tuple[int, int]]) -> list[np.ndarray[Any, Any]]:
        packed = joined(trainer(scene.weights, ops(), fold_tokens=512).score(scene.whole))
        return [packed, *(paged_logprobs(scene.weights, ops(), scene.samples, *cut) for cut in cuts)]

    packed, *paged = forms(operators, CUTS)
    assert packed.size > 1400
    for values, cut in zip(paged, CUTS, strict=True):
        assert_bitwise(values, packed, f"chunk {cut[0]}, page {cut[1]}")
    for control in controls(scene.config):
        packed, *paged = forms(control, CUTS[:2])
        assert sum(differing(values, packed) for values in paged) > 500, f"{control.__name__} agreed by chance"


def check_samples(found: list[Sample], expected: list[Sample]) -> None:
    """The same tokens and logprobs, sample by sample."""
    for a, e in zip(found, expected, strict=True):
        assert_bitwise(a.response_tokens, e.response_tokens, f"tokens of sample {(a.prompt, a.sample)}")
        assert_bitwise(a.logprobs, e.logprobs, f"logprobs of sample {(a.prompt, a.sample)}")


@pytest.mark.parametrize("settings", [{"max_batch": 1}, {"chunk": 7, "page": 64, "max_batch": 3}], ids=str)
def test_rollout_does_not_depend_on_its_schedule(scene: Scene, settings: dict[str, int]) -> None:
    """Batches, chunks, pages."""
    check_samples(
        rollout(scene.weights, operators(), **settings).generate(asked(scene.config), 0, SAMPLING), scene.samples
    )


def test_preempted_samples_have_the_same_bits(scene: Scene) -> None:
    """The pool holds every prompt and too few of the responses' tokens, so that samples are computed again."""
    settings = sampling(max_response_len=24)
    expected = rollout(scene.weights, operators()).generate(asked(scene.config), 0, settings)
    engine = rollout(scene.weights, operators(), pages=82)
    check_samples(engine.generate(asked(scene.config), 0, settings), expected)
    assert engine.statistics.preemptions > 0


EVERY_SIZE = tuple(range(1, 65))


@pytest.mark.parametrize(
    "settings",
    [{}, {"page": 64}, {"chunk": 7, "page": 64, "max_batch": 3}, {"graph_sizes": (16,)}, {"page": 128, "chunk": 400}],
    ids=str,
)
def test_replayed_graphs_have_the_same_bits(scene: Scene, settings: dict[str, Any]) -> None:
    """Samples come and go, lengths cross a KV split, batches are padded, pages are small and large."""
    engine = rollout(scene.weights, operators(), **{"graph_sizes": EVERY_SIZE, **settings})
    check_samples(engine.generate(asked(scene.config), 0, SAMPLING), scene.samples)
    seen = engine.statistics
    assert seen.replayed > 3 and seen.captured == len(engine.graphs.captured) > 0 and seen.foreseen > 0, seen
    again = engine.generate(asked(scene.config), 0, SAMPLING)
    check_samples(again, scene.samples)
    engine.memory.check()
    assert {r.execution for r in engine.ops.routes()} == {"eager", "graph"}


def test_replayed_graphs_of_preempted_samples(scene: Scene) -> None:
    """A tight pool: pages move from one sample to another between replays."""
    settings = sampling(max_response_len=24)
    expected = rollout(scene.weights, operators()).generate(asked(scene.config), 0, settings)
    engine = rollout(scene.weights, operators(), pages=82, graph_sizes=EVERY_SIZE)
    check_samples(engine.generate(asked(scene.config), 0, settings), expected)
    assert engine.statistics.preemptions > 0 and engine.statistics.replayed > 0


def later_arrivals(engine: RolloutEngine, config: ModelConfig) -> list[Sample]:
    """The requests begin one after another, so that a pool without a fixed size grows under samples that decode."""
    outputs = []
    for request in asked(config):
        engine.add(Job(request, 0, SAMPLING))
        for _ in range(5):
            outputs += engine.step()
    while engine.unfinished:
        outputs += engine.step()
    return [output.sample for output in sorted(outputs, key=lambda output: output.number)]


def test_graphs_are_dropped_when_the_pool_grows(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_engine.engines.rollout.builtin.memory.EXPECTED", 1)
    engine = rollout(scene.weights, operators(), graph_sizes=EVERY_SIZE)
    check_samples(later_arrivals(engine, scene.config), scene.samples)
    assert engine.statistics.replayed > 0


def test_graphs_hold_over_new_weights_in_their_place(scene: Scene) -> None:
    """A reload writes into the same memory: nothing is captured anew, and the bits are those of the new weights.
    Weights elsewhere drop the graphs."""
    from rl_engine.engines.snapshot import export_snapshot

    other = random_weights(scene.config, 1, device=DEVICE)
    few, settings = asked(scene.config)[:4], sampling(max_response_len=12)
    expected = rollout(other, operators()).generate(few, 0, settings)
    engine = rollout(scene.weights, operators(), graph_sizes=(4,))
    before = engine.generate(few, 0, settings)
    captured = engine.statistics.captured
    engine.load_weights(export_snapshot(other, 1))
    check_samples(engine.generate(few, 0, settings), expected)
    assert engine.statistics.captured == captured > 0
    assert differing(rollout_logprobs(before), rollout_logprobs(expected)) > 0
    for weight, value in zip(engine.weights, (w.value for w in scene.weights), strict=True):
        weight.value = value.clone()
    engine.memory.forget()
    check_samples(engine.generate(few, 0, settings), before)
    assert engine.statistics.captured > captured


@pytest.mark.parametrize("control", ["addresses", "tables", "padding"])
def test_without_the_care_graphs_change_bits(scene: Scene, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: graphs kept over weights that lie elsewhere, tables that are not written on, padding on a page of a
    sample."""
    from rl_engine.engines.rollout.builtin.graphs import DecodeGraphs, Inputs
    from rl_engine.ops.sample import NonFiniteLogits

    begin, init = Inputs._begin, Inputs.__init__

    def once(self: Inputs, row: int, sequence: Any, table: list[int]) -> None:
        begin(self, row, sequence, table)
        self.block.host["tables"][row, : len(table)] = table
        self._written[row] = 10**6

    def live(self: Inputs, device: Any, rows: int, width: int, page: int, scratch: int) -> None:
        init(self, device, rows, width, page, scratch + 1)

    few = [request for request in asked(scene.config) if len(request.tokens) < 8]
    settings = sampling(max_response_len=24)
    expected = rollout(scene.weights, operators()).generate(few, 0, settings)
    if control == "tables":
        monkeypatch.setattr(Inputs, "_begin", once)
    elif control == "padding":
        monkeypatch.setattr(Inputs, "__init__", live)
    else:
        monkeypatch.setattr(DecodeGraphs, "addresses", lambda self: ())
    engine = rollout(scene.weights, operators(), graph_sizes=(8,))
    if control == "addresses":
        kept = [weight.value for weight in engine.weights]
        other = random_weights(scene.config, 1, device=DEVICE)
        for weight, value in zip(engine.weights, (w.value for w in other), strict=True):
            weight.value = value.clone()
        engine.generate(few, 0, settings)
        replaced = [weight.value for weight in engine.weights]  # alive, as what a graph reads must be
        for weight, value in zip(engine.weights, kept, strict=True):
            weight.value = value
        engine.memory.forget()
        assert len(replaced) == len(kept)
    try:
        found = engine.generate(few, 0, settings)
    except NonFiniteLogits:
        return
    finally:
        assert engine.statistics.replayed > 0
    assert differing(rollout_logprobs(found), rollout_logprobs(expected)) > 5


def test_filters_and_temperature(scene: Scene) -> None:
    """The trainer scores over the retained sets that the rollout drew from; raw logprobs are those of temperature 1 and
    every column."""
    settings = sampling(max_response_len=12, temperature=0.7, top_k=50, top_p=0.9)
    jobs = [Job(request, 0, settings, raw=True) for request in asked(scene.config)]
    outputs = rollout(scene.weights, operators()).run(jobs)
    graphs = rollout(scene.weights, operators(), graph_sizes=EVERY_SIZE)
    for a, b in zip(graphs.run(jobs), outputs, strict=True):
        check_samples([a.sample], [b.sample])
        assert_bitwise(a.raw_logprobs, b.raw_logprobs, "raw")
    assert graphs.statistics.replayed > 0, "hidden states at least come from graphs"
    drawn = [output.sample for output in outputs]
    assert all(s.retained is not None for s in drawn)
    scores = joined(trainer(scene.weights, operators(), temperature=0.7).score(drawn))
    assert_bitwise(scores, rollout_logprobs(drawn), "retained sets")
    without = [dataclasses.replace(s, retained=None) for s in drawn]
    assert differing(joined(trainer(scene.weights, operators(), temperature=0.7).score(without)), scores) > 0
    raw = joined([output.raw_logprobs for output in outputs if output.raw_logprobs is not None])
    assert_bitwise(raw, joined(trainer(scene.weights, operators()).score(without)), "raw")


def record(engine: TrainEngine, samples: list[Sample]) -> dict[str, Any]:
    """Every array of one update that must not depend on packing."""
    scores = engine.score(samples)
    result = engine.step(samples, ADVANTAGES, scores)
    found: dict[str, Any] = {f"gradient of {name}": g.cpu() for name, g in engine.gradients().items()}
    for name, state in engine.state.items():
        found |= {f"{kind} of {name}": getattr(state, kind).cpu() for kind in ("master", "m", "v")}
    found |= {f"weight {weight.name}": weight.value.detach().cpu() for weight in engine.weights}
    metrics = (result.loss, result.entropy_mean, result.grad_norm, float(result.ratio_mismatches))
    return found | {"metrics": np.array(metrics), "scores behind": joined(engine.score(samples))}


def test_updates_do_not_depend_on_packing(scene: Scene) -> None:
    """Gradients, moments, masters, weights and the scores behind them; and the rollout takes the weights over."""
    first = trainer(scene.weights, operators())
    expected = record(first, scene.samples)
    assert expected["metrics"][3] == 0.0, "the ratio of a first update is 1"
    for packing in ({"max_tokens": 1100}, {"max_tokens": 10_000}, {"max_tokens": 10_000, "recompute": False}):
        actual = record(trainer(scene.weights, operators(), **packing), scene.samples)
        assert actual.keys() == expected.keys()
        for name, values in expected.items():
            assert_bitwise(actual[name], values, f"{name}, packing {packing}")
    engine, snapshot = rollout(scene.weights, operators(), chunk=400), first.export()
    assert engine.load_weights(snapshot) == snapshot.digests
    drawn = engine.generate(asked(scene.config), 1, SAMPLING)
    assert_bitwise(joined(first.score(drawn)), rollout_logprobs(drawn), "behind the update")


def separate() -> Operators:
    """QK norm and rotation as two operators."""
    ops = operators()
    ops.fuses_qk_norm = lambda width: False  # type: ignore[method-assign]
    return ops


@pytest.mark.parametrize("scene", ["qwen3", "qwen3 tied"], indirect=True)
def test_the_fused_rotation_has_the_separate_operators_bits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """QK norm and RoPE in one kernel: prefill, decode, decode in graphs, scores, gradients. The control: a kernel that
    rotates before it rounds."""
    import triton

    from rl_engine.ops.rope import triton as code
    from rl_engine.qualify.gpu_attention import replaced

    both, fused = {"qk_norm", "rope"}, "qk_norm_rope"
    for sizes in ((), EVERY_SIZE):
        engine = rollout(scene.weights, separate(), graph_sizes=sizes)
        check_samples(engine.generate(asked(scene.config), 0, SAMPLING), scene.samples)
        assert both < {route.operator for route in engine.ops.routes()} and not engine.ops.fuses_qk_norm(128)
        engine = rollout(scene.weights, operators(), graph_sizes=sizes)
        check_samples(engine.generate(asked(scene.config), 0, SAMPLING), scene.samples)
        called = {(route.operator, route.execution) for route in engine.ops.routes()}
        assert {form for operator, form in called if operator == fused} == {"eager", *(["graph"] if sizes else [])}
        assert not both & {operator for operator, _ in called}
    for settings in ({}, {"recompute": False}):
        expected = record(trainer(scene.weights, separate(), **settings), scene.samples)
        engine = trainer(scene.weights, operators(), **settings)
        actual = record(engine, scene.samples)
        for name, values in expected.items():
            assert_bitwise(actual[name], values, f"{name}, {settings}")
        assert not both & {route.operator for route in engine.ops.routes()}

    @triton.jit
    def unrounded(x):  # type: ignore[no-untyped-def]
        return x

    rows = replaced(code.norm_rope_rows, round_bf16=unrounded)
    with monkeypatch.context() as patch:
        patch.setattr(code, "qk_norm_rope_kernel", replaced(code.qk_norm_rope_kernel, norm_rope_rows=rows))
        scores = joined(trainer(scene.weights, operators()).score(scene.samples))
    assert differing(scores, rollout_logprobs(scene.samples)) > 0.3 * scores.size


def proven_table(config: ModelConfig) -> Any:
    """The products of one model, each proven and chosen at a few row counts, as ``qualify`` does at many."""
    from rl_engine.ops import gemm_table
    from rl_engine.qualify.gpu import run
    from rl_engine.qualify.gpu.data import Inputs
    from rl_engine.qualify.gpu.parts import pool
    from rl_engine.qualify.gpu.products import Folds, Products

    inputs, entries, proven = Inputs(), {}, {}
    with pool() as processes:
        concurrent.futures.wait(run.warm(processes, run.shapes(config), TABLE_ROWS))
    for shape in run.shapes(config):
        prover = (Folds if shape.kind == "fold" else Products)(shape, inputs)
        few = shape.kind == "fold" or (shape.kind == "logits" and shape.columns == config.vocabulary)
        entries[str(shape)], _ = prover.choose(TABLE_ROWS[1:2] if few else TABLE_ROWS)
        proven[str(shape)] = sorted(prover.proven)
    return gemm_table.Table(gemm_table.identity(), entries, proven=proven)


@pytest.mark.parametrize("scene", ["qwen3 tied"], indirect=True)
def test_the_proven_tables_products_have_the_same_bits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt and measured tiles in place of Triton's default tiles: rollout, scores and a whole update."""
    from rl_engine.ops import gemm_table

    table = proven_table(scene.config)
    assert {choice.provider for found in table.entries.values() for _, choice in found} == {"triton", "cublaslt"}
    monkeypatch.setattr(gemm_table, "current", lambda: table)
    drawn = rollout(scene.weights, Operators(uniform("gpu"))).generate(asked(scene.config), 0, SAMPLING)
    assert_bitwise(rollout_logprobs(drawn), rollout_logprobs(scene.samples), "rollout")
    graphs = rollout(scene.weights, Operators(uniform("gpu")), graph_sizes=EVERY_SIZE)
    check_samples(graphs.generate(asked(scene.config), 0, SAMPLING), scene.samples)
    assert graphs.statistics.replayed > 0
    expected = record(trainer(scene.weights, operators()), scene.samples)
    for packing in ({}, {"max_tokens": 10_000}):
        actual = record(trainer(scene.weights, Operators(uniform("gpu")), **packing), scene.samples)
        for name, values in expected.items():
            assert_bitwise(actual[name], values, f"{name}, packing {packing}")


def test_gradients_of_torchs_products_depend_on_packing(scene: Scene) -> None:
    """The control: bf16 gradients of a micro-batch, as torch's own linear layers have them."""
    first, second = (
        record(trainer(scene.weights, operators(linear="stock"), **packing), scene.samples)
        for packing in ({}, {"max_tokens": 10_000})
    )
    gradients = [name for name in first if name.startswith("gradient of")]
    assert sum(differing_on_gpu(first[name], second[name]) for name in gradients) > 100_000


def test_values_are_close_to_fp64(scene: Scene) -> None:
    """Log-probabilities and every gradient: at most twice the error of torch's own operators in the same engine."""
    with torch.device(DEVICE):
        model = double_precision.Model(scene.config, scene.weights.export())
        truth = double_precision.update(
            *(model, model, scene.samples, ADVANTAGES),
            [model.logprobs(s, 1.0).detach().cpu().numpy() for s in scene.samples],
            *(1.0, 0.2, 0.0),
        )
    found = {}
    for name, ops in (("ours", operators()), ("stock", stock())):
        engine = trainer(scene.weights, ops)
        scores = engine.score(scene.samples)
        engine.step(scene.samples, ADVANTAGES, scores)
        found[name] = (joined(scores).astype(np.float64), engine.gradients())
    worst = np.abs(found["stock"][0] - truth.logprobs).max()
    assert worst < 0.3, f"torch's own error {worst:.3g} is no yardstick"
    assert_close(found["ours"][0], truth.logprobs, rtol=0.0, atol=2 * worst, why="twice torch's worst")
    for name, exact in truth.gradients.items():
        error, allowed = (float((found[side][1][name].double() - exact).norm() / exact.norm()) for side in found)
        assert allowed < 0.2, f"{name}: torch's own error {allowed:.3g} is no yardstick"
        assert error <= 2 * allowed, f"{name}: error {error:.3g}, torch {allowed:.3g}"


def test_samples_come_in_canonical_order(scene: Scene) -> None:
    """Requests in another order are the same samples."""
    shuffled = rollout(scene.weights, operators(), max_batch=3).generate(asked(scene.config)[::-1], 0, SAMPLING)
    check_samples(canonical(shuffled), scene.samples)


def test_second_updates_with_a_reference_model(scene: Scene) -> None:
    """Off-policy, with a KL term and moments that are not empty: still no packing in the bits."""

    def second(**packing: Any) -> dict[str, Any]:
        settings = train_settings(lr=3e-4, kl_coef=0.1, **packing)
        engine = TrainEngine(scene.weights.clone(), operators(), POSITIONS, settings, scene.weights.clone())
        old, reference = engine.score(scene.samples), engine.score_reference(scene.samples)
        assert_bitwise(joined(reference), joined(old), "the reference is where the policy starts")
        engine.step(scene.samples, ADVANTAGES, old, reference)
        result = engine.step(scene.samples, ADVANTAGES, old, reference)
        assert result.ratio_mismatches > 0 and result.kl_mean > 0
        found: dict[str, Any] = {f"gradient of {name}": g.cpu() for name, g in engine.gradients().items()}
        found |= {f"master of {name}": state.master.cpu() for name, state in engine.state.items()}
        return found | {"metrics": np.array([result.loss, result.kl_mean, result.grad_norm, result.clip_fraction])}

    expected, actual = second(), second(max_tokens=10_000)
    for name, values in expected.items():
        assert_bitwise(actual[name], values, name)


@pytest.mark.parametrize("scene", ["llama"], indirect=True)
def test_files_carry_state_and_weights(scene: Scene, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from rl_engine.engines.train.state import load_state, save_state
    from rl_engine.models.checkpoint import load_weights, save_checkpoint

    first, second = (trainer(scene.weights, operators()) for _ in range(2))
    first.step(scene.samples, ADVANTAGES, first.score(scene.samples))
    for folder in ("state", "checkpoint"):
        (tmp_path / folder).mkdir()
    save_state(first, tmp_path / "state")
    load_state(second, tmp_path / "state")
    save_checkpoint(tmp_path / "checkpoint", first.weights)
    loaded = load_weights(tmp_path / "checkpoint", device=DEVICE)
    assert second.version == 1 and loaded.config == scene.config
    for a, b, c in zip(first.weights, second.weights, loaded, strict=True):
        assert_bitwise(b.value.detach(), a.value.detach(), f"{a.name} from the state")
        assert_bitwise(c.value, a.value.detach(), f"{a.name} from the checkpoint")
        assert c.value.device == DEVICE
        for kind in ("master", "m", "v"):
            assert_bitwise(getattr(second.state[a.name], kind), getattr(first.state[a.name], kind), f"{kind} {a.name}")


def test_operators_must_fit_the_weights_device() -> None:
    config = llama(layers=1, intermediate=128, vocabulary=300)
    with pytest.raises(WrongDevice, match="provider cpu of adamw computes on a CPU, the weights lie on cuda:0"):
        rollout(random_weights(config, 0, device=DEVICE), Operators(uniform("cpu")))
