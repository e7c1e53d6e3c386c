"""Generation: consistency, native and transformers' batched ``generate``; growth with batch and prompt length, and
samples of ragged length."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import workload
from benchmarks.measure import Case, Report, in_turns
from rl_engine.engines.rollout.builtin.engine import Job, RolloutEngine, RolloutSettings
from rl_engine.engines.types import Request, SamplingSettings
from rl_engine.models.checkpoint import config_json
from rl_engine.models.config import ModelConfig
from rl_engine.models.weights import ModelWeights

RAGGED = 8  # samples of the ragged cases


def main(options: argparse.Namespace) -> Report:
    """(batch, prompt tokens, new tokens): one axis grows at a time; then 8 samples of ragged length."""
    provider = workload.start(options)
    weights = workload.model(options)
    config = weights.config
    cases = _cases(config, options.full)
    positions = max(job.cached_tokens + 1 for _, jobs in cases for job in jobs)
    engines = {
        mode: RolloutEngine(
            workload.copy(weights), workload.operators(mode, provider), positions, RolloutSettings(), mode
        )
        for mode in ("native", "consistency")
    }
    stranger = transformers_model(weights)
    report = Report("rollout", workload.about(options, provider, config))
    for name, jobs in cases:
        contestants: dict[str, Callable[[], object]] = {mode: _ours(engine, jobs) for mode, engine in engines.items()}
        contestants["transformers"] = _theirs(stranger, jobs)
        tokens = sum(job.sampling.max_response_len for job in jobs)
        report.cases.append(Case(name, tokens, "tokens", in_turns(contestants, options.rounds)))
    return report


def _cases(config: ModelConfig, full: bool) -> list[tuple[str, list[Job]]]:
    new = 64 if full else 16
    sizes = [(batch, 32) for batch in ((1, 4, 16, 64) if full else (1, 4, 16))]
    sizes += [(4, length) for length in ((128, 512, 1024) if full else (128, 256))]
    cases = [
        (f"batch {batch}, prompt {length}, new {new}", _jobs(workload.requests(config, batch, length), [new] * batch))
        for batch, length in sizes
    ]
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 129, size=RAGGED).tolist()
    responses = rng.integers(1, 2 * new + 1, size=RAGGED).tolist()
    ragged = [
        Request(r.prompt, 0, r.tokens[:length])
        for r, length in zip(workload.requests(config, RAGGED, 128), lengths, strict=True)
    ]
    cases.append((f"ragged prompts, batch {RAGGED}", _jobs(ragged, [new] * RAGGED)))
    cases.append((f"ragged both, batch {RAGGED}", _jobs(ragged, responses)))
    return cases


def _jobs(requests: Sequence[Request], new: Sequence[int]) -> list[Job]:
    return [Job(r, 0, SamplingSettings(1.0, 1.0, -1, n, 0, ())) for r, n in zip(requests, new, strict=True)]


def _ours(engine: RolloutEngine, jobs: list[Job]) -> Callable[[], object]:
    def run() -> object:
        engine.memory.forget()  # or a turn would find the pages of the one before
        return engine.run(jobs)

    return run


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


def _theirs(model: Any, jobs: list[Job]) -> Callable[[], object]:
    """One batch, padded on the left; a response that has its length is padded while the others go on."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    longest = max(len(job.request.tokens) for job in jobs)
    new = torch.tensor([job.sampling.max_response_len for job in jobs])
    ids = torch.zeros(len(jobs), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, longest - len(job.request.tokens) :] = torch.tensor(job.request.tokens)
        mask[row, longest - len(job.request.tokens) :] = 1

    class Lengths(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return input_ids.shape[1] - longest >= new

    def run() -> object:
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=int(new.max()),
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Lengths()]),
            )
        assert out.shape[1] == longest + int(new.max())
        return out

    return run
