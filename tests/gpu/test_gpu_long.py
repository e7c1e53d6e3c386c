"""Long rollouts at Qwen3-8B's full depth, logprob by logprob against the trainer, and updates again and again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rl_engine.models.weights import ModelWeights
from tests.gpu.long import LAYERS, REPEATS, SEED, TOKENS, Round, against_trainer, border_jobs, flip_logprob, long_jobs
from tests.gpu.long_updates import flip_gradient, repeated_updates
from tests.helpers.gpu import needs_gpu
from tests.helpers.long_runs import DEVICE, free, normal_weights, qwen3_8b

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs_gpu]

CONFIG = qwen3_8b(LAYERS)


@pytest.fixture(autouse=True)
def poisoned_gpu_memory() -> None:
    """Not here: what fills fresh memory would stand between kernels that start early."""


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return normal_weights(CONFIG, SEED, DEVICE)


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    free()


def check(rounds: list[Round], expected: int) -> None:
    assert len(rounds) == expected and all(r.complete and r.compared > 0 for r in rounds)
    assert [r.differing for r in rounds] == [0] * expected, rounds
    assert all(r.replayed > r.passes // 2 and r.preemptions == 0 for r in rounds)


@pytest.mark.parametrize("samples", [8, 64])
def test_long_samples_have_the_trainers_logprobs(weights: ModelWeights, samples: int) -> None:
    rounds = [long_jobs(CONFIG.vocabulary, samples, TOKENS, number, SEED) for number in range(1, REPEATS + 1)]
    check(against_trainer(weights, rounds), REPEATS)


@pytest.mark.parametrize("batch", [4, 8, 64])
def test_samples_that_cross_every_page_and_split_have_the_trainers_logprobs(weights: ModelWeights, batch: int) -> None:
    """At most so many at once; with few, two programs share a split."""
    rounds = [border_jobs(CONFIG.vocabulary, number, SEED) for number in (1, 2)]
    check(against_trainer(weights, rounds, batch=batch), 2)


def test_a_flipped_logprob_and_another_arithmetic_are_counted() -> None:
    """The controls."""
    few = normal_weights(qwen3_8b(2), SEED, DEVICE)
    rounds = [long_jobs(CONFIG.vocabulary, 8, 160, 1, SEED)]
    assert [r.differing for r in against_trainer(few, rounds, spoil=flip_logprob)] == [1]
    (native,) = against_trainer(few, rounds, rollout_provider="stock")
    assert native.differing > native.compared // 4


def test_the_same_update_has_the_same_bits() -> None:
    outcome = repeated_updates(updates=100)
    assert (outcome.updates, outcome.wrong) == (100, 0), outcome.found
    assert outcome.micro_batches > 2


def test_a_flipped_gradient_is_counted() -> None:
    """The control."""
    outcome = repeated_updates(layers=1, updates=4, vocabulary=4096, spoil=flip_gradient)
    assert (outcome.updates, outcome.wrong) == (4, 1), outcome.found
