"""The promise itself: the trainer's logprob of a sampled token is the rollout engine's, bit for bit, over updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.engines.rollout.builtin.engine import RolloutEngine
from rl_engine.engines.train.builtin import Logprobs, TrainEngine
from rl_engine.engines.train.grpo import group_advantages
from rl_engine.engines.types import Request, Sample, SamplingSettings
from rl_engine.models.checkpoint import load_weights
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.ops import Operators, uniform
from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.weight import Weight
from tests.helpers.models import (
    differing,
    joined,
    prompts,
    qwen2,
    qwen2_weights,
    qwen3,
    requests,
    rollout_engine,
    rollout_logprobs,
    sampling,
    train_engine,
)
from tests.helpers.numeric import assert_bitwise


class SkippableNorms(Operators):
    """The CPU operators; the norm of the weight named ``skipped``, if any, returns its input."""

    def __init__(self) -> None:
        super().__init__(uniform("cpu"))
        self.skipped: str | None = None

    def rms_norm(
        self, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None = None, exchange: Exchange = ALONE
    ) -> Tensor:
        return x if weight.name == self.skipped else super().rms_norm(x, weight, eps, layout, exchange)


@contextmanager
def one_bit_flipped(weight: Weight, row: int, column: int) -> Iterator[None]:
    """The lowest bit of one element, put back behind."""
    bits = weight.value.detach().view(torch.int16)
    bits[row, column] ^= 1
    try:
        yield
    finally:
        bits[row, column] ^= 1


def one_token_changed(samples: list[Sample]) -> list[Sample]:
    """The first prompt token of the first sample replaced by its neighbour."""
    tokens = samples[0].prompt_tokens.copy()
    tokens[0] += 1 if tokens[0] == 3 else -1
    return [dataclasses.replace(samples[0], prompt_tokens=tokens), *samples[1:]]


def check_controls(trainer: TrainEngine, samples: list[Sample], scores: Logprobs) -> None:
    """Each of three small faults in the trainer shows as mismatches; without them the bits are back."""
    expected = joined(scores)
    middle = trainer.weights.config.layers // 2
    weight = trainer.weights[f"model.layers.{middle}.self_attn.qkv_proj.weight"]
    element = divmod(int(weight.value.detach().abs().argmax()), weight.shape[1])
    with one_bit_flipped(weight, *element):
        assert differing(joined(trainer.score(samples)), expected) > 0, "a flipped weight bit went unseen"
    changed = joined(trainer.score(one_token_changed(samples)))
    first = len(samples[0].response_tokens)
    assert differing(changed[:first], expected[:first]) > 0, "a changed token went unseen"
    assert_bitwise(changed[first:], expected[first:], "samples beside the one whose token changed")
    assert isinstance(trainer.ops, SkippableNorms)
    trainer.ops.skipped = f"model.layers.{middle}.post_attention_layernorm.weight"
    assert differing(joined(trainer.score(samples)), expected) > 0, "a skipped norm went unseen"
    trainer.ops.skipped = None
    assert_bitwise(joined(trainer.score(samples)), expected, "scores after the faults were taken out")


def advantages(samples: list[Sample], step: int) -> list[float]:
    """Normalised within groups, from rewards that differ inside every group; a lone sample gets 1: none is zero."""
    groups = [s.prompt for s in samples]
    values = group_advantages([float((s.sample + step) % 2) for s in samples], groups, True, 1e-6)
    values = [1.0 if groups.count(group) == 1 else value for group, value in zip(groups, values, strict=True)]
    assert all(value != 0.0 for value in values)
    return values


def check_two_updates(
    rollout: RolloutEngine, trainer: TrainEngine, ask: Callable[[int], list[Request]], settings: SamplingSettings
) -> int:
    """Rollout, score, update, sync, three times over (the last without an update); response tokens compared."""
    compared = 0
    for step in range(3):
        samples = rollout.generate(ask(step), step, settings)
        assert all(sample.weight_version == step for sample in samples)
        scores = trainer.score(samples)
        assert_bitwise(rollout_logprobs(samples), joined(scores), f"rollout and trainer at weight version {step}")
        uncertain = np.count_nonzero(joined(scores) < -1e-3) / joined(scores).size
        assert uncertain > 0.5, f"the model has collapsed: {uncertain:.0%} of the logprobs are not near 0"
        compared += joined(scores).size
        if step == 0:
            check_controls(trainer, samples, scores)
        if step == 2:
            break
        update = trainer.step(samples, advantages(samples, step), scores)
        assert update.ratio_mismatches == 0, "the ratio of the first update is not exactly 1"
        assert update.clip_fraction == 0.0
        assert update.grad_norm > 0
        assert update.changed_elements > 0.5 * update.elements, "the update left most weights as they were"
        snapshot = trainer.export()
        assert rollout.load_weights(snapshot) == snapshot.digests
    return compared


def native_mismatches(weights: ModelWeights, asked: list[Request], settings: SamplingSettings, positions: int) -> float:
    """Share of tokens whose bits differ between the same engines with stock operators, before any update."""
    samples = rollout_engine(weights, "stock", positions).generate(asked, 0, settings)
    scores = train_engine(weights, "stock", positions, fold_tokens=512).score(samples)
    return differing(rollout_logprobs(samples), joined(scores)) / joined(scores).size


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_random_qwen3_over_two_updates(head_dim: int) -> None:
    """4 layers of hidden 1024, 16 query and 8 KV heads; lengths from 1 to over 1,100 tokens (two KV splits)."""
    config = qwen3(head_dim=head_dim, vocabulary=3001)
    weights = random_weights(config, 0)

    def ask(step: int) -> list[Request]:
        *short, long = prompts(config.vocabulary, (7, 1, 65, 1115), seed=step)
        return [*requests(short, 2), Request(len(short), 0, long)]

    settings = sampling(max_response_len=12, stop_tokens=tuple(range(3, 60)))
    rollout = rollout_engine(weights, positions=1127, max_batch=5, chunk=400)
    trainer = train_engine(weights, SkippableNorms(), positions=1127, fold_tokens=512)
    assert check_two_updates(rollout, trainer, ask, settings) > 100
    assert native_mismatches(weights, ask(0), settings, 1127) >= 0.05


def test_smollm2_over_two_updates(smollm2: Path) -> None:
    """30 layers with real weights, tied head, 9 query and 3 KV heads."""
    weights = load_weights(smollm2)

    def ask(step: int) -> list[Request]:
        return requests(prompts(weights.config.vocabulary, (24, 41), seed=step), 2)

    settings = sampling(max_response_len=20, stop_tokens=(2,))
    rollout = rollout_engine(weights)
    trainer = train_engine(weights, SkippableNorms())
    assert check_two_updates(rollout, trainer, ask, settings) > 100
    assert native_mismatches(weights, ask(0), settings, 256) >= 0.05


def test_random_qwen2_over_two_updates() -> None:
    """Biases of q, k and v: they train, and decay leaves them alone."""
    config = qwen2(layers=2, vocabulary=1501)
    weights = qwen2_weights(config, 0)

    def ask(step: int) -> list[Request]:
        return requests(prompts(config.vocabulary, (7, 1, 65, 301), seed=step), 2)

    settings = sampling(max_response_len=12, stop_tokens=tuple(range(3, 60)))
    rollout = rollout_engine(weights, positions=320, max_batch=5, chunk=200)
    trainer = train_engine(weights, SkippableNorms(), positions=320, fold_tokens=256)
    assert check_two_updates(rollout, trainer, ask, settings) > 50
    assert native_mismatches(weights, ask(0), settings, 320) >= 0.05
    bias = trainer.weights["model.layers.1.self_attn.qkv_proj.bias"]
    assert bias.grad is not None and bias.grad.count_nonzero() > 0.9 * bias.grad.numel()
    samples = rollout.generate(ask(2), 2, settings)
    trainer = train_engine(weights, SkippableNorms(), positions=320, fold_tokens=256, lr=0.5)
    start = {w.name: w.value.detach().clone() for w in trainer.weights}
    trainer.step(samples, [0.0] * len(samples), trainer.score(samples))
    for weight in trainer.weights:
        decayed = not torch.equal(weight.value.detach(), start[weight.name])
        assert decayed == (len(weight.shape) == 2), weight.name
