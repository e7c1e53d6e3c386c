"""Rule rewards for mathematical answers: 1 for an answer equal to the reference, 0 for everything else."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

from rl_engine.records.errors import UserError
from rl_engine.rewards.checker import AnswerChecker, CheckerUnavailable
from rl_engine.rewards.extract import final_answer

# The answer stands at the end; more than this is not looked at (characters).
_TAIL = 20_000
_LONGEST_ANSWER = 2_000


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """One response's reward.

    Attributes:
        value: 1.0 or 0.0.
        reason: ``correct``, ``wrong``, ``empty``, ``no answer``, ``too long`` (the answer), ``timeout``, ``crash``,
            ``error: <type>`` or ``the reference answer cannot be read``.
        extracted: the answer that was compared, where one was found.
    """

    value: float
    reason: str
    extracted: str | None


class MathReward:
    """Compares the final answer of each response with its reference, by math-verify in a time-limited child process.

    One object serves one caller at a time (others wait). The result depends on the texts alone, but for ``timeout``.

    Args:
        rule: ``number``: the last box or else the last number of the response. ``response``: what math-verify finds,
            LaTeX included.
        time_limit: seconds for one comparison.
    """

    def __init__(self, rule: str = "response", time_limit: float = 5.0) -> None:
        if rule not in ("number", "response"):
            raise ValueError(f"rule {rule!r}")
        self._rule = rule
        self._checker = AnswerChecker(time_limit)
        self._lock = threading.Lock()

    def __enter__(self) -> MathReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the child process in the background, so that the first call to ``reward`` need not wait for it."""
        with self._lock:
            self._checker.start()

    def reward(self, texts: Sequence[str], answers: Sequence[str]) -> list[RewardResult]:
        """The reward of each response.

        Args:
            texts: responses, as decoded; any string.
            answers: the reference of each, in the same order.

        Returns:
            One result a response, in order.

        Raises:
            ValueError: the lengths differ.
            UserError: math-verify is missing or broken.
            CheckerUnavailable: the child was killed on its way up, or did not answer.
        """
        if len(texts) != len(answers):
            raise ValueError(f"{len(texts)} responses, {len(answers)} answers")
        try:
            with self._lock:
                return [self._judge(text, answer) for text, answer in zip(texts, answers, strict=True)]
        except CheckerUnavailable as error:
            if not error.missing:
                raise
            raise UserError(str(error), "math-verify installed and working", "./rlk prepare installs it") from error

    def close(self) -> None:
        """Ends the child process."""
        with self._lock:
            self._checker.close()

    def _judge(self, text: str, answer: str) -> RewardResult:
        text = text[-_TAIL:]
        if not text.strip():
            return RewardResult(0.0, "empty", None)
        if self._rule == "response":
            comparison = self._checker.compare("response", text, answer)
        else:
            found = final_answer(text)
            if found is None:
                return RewardResult(0.0, "no answer", None)
            if len(found) > _LONGEST_ANSWER:
                return RewardResult(0.0, "too long", None)
            comparison = self._checker.compare("value", found, answer)
            comparison = dataclasses.replace(comparison, extracted=found)
        if comparison.problem is not None:
            return RewardResult(0.0, comparison.problem, comparison.extracted)
        return RewardResult(float(comparison.equal), "correct" if comparison.equal else "wrong", comparison.extracted)


def open_reward(name: str) -> MathReward:
    """The reward for a kind of task; its child process starts in the background at once.

    Args:
        name: ``arithmetic`` (plain numbers) or ``math`` (GSM8K, DAPO-Math and other JSONL prompts).

    Raises:
        UserError: an unknown name.
    """
    rules = {"arithmetic": "number", "math": "response"}
    if name not in rules:
        raise UserError(f"reward {name!r}", "arithmetic or math", "see the profile's reward")
    reward = MathReward(rules[name])
    reward.start()
    return reward


def reward_name(source: str) -> str:
    """The reward that fits a prompt source: ``arithmetic`` for generated problems, ``math`` for every file."""
    return "arithmetic" if source == "arithmetic" else "math"
