"""The model and the samples that benchmarks run on: SmolLM2-135M's shape, random tokens of exact lengths."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np
import torch

from rl_engine.engines.types import Request, Sample
from rl_engine.models.checkpoint import load_weights
from rl_engine.models.config import ModelConfig, parse_config, read_config
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.numerics.contract import Contract
from rl_engine.ops import Operators, library, uniform
from rl_engine.qualify.cli import DEMO_SHAPE


def start(options: argparse.Namespace) -> str:
    """Sets the threads of torch and of the kernels; the provider of consistency mode on this machine."""
    torch.set_num_threads(options.threads)
    provider = "cpu" if library.available() else "torch"
    if provider == "cpu":
        library.set_threads(options.threads)
    return provider


def operators(mode: str, provider: str) -> Operators:
    """``native`` is torch's own operators; sampling and the optimizer are the same in both modes."""
    return Operators(uniform("stock", update=provider) if mode == "native" else uniform(provider))


def model(options: argparse.Namespace, layers: int | None = None) -> ModelWeights:
    """The checkpoint's weights, or random ones (speed does not depend on their values)."""
    if getattr(options, "model_root", None):
        return load_weights(options.model_root)
    return random_weights(shape(options, layers), seed=0)


def shape(options: argparse.Namespace, layers: int | None = None) -> ModelConfig:
    """The shape in force; ``--layers`` cuts it, else ``layers`` does."""
    root = getattr(options, "model_root", None)
    if root:
        return read_config(root)
    config = parse_config(DEMO_SHAPE)
    return dataclasses.replace(config, layers=options.layers or layers or config.layers)


def copy(weights: ModelWeights) -> ModelWeights:
    """Weights of their own memory: an engine owns what it is given."""
    return weights.clone()


def about(options: argparse.Namespace, provider: str, config: ModelConfig) -> dict[str, Any]:
    """What a reader must know to repeat the numbers."""
    contract = Contract(gemm="chain" if provider == "cpu" else "chain256")
    return {
        "model": str(getattr(options, "model_root", None) or "SmolLM2-135M shape, random weights"),
        "layers": config.layers,
        "threads": options.threads,
        "rounds": options.rounds,
        "contract": contract.id,
    }


def requests(config: ModelConfig, batch: int, length: int) -> list[Request]:
    """``batch`` different prompts of ``length`` tokens."""
    ids = np.random.default_rng(0).integers(3, config.vocabulary, size=(batch, length))
    return [Request(prompt, 0, tuple(row.tolist())) for prompt, row in enumerate(ids)]


def samples(config: ModelConfig, batch: int, length: int) -> list[Sample]:
    """``batch`` samples of ``length`` tokens, half prompt and half response."""
    ids = np.random.default_rng(0).integers(3, config.vocabulary, size=(batch, length)).astype(np.int32)
    half = length // 2
    return [
        Sample(
            prompt=0,
            sample=index,
            prompt_tokens=row[:half],
            response_tokens=row[half:],
            logprobs=np.zeros(length - half, dtype=np.float32),
            retained=None,
            weight_version=0,
            engine="bench",
            finish_reason="length",
        )
        for index, row in enumerate(ids)
    ]
