"""The long runs of ``tests/gpu`` in a small form on a CPU: what they cover, what they count, what a limit leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.models.weights import ModelWeights
from rl_engine.ops import Operators, uniform
from tests.gpu import long, long_updates
from tests.helpers.long_runs import Limit, Record, normal_weights, qwen3_8b
from tests.helpers.models import qwen3, random_samples, train_settings

SMALL = qwen3(layers=2, hidden=256, intermediate=256, heads=4, kv_heads=2, vocabulary=501)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return normal_weights(SMALL, 1, CPU)


def small_rounds(count: int) -> list[list[long.Job]]:
    return [long.long_jobs(SMALL.vocabulary, 5, 80, number, 0) for number in range(1, count + 1)]


def test_weights_are_those_that_were_asked_for(weights: ModelWeights) -> None:
    values = {weight.name: weight.value.float() for weight in weights}
    assert 0.018 < float(values["lm_head.weight"].std()) < 0.022
    assert 0.9 < float(values["model.norm.weight"].mean()) < 1.1
    assert not any(((x == 0) & torch.signbit(x)).any() for x in values.values())
    assert torch.equal(normal_weights(SMALL, 1, CPU).head.value, weights.head.value)
    assert not torch.equal(normal_weights(SMALL, 2, CPU).head.value, weights.head.value)


def test_border_samples_have_every_number_of_keys() -> None:
    """So every page border of 64 keys, every split's of 1,024, and 13 or more blocks in a split at every residue."""
    vocabulary = qwen3_8b(1).vocabulary
    for number in (1, 2, 3):
        keys = long.key_counts(long.border_jobs(vocabulary, number, 0))
        assert keys >= set(range(66, 4200)), sorted(set(range(66, 4200)) - keys)[:5]


def test_long_samples_are_ragged_and_even() -> None:
    ragged, even = (long.long_jobs(1000, 64, 4000, number, 0) for number in (1, 2))
    assert max(j.cached_tokens for j in ragged) == 3999 and len({j.cached_tokens for j in ragged}) > 40
    assert {j.cached_tokens for j in even} == {3999} and len({j.request.tokens for j in even}) == 8


def test_a_rollout_has_the_trainers_logprobs_and_a_flipped_one_is_counted(weights: ModelWeights) -> None:
    found = long.against_trainer(weights, small_rounds(2), provider="cpu")
    assert [r.differing for r in found] == [0, 0] and all(
        r.complete and r.compared > 300 and r.preemptions == 0 for r in found
    )
    (few,) = long.against_trainer(weights, [long.long_jobs(SMALL.vocabulary, 2, 8, 1, 0)], provider="cpu")
    assert few.differing == 0 < few.compared
    (spoilt,) = long.against_trainer(weights, small_rounds(1), provider="cpu", batch=2, spoil=long.flip_logprob)
    assert spoilt.differing == 1 and len(spoilt.first) == 1
    assert (spoilt.first[0].sample, spoilt.first[0].prompt, spoilt.first[0].others) == (0, 4, 0)
    (native,) = long.against_trainer(weights, small_rounds(1), provider="cpu", rollout_provider="stock")
    assert native.differing > native.compared // 10


def test_a_limit_leaves_what_was_drawn(weights: ModelWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "SCORE_START", 0.0)
    monkeypatch.setattr(long, "SCORE_RATE", 1e12)
    engine = long.rollout_engine(weights, "cpu", small_rounds(1), 5)

    class Short(Limit):
        @property
        def left(self) -> float:
            return 1.0 if engine.generated_tokens < 40 else -1.0

    samples, complete = long.draw(engine, small_rounds(1)[0], Short())
    assert not complete and engine.unfinished == 0 and len(samples) == 5
    assert 40 <= sum(len(s.response_tokens) for s in samples) < 60
    record = Record(tmp_path / "result.json", what="a test")
    with pytest.raises(RuntimeError), record.of_this_run():
        record.add(long.Difference(0, 0, 1, 2, "a", "b", 0))
        raise RuntimeError("lost")
    kept = json.loads((tmp_path / "result.json").read_text())
    assert kept["failed"] == "RuntimeError: lost" and not kept["finished"] and kept["parts"][0]["keys"] == 2


def test_repeated_updates_are_equal_and_a_flipped_gradient_is_counted(weights: ModelWeights) -> None:
    settings = train_settings(lr=0.0, fold_tokens=48, max_tokens=96)
    samples = random_samples(SMALL.vocabulary, (5, 17), (9, 30, 1, 22))
    engine = TrainEngine(weights.clone(), Operators(uniform("cpu")), 64, settings)
    outcome = long_updates.repeat(engine, samples, 3, Limit())
    assert (outcome.updates, outcome.wrong) == (3, 0), outcome.found
    assert outcome.micro_batches > 1
    spoilt = long_updates.repeat(engine, samples, 4, Limit(), long_updates.flip_gradient)
    assert (spoilt.updates, spoilt.wrong) == (4, 1)
    assert spoilt.found[0].startswith("update 3: gradient of model.layers.0.mlp.down_proj")
    assert long_updates.repeat(engine, samples, 4, Limit(0.0)).updates == 1


def test_a_weight_that_moves_is_counted(weights: ModelWeights) -> None:
    """The control: a learning rate that is not 0."""
    engine = TrainEngine(weights.clone(), Operators(uniform("cpu")), 64, train_settings(lr=1e-3))
    samples = random_samples(SMALL.vocabulary, (5,), (9, 12))
    assert long_updates.repeat(engine, samples, 2, Limit()).wrong == 2
