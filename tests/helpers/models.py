"""Small models, engines around them and their inputs, for tests of models and engines."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_engine.config.plan import LossPlan, OptimizerPlan
from rl_engine.engines.rollout.builtin.engine import RolloutEngine, RolloutSettings
from rl_engine.engines.train.builtin import TrainEngine, TrainSettings
from rl_engine.engines.types import Request, Sample, SamplingSettings
from rl_engine.models.config import ModelConfig, RopeScaling
from rl_engine.models.sharding import Sharding
from rl_engine.models.weights import ModelWeights, random_tensor
from rl_engine.ops import Operators, library, uniform

_BASE = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=4,
    hidden=1024,
    intermediate=512,
    heads=16,
    kv_heads=8,
    head_dim=64,
    vocabulary=1501,
    tied=False,
    qk_norm=False,
    norm_eps=1e-6,
    rope_base=1e6,
    rope_scaling=None,
    max_positions=4096,
)
LLAMA3_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=512)


def llama(**changes: object) -> ModelConfig:
    """A Llama of 4 layers, hidden 1024, 16 query and 8 KV heads of 64; its vocabulary is no multiple of 128."""
    return dataclasses.replace(_BASE, **changes)  # type: ignore[arg-type]


def qwen3(**changes: object) -> ModelConfig:
    """The same shape as :func:`llama` with Qwen3's norm of queries and keys."""
    return llama(architecture="Qwen3ForCausalLM", qk_norm=True, **changes)


def qwen2(**changes: object) -> ModelConfig:
    """The same shape as :func:`llama` with Qwen2's biases of q, k and v."""
    return llama(architecture="Qwen2ForCausalLM", **changes)


def qwen2_weights(config: ModelConfig, seed: int, sharding: Sharding | None = None) -> ModelWeights:
    """As ``random_weights``, biases of both signs."""

    def read(name: str, first: int, last: int) -> Tensor:
        values = random_tensor(config, name, seed)
        return ((values - 1.0) * 4.0 if name.endswith(".bias") else values)[first:last]

    return ModelWeights(config, read, sharding)


def copy_weights(weights: ModelWeights) -> ModelWeights:
    """Weights of their own memory: engines change theirs, or keep only a packed form."""
    return weights.clone()


def operators(provider: str = "cpu") -> Operators:
    """One provider everywhere: ``cpu`` is the consistent one, ``stock`` the native control."""
    return Operators(uniform(provider))


def rollout_engine(
    weights: ModelWeights, provider: str = "cpu", positions: int = 256, **settings: int
) -> RolloutEngine:
    """A rollout engine on a copy of ``weights``."""
    return RolloutEngine(copy_weights(weights), operators(provider), positions, RolloutSettings(**settings))


def train_settings(**changes: object) -> TrainSettings:
    """lr 1e-3, clipping of the gradient norm at 1, no KL, fold units of 256 tokens; changes by field, whatever part of
    the settings has it."""
    settings = TrainSettings(
        optimizer=OptimizerPlan(lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.98, eps=1e-8, clip_grad=1.0),
        loss=LossPlan(kl_coef=0.0, std_normalization=True, advantage_eps=1e-6, clip_low=0.2, clip_high=0.2),
        temperature=1.0,
        fold_tokens=256,
        max_tokens=None,
    )
    for part in ("optimizer", "loss"):
        names = {field.name for field in dataclasses.fields(getattr(settings, part))} & set(changes)
        inner = dataclasses.replace(getattr(settings, part), **{name: changes.pop(name) for name in names})
        changes[part] = inner
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


def train_engine(
    weights: ModelWeights,
    provider: str | Operators = "cpu",
    positions: int = 256,
    reference: ModelWeights | None = None,
    **settings: object,
) -> TrainEngine:
    """A trainer on a copy of ``weights``, with one provider everywhere or with operators of the caller's."""
    chosen = operators(provider) if isinstance(provider, str) else provider
    frozen = None if reference is None else copy_weights(reference)
    return TrainEngine(copy_weights(weights), chosen, positions, train_settings(**settings), frozen)


def sampling(**changes: object) -> SamplingSettings:
    """Temperature 1, every column, 8 tokens, no stop token."""
    settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=-1, max_response_len=8, seed=7, stop_tokens=())
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


def prompts(vocabulary: int, lengths: tuple[int, ...], seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(3, vocabulary, size=length).tolist()) for length in lengths]


def requests(all_prompts: list[tuple[int, ...]], samples: int) -> list[Request]:
    """``samples`` requests of every prompt, in canonical order."""
    return [Request(p, s, tokens) for p, tokens in enumerate(all_prompts) for s in range(samples)]


def random_samples(
    vocabulary: int, prompt_lengths: tuple[int, ...], response_lengths: tuple[int, ...], seed: int = 0
) -> list[Sample]:
    """Samples with random tokens and no rollout behind them: ``response_lengths`` are dealt out in canonical order,
    equally many to every prompt; the logprobs are zero."""
    rng = np.random.default_rng(seed)
    group = len(response_lengths) // len(prompt_lengths)
    samples = []
    for index, length in enumerate(response_lengths):
        prompt = index // group
        tokens = np.random.default_rng((seed, prompt)).integers(3, vocabulary, size=prompt_lengths[prompt])
        samples.append(
            Sample(
                prompt=prompt,
                sample=index % group,
                prompt_tokens=tokens.astype(np.int32),
                response_tokens=rng.integers(3, vocabulary, size=length).astype(np.int32),
                logprobs=np.zeros(length, dtype=np.float32),
                retained=None,
                weight_version=0,
                engine="none",
                finish_reason="length",
            )
        )
    return samples


def joined(values: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Per-sample arrays as one, fp32 [all response tokens]."""
    return np.concatenate(values)


def rollout_logprobs(samples: list[Sample]) -> npt.NDArray[np.float32]:
    """What the rollout engine reported, fp32 [all response tokens]."""
    return joined([sample.logprobs for sample in samples])


def differing(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> int:
    """Elements whose bits differ, for controls; equality itself is tested with ``assert_bitwise``."""
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    return int(np.count_nonzero(actual.view(np.int32) != expected.view(np.int32)))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Another number of threads in torch and in the kernels, put back behind."""
    before = torch.get_num_threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


def set_threads(count: int) -> None:
    """Threads of torch's operators and of the CPU provider's kernels."""
    torch.set_num_threads(count)
    library.set_threads(count)
