"""What a step's samples are worth: rewards, and advantages within their groups."""

from __future__ import annotations

from typing import Any, Protocol

from rl_engine.config.plan import Plan
from rl_engine.data.prompts import Prompt
from rl_engine.engines.train.grpo import group_advantages
from rl_engine.engines.types import Sample
from rl_engine.orchestrators.tokens import Tokenizer
from rl_engine.records.types import SampleRecord
from rl_engine.rewards.math import MathReward

JUDGED = {"correct", "wrong", "empty", "no answer", "too long"}  # reasons that say something about the response


class Warn(Protocol):
    def __call__(self, kind: str, text: str, **fields: Any) -> None:
        """Says ``text`` and records the event ``kind``."""


class Judge:
    """Rewards by the rule of the prompts' source."""

    def __init__(self, plan: Plan, tokens: Tokenizer, vocabulary: int, reward: MathReward, warn: Warn) -> None:
        self.plan, self.tokens, self.vocabulary, self.reward, self.warn = plan, tokens, vocabulary, reward, warn

    def rewards(self, step: int, prompts: list[Prompt], samples: list[Sample]) -> list[SampleRecord]:
        """Rewards, and the samples' identities with them."""
        answers = {prompt.index: prompt.answer for prompt in prompts}
        texts = [self.tokens.decode(s.response_tokens.tolist()) for s in samples]
        results = self.reward.reward(texts, [answers[s.prompt] for s in samples])
        odd = sorted({result.reason for result in results} - JUDGED)
        if odd:
            count = sum(result.reason in odd for result in results)
            why = ", ".join(odd)[:200]
            text = f"step {step + 1}: {count} rewards are 0 because the checker could not judge ({why})"
            self.warn("rewards_not_judged", text, step=step, count=count, reasons=odd)
        return [
            SampleRecord(
                prompt_index=s.prompt,
                sample_index=s.sample,
                seed=self.plan.sampling.rollout_seed,
                weight_version=s.weight_version,
                engine=s.engine,
                text=text,
                reward=result.value,
                answer=answers[s.prompt],
                finish_reason=s.finish_reason,
            )
            for s, text, result in zip(samples, texts, results, strict=True)
        ]

    def advantages(self, step: int, records: list[SampleRecord], samples: list[Sample]) -> list[float]:
        loss = self.plan.loss
        rewards, groups = [r.reward for r in records], [r.prompt_index for r in records]
        advantages = group_advantages(rewards, groups, loss.std_normalization, loss.advantage_eps)
        empty = sum(len(s.response_tokens) == 1 and s.finish_reason == "stop" for s in samples)
        if empty:
            self.warn("empty_responses", f"step {step + 1}: {empty} responses end at once", step=step, count=empty)
        if not any(advantages):
            text = f"step {step + 1}: every group has equal rewards, so all advantages are 0 and no reward is learned"
            self.warn("zero_advantages", text, step=step)
        return advantages
