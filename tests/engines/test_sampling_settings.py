"""Temperature, top-p and top-k: the retained set travels with the sample, and both sides score one distribution."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.engines.rollout.builtin.engine import RolloutEngine
from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.engines.types import Request, Sample, SamplingSettings, retained_bits, retained_ids
from rl_engine.models.decoder import Decoder
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.ops.layout import PackedLayout
from tests.helpers.models import (
    differing,
    joined,
    operators,
    prompts,
    qwen3,
    requests,
    rollout_engine,
    rollout_logprobs,
    sampling,
    train_engine,
)
from tests.helpers.numeric import assert_bitwise, assert_close

GRID = list(itertools.product((0.7, 1.0, 1.3), (0.8, 0.95, 1.0), (-1, 20)))
POSITIONS = 128


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return random_weights(qwen3(layers=2, intermediate=384), 1)


@pytest.fixture(scope="module")
def asked(weights: ModelWeights) -> list[Request]:
    return requests(prompts(weights.config.vocabulary, (5, 97, 1)), 2)


@pytest.fixture(scope="module")
def engine(weights: ModelWeights) -> RolloutEngine:
    return rollout_engine(weights, positions=POSITIONS)


@pytest.fixture(scope="module")
def native_engine(weights: ModelWeights) -> RolloutEngine:
    return rollout_engine(weights, "stock", positions=POSITIONS)


def trainer(weights: ModelWeights, temperature: float, provider: str = "cpu") -> TrainEngine:
    return train_engine(weights, provider, POSITIONS, temperature=temperature)


def response_logits(weights: ModelWeights, sample: Sample) -> Tensor:
    """fp32 [R, vocabulary] that the response's tokens were drawn from."""
    ops = operators()
    ids = torch.from_numpy(np.concatenate([sample.prompt_tokens, sample.response_tokens]).astype(np.int64))
    with torch.no_grad():
        hidden = Decoder(weights, ops, POSITIONS).hidden_packed(ids, PackedLayout((len(ids),), (1,)))
        return ops.logits(hidden[len(sample.prompt_tokens) - 1 : -1], weights.head)


def check_distribution(weights: ModelWeights, sample: Sample, settings: SamplingSettings) -> None:
    """Over the retained set probabilities sum to 1, the drawn token's is the reported one, and top-k's cap holds."""
    ops, vocabulary = operators(), weights.config.vocabulary
    z = response_logits(weights, sample)
    everything = np.arange(vocabulary, dtype=np.int32)
    for row in range(len(sample.response_tokens)):
        ids = everything if sample.retained is None else retained_ids(sample.retained[row], vocabulary)
        mask = None
        if sample.retained is not None:
            mask = torch.from_numpy(np.tile(retained_bits(sample.retained[row], vocabulary), (len(ids), 1)))
        logps, _ = ops.logp_from_logits(
            z[row : row + 1].expand(len(ids), -1).contiguous(),
            torch.from_numpy(ids.astype(np.int64)),
            settings.temperature,
            mask,
        )
        total = logps.double().exp().sum().reshape(1)
        assert_close(total, np.ones(1), rtol=2e-6, atol=0.0, why="each logp is off by a few fp32 roundings of log l")
        place = np.flatnonzero(ids == sample.response_tokens[row])
        assert place.size == 1, "the drawn token lies outside its retained set"
        assert_bitwise(logps[place].numpy(), sample.logprobs[row : row + 1], "logp of the drawn token")
        if settings.top_k > 0:
            assert len(ids) <= settings.top_k


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), GRID)
def test_both_sides_agree(
    weights: ModelWeights,
    asked: list[Request],
    engine: RolloutEngine,
    native_engine: RolloutEngine,
    temperature: float,
    top_p: float,
    top_k: int,
) -> None:
    settings = sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_response_len=6)
    samples = engine.generate(asked, 0, settings)
    scores = trainer(weights, temperature).score(samples)
    assert_bitwise(rollout_logprobs(samples), joined(scores), "rollout and trainer")
    filtered = top_p < 1.0 or top_k > 0
    assert all((sample.retained is not None) == filtered for sample in samples)
    for sample in samples[::3]:
        check_distribution(weights, sample, settings)

    native = native_engine.generate(asked, 0, settings)
    native_scores = trainer(weights, temperature, "stock").score(native)
    assert differing(rollout_logprobs(native), joined(native_scores)) >= 0.05 * joined(native_scores).size
    if filtered:
        unfiltered = [dataclasses.replace(sample, retained=None) for sample in samples]
        different = differing(joined(trainer(weights, temperature).score(unfiltered)), rollout_logprobs(samples))
        assert different > 0.5 * joined(scores).size, "the trainer's score did not depend on the retained set"
    other = trainer(weights, temperature + 0.01)
    assert differing(joined(other.score(samples)), rollout_logprobs(samples)) > 0.3 * joined(scores).size


def test_nucleus_is_the_shortest_prefix(weights: ModelWeights, asked: list[Request], engine: RolloutEngine) -> None:
    """In fp64: without its least likely member the set holds less than top-p, with it at least that."""
    settings = sampling(temperature=1.3, top_p=0.8, max_response_len=4)
    for sample in engine.generate(asked, 0, settings):
        assert sample.retained is not None
        probabilities = (response_logits(weights, sample).double() / settings.temperature).softmax(-1).numpy()
        for row, kept in zip(probabilities, sample.retained, strict=True):
            members = row[retained_ids(kept, weights.config.vocabulary)]
            assert members.sum() >= 0.8 - 1e-5
            assert members.sum() - members.min() < 0.8 + 1e-5
            assert members.min() >= np.delete(row, retained_ids(kept, weights.config.vocabulary)).max() - 1e-9


def test_training_with_retained_sets_does_not_depend_on_packing(
    weights: ModelWeights, asked: list[Request], engine: RolloutEngine
) -> None:
    """Samples with ids, with bits and without a set in one update."""
    narrow = engine.generate(asked, 0, sampling(top_k=20, temperature=1.3))
    wide = engine.generate(asked, 1, sampling(top_p=0.98, temperature=1.3))
    whole = engine.generate(asked, 2, sampling(temperature=1.3))
    samples = [dataclasses.replace(s, prompt=i) for i, s in enumerate([*narrow[:3], *wide[:2], *whole[:2]])]
    kinds = {row.dtype for s in samples if s.retained is not None for row in s.retained}
    assert kinds == {np.dtype(np.int32), np.dtype(np.uint8)}
    gradients = []
    for max_tokens in (None, 1000):
        engine_ = train_engine(weights, positions=POSITIONS, temperature=1.3, fold_tokens=110, max_tokens=max_tokens)
        scores = engine_.score(samples)
        assert_bitwise(joined(scores), rollout_logprobs(samples), "rollout and trainer")
        result = engine_.step(samples, [1.0, -1.0, 2.0, -0.5, 1.0, -1.0, 0.25], scores)
        assert result.ratio_mismatches == 0
        gradients.append(engine_.gradients())
    for name, values in gradients[0].items():
        assert_bitwise(gradients[1][name], values, f"gradient of {name}")


def test_same_identity_draws_the_same_noise(weights: ModelWeights, engine: RolloutEngine) -> None:
    """Prompt, sample, position, seed and step: a change of any gives another response, and nothing else does."""
    tokens = prompts(weights.config.vocabulary, (12,))[0]
    settings = sampling(max_response_len=12, temperature=1.3)

    def draw(prompt: int = 0, sample: int = 0, step: int = 0, seed: int = 7) -> list[int]:
        request = Request(prompt, sample, tokens)
        (result,) = engine.generate([request], step, dataclasses.replace(settings, seed=seed))
        return result.response_tokens.tolist()

    assert draw() == draw()
    others = [draw(prompt=1), draw(sample=1), draw(step=1), draw(seed=8)]
    assert all(other != draw() for other in others)
    assert len({tuple(other) for other in others}) == len(others)


def test_bad_requests_are_refused(engine: RolloutEngine) -> None:
    with pytest.raises(ValueError, match="prompt 4 has no token"):
        engine.generate([Request(4, 0, ())], 0, sampling())
    with pytest.raises(ValueError, match=r"121 tokens.*8 response tokens.*128 positions"):
        engine.generate([Request(4, 0, (5,) * 121)], 0, sampling())
    (fits,) = engine.generate([Request(4, 0, (5,) * 120)], 0, sampling())
    assert fits.length == POSITIONS
