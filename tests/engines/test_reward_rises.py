"""Nightly: GRPO on the bundled arithmetic teaches the demo model something, on exactly on-policy samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rl_engine.data.prompts import encode_prompt, open_prompts
from rl_engine.engines.rollout.builtin.engine import RolloutEngine, RolloutSettings
from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.engines.train.grpo import group_advantages
from rl_engine.engines.types import Request, SamplingSettings, canonical
from rl_engine.models.checkpoint import load_weights
from rl_engine.ops import Operators, uniform
from rl_engine.rewards.math import open_reward
from tests.helpers.models import train_settings

# At 1e-4 sixteen updates of so few samples destroy the model: the reward went from 0.48 to 0.11.
STEPS, BATCHES, PROMPTS, SAMPLES, CAP, LR = 16, 2, 4, 8, 16, 2e-5
EDGE = 4  # steps at each end whose rewards are compared


@pytest.mark.slow
def test_the_arithmetic_reward_rises(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rollout = RolloutEngine(load_weights(smollm2), Operators(uniform("cpu")), 512, RolloutSettings())
    settings = train_settings(lr=LR, weight_decay=0.0, fold_tokens=512, max_tokens=1024)
    trainer = TrainEngine(load_weights(smollm2), Operators(uniform("cpu")), 512, settings)
    stops = (json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"],)
    prompts, rewards = open_prompts("arithmetic", None, 1234), []
    with open_reward("arithmetic") as judge:
        for step in range(STEPS):
            batch = prompts.batch(step % BATCHES, PROMPTS)  # the same few questions again and again
            requests = [Request(p.index, s, tuple(encode_prompt(tokenizer, p))) for p in batch for s in range(SAMPLES)]
            samples = canonical(rollout.generate(requests, step, SamplingSettings(1.0, 1.0, -1, CAP, 7, stops)))
            old = trainer.score(samples)
            assert all((a.logprobs.view(np.int32) == b.view(np.int32)).all() for a, b in zip(samples, old, strict=True))
            texts = [tokenizer.decode(s.response_tokens.tolist(), skip_special_tokens=True) for s in samples]
            values = [r.value for r in judge.reward(texts, [batch[s.prompt].answer for s in samples])]
            rewards.append(float(np.mean(values)))
            trainer.step(samples, group_advantages(values, [s.prompt for s in samples], True, 1e-6), old)
            rollout.load_weights(trainer.export())
    print("mean reward by step:", rewards)
    assert np.mean(rewards[-EDGE:]) > np.mean(rewards[:EDGE]) + 0.1, rewards
