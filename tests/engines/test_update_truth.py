"""A whole update against an independent fp64 GRPO: loss, every gradient, and the norm.

The error may be at most twice that of the stock bf16 operators in the same engine on the same inputs.
"""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.engines.train.grpo import group_advantages
from rl_engine.engines.types import Sample
from rl_engine.models.config import ModelConfig
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.ops.grad_norm import NonFiniteGradient
from tests.engines import double_precision
from tests.helpers.models import (
    copy_weights,
    joined,
    llama,
    qwen3,
    random_samples,
    train_engine,
)
from tests.helpers.numeric import assert_bitwise, assert_close

SMALL = {"hidden": 256, "intermediate": 320, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocabulary": 700, "layers": 3}
CASES = {
    "qwen3 untied, T 0.7, retained sets": (qwen3(**SMALL), 0.7, True),
    "qwen3 tied": (qwen3(tied=True, **SMALL), 1.0, False),
    "llama untied": (llama(**SMALL), 1.0, False),
    "llama tied, T 1.3, retained sets": (llama(tied=True, **SMALL), 1.3, True),
}
CLIP, KL = 0.2, 0.15
RATIO_STEPS = (-0.6, 0.0, 0.6)  # log of the ratio: far from both bounds, so that rounding moves no token over one


def samples_of(config: ModelConfig, retained: bool) -> list[Sample]:
    """Two prompts with groups of three; responses of 1 to 40 tokens; some with a retained set per token."""
    samples = random_samples(config.vocabulary, (9, 33), (12, 1, 40, 7, 25, 3), seed=5)
    if not retained:
        return samples
    rng = np.random.default_rng(6)
    result = []
    for index, sample in enumerate(samples):
        rows = []
        for number, token in enumerate(sample.response_tokens.tolist()):
            size = int(rng.choice([1, 5, 300]) if number % 2 else 50)
            kept = set(rng.choice(config.vocabulary, size, replace=False).tolist()) | {token}
            rows.append(np.array(sorted(kept), dtype=np.int32))
        result.append(dataclasses.replace(sample, retained=tuple(rows)) if index != 1 else sample)
    return result


def perturbed(weights: ModelWeights) -> ModelWeights:
    """A reference model near the policy, as in a run that has trained for a while."""
    generator = torch.Generator().manual_seed(9)
    reference = copy_weights(weights)
    for view in reference.export().values():
        view.copy_(view.float() * (1.0 + 0.05 * torch.randn(view.shape, generator=generator)))
    return reference


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the truth's norm."""
    return float((actual.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients(case: str) -> None:
    config, temperature, retained = CASES[case]
    weights = random_weights(config, 4)
    reference = perturbed(weights)
    samples = samples_of(config, retained)
    rewards = [1.0, 0.0, 0.25, 0.0, 1.0, 1.0]
    groups = [s.prompt for s in samples]
    advantages = double_precision.advantages(rewards, groups, 1e-6)
    assert_close(
        np.array(group_advantages(rewards, groups, True, 1e-6)),
        np.array(advantages),
        rtol=1e-14,
        atol=0.0,
        why="fp64 on both sides",
    )
    policy = double_precision.Model(config, weights.export())
    frozen = double_precision.Model(config, reference.export())
    rng = np.random.default_rng(7)
    with torch.no_grad():
        exact = [policy.logprobs(s, temperature).numpy() for s in samples]
    old = [(values - rng.choice(RATIO_STEPS, len(values))).astype(np.float32) for values in exact]
    truth = double_precision.update(
        *(policy, frozen, samples, advantages, [o.astype(np.float64) for o in old], temperature, CLIP, KL)
    )
    assert 10 < truth.clipped < 70

    outcome = {}
    for provider in ("cpu", "stock"):
        engine = train_engine(weights, provider, reference=reference, kl_coef=KL, temperature=temperature)
        scores = engine.score(samples)
        result = engine.step(samples, advantages, old, engine.score_reference(samples))
        assert result.clip_fraction == truth.clipped / len(truth.logprobs)
        outcome[provider] = (engine, joined(scores).astype(np.float64), result)
    (ours, logprobs, result), (stock, native_logprobs, _) = outcome["cpu"], outcome["stock"]

    worst = np.abs(native_logprobs - truth.logprobs).max()
    assert_close(logprobs, truth.logprobs, rtol=0.0, atol=2 * worst, why="twice the stock operators' worst")
    native_loss = double_precision.token_losses(
        torch.tensor(native_logprobs),
        torch.tensor(joined(old)).double(),
        torch.tensor(joined(stock.score_reference(samples))).double(),
        torch.tensor(np.repeat(advantages, [len(s.response_tokens) for s in samples])),
        CLIP,
        KL,
    ).numpy()
    # A sum's error is small by chance in either path; the mean error of a token's loss is the yardstick.
    yardstick = np.abs(native_loss - truth.token_losses).mean()
    assert abs(result.loss - truth.loss) <= 2 * yardstick
    assert abs(result.kl_mean - truth.kl_mean) <= 2 * yardstick / KL
    assert yardstick < 0.05 * np.abs(truth.token_losses).mean(), "the yardstick is too loose to mean anything"

    gradients, native = ours.gradients(), stock.gradients()
    assert gradients.keys() == truth.gradients.keys()
    for name, expected in truth.gradients.items():
        error, allowed = relative_error(gradients[name], expected), relative_error(native[name], expected)
        assert allowed < 0.2, f"{name}: the stock gradient's own error {allowed:.3g} is no yardstick"
        assert error <= 2 * allowed, f"{name}: error {error:.3g}, stock {allowed:.3g}"
    for wrong in ({"kl_coef": 0.0}, {"clip_low": 0.9, "clip_high": 9.0}, {"temperature": temperature * 1.1}):
        changed = train_engine(weights, **{"reference": reference, "kl_coef": KL, "temperature": temperature, **wrong})
        changed.step(samples, advantages, old, changed.score_reference(samples))
        beyond = sum(
            relative_error(gradient, truth.gradients[name]) > 2 * relative_error(native[name], truth.gradients[name])
            for name, gradient in changed.gradients().items()
        )
        assert beyond > 0.9 * len(native), f"{wrong} went unseen"
    squares = math.fsum(float(g) ** 2 for t in gradients.values() for g in t.flatten().tolist())
    assert result.grad_norm == math.sqrt(squares), "the norm is exact: one rounding of the sum, one of the root"


def test_a_sample_with_a_positive_advantage_becomes_more_likely() -> None:
    """And one with a negative advantage less likely: the plainest check of the gradient's sign."""
    weights = random_weights(qwen3(**SMALL), 4)
    samples = samples_of(weights.config, False)
    engine = train_engine(weights, lr=1e-4)
    before = engine.score(samples)
    signs = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    engine.step(samples, signs, before)
    for sign, a, b in zip(signs, before, engine.score(samples), strict=True):
        assert sign * (b.astype(np.float64) - a).mean() > 0.01


def state_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Copies of everything an update may change."""
    state = {f"weight {weight.name}": weight.value.detach().clone() for weight in engine.weights}
    for name, values in engine.state.items():
        state.update({f"master {name}": values.master, f"m {name}": values.m, f"v {name}": values.v})
    return copy.deepcopy(state)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    weights = random_weights(qwen3(**SMALL), 4)
    samples = samples_of(weights.config, False)
    engine = train_engine(weights)
    scores = engine.score(samples)
    before = state_of(engine)
    with pytest.raises(NonFiniteGradient):
        engine.step(samples, [1.0, math.inf, 0.0, 0.0, 0.0, 0.0], scores)
    for name, values in state_of(engine).items():
        assert_bitwise(values, before[name], name)
    assert engine.version == 0
    clean = train_engine(weights)
    for number, trainer in enumerate((engine, clean)):
        trainer.step(samples, [1.0, -1.0, 0.0, 0.0, 0.5, 0.0], scores)
        assert trainer.version == 1, number
    after = state_of(clean)
    for name, values in state_of(engine).items():
        assert_bitwise(values, after[name], f"{name} after the refused update was forgotten")


def test_zero_advantages_give_zero_gradients() -> None:
    """No crash, a norm of 0; without weight decay the weights stay as they are."""
    weights = random_weights(qwen3(**SMALL), 4)
    samples = samples_of(weights.config, False)
    engine = train_engine(weights, weight_decay=0.0)
    before = {weight.name: weight.value.detach().clone() for weight in engine.weights}
    result = engine.step(samples, [0.0] * len(samples), engine.score(samples))
    assert result.grad_norm == 0.0
    assert result.loss == 0.0
    assert result.changed_elements == 0
    assert all(not gradient.any() for gradient in engine.gradients().values())
    for weight in engine.weights:
        assert_bitwise(weight.value.detach(), before[weight.name], weight.name)


def test_a_response_of_no_token_beside_others() -> None:
    """It has no score and no part in the loss; the others' scores are as without it."""
    weights = random_weights(qwen3(**SMALL), 4)
    samples = samples_of(weights.config, False)
    nothing = np.zeros(0)
    empty = dataclasses.replace(
        samples[1], response_tokens=nothing.astype(np.int32), logprobs=nothing.astype(np.float32)
    )
    engine = train_engine(weights)
    full, scores = engine.score(samples), engine.score([samples[0], empty, *samples[2:]])
    assert scores[1].size == 0
    for index in (0, 2, 3, 4, 5):
        assert_bitwise(scores[index], full[index], f"sample {index}")
    result = engine.step([samples[0], empty, *samples[2:]], [1.0, -1.0, 0.5, 0.0, 1.0, -0.5], scores)
    assert result.loss_tokens == 87
    assert result.grad_norm > 0
