"""Generation: consistency, native and transformers' batched ``generate``; growth with batch and prompt length."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import workload
from benchmarks.measure import Case, Report, in_turns
from rl_engine.engines.rollout.builtin.engine import RolloutEngine, RolloutSettings
from rl_engine.engines.types import Request, SamplingSettings
from rl_engine.models.checkpoint import config_json
from rl_engine.models.weights import ModelWeights


def main(options: argparse.Namespace) -> Report:
    """(batch, prompt tokens, new tokens): one axis grows at a time."""
    provider = workload.start(options)
    weights = workload.model(options)
    config = weights.config
    new = 64 if options.full else 16
    sizes = [(batch, 32, new) for batch in ((1, 4, 16, 64) if options.full else (1, 4, 16))]
    sizes += [(4, length, new) for length in ((128, 512, 1024) if options.full else (128, 256))]
    positions = max(prompt + tokens for _, prompt, tokens in sizes)
    engines = {
        mode: RolloutEngine(
            workload.copy(weights), workload.operators(mode, provider), positions, RolloutSettings(), mode
        )
        for mode in ("native", "consistency")
    }
    stranger = transformers_model(weights)
    report = Report("rollout", workload.about(options, provider, config))
    for batch, prompt, tokens in sizes:
        requests = workload.requests(config, batch, prompt)
        sampling = SamplingSettings(1.0, 1.0, -1, tokens, 0, ())
        contestants: dict[str, Callable[[], object]] = {
            name: _ours(engine, requests, sampling) for name, engine in engines.items()
        }
        contestants["transformers"] = _theirs(stranger, requests, tokens)
        name = f"batch {batch}, prompt {prompt}, new {tokens}"
        report.cases.append(Case(name, batch * tokens, "tokens", in_turns(contestants, options.rounds)))
    return report


def _ours(engine: RolloutEngine, requests: list[Request], sampling: SamplingSettings) -> Callable[[], object]:
    return lambda: engine.generate(requests, 0, sampling)


def transformers_model(weights: ModelWeights) -> Any:
    """The same weights in transformers' own model, bf16; without a stop token, so that all draw equally many."""
    from transformers import AutoConfig, AutoModelForCausalLM

    body = config_json(weights.config)
    config = AutoConfig.for_model(str(body.pop("model_type")), **body)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    missing, unknown = model.load_state_dict(weights.export(), strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def _theirs(model: Any, requests: list[Request], tokens: int) -> Callable[[], object]:
    ids = torch.tensor([list(request.tokens) for request in requests])

    def run() -> object:
        with torch.no_grad():
            out = model.generate(
                *(ids,),
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        assert out.shape[1] == ids.shape[1] + tokens
        return out

    return run
