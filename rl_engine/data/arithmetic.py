"""Endless sums, differences and products, small enough that a 135M model solves some and fails others.

One worked example comes before each problem. Without it a small instruct model talks about the problem and seldom ends
within the response cap; with it about half of the samples at temperature 1 are right, most groups of 8 have both right
and wrong ones, and a response takes about 20 tokens.
"""

from __future__ import annotations

import hashlib
import random

from rl_engine.data.prompts import Prompt

_EXAMPLE: tuple[dict[str, str], ...] = (
    {"role": "system", "content": "You do sums."},
    {"role": "user", "content": "What is 2 + 6?"},
    {"role": "assistant", "content": "2 + 6 = 8. The answer is 8."},
)


class ArithmeticPrompts:
    """Generated problems; each depends on (seed, step, position) alone.

    Args:
        seed: any integer.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def batch(self, step: int, count: int) -> list[Prompt]:
        """The ``count`` prompts of ``step``."""
        return [self._prompt(step, position) for position in range(count)]

    def _prompt(self, step: int, position: int) -> Prompt:
        key = hashlib.blake2b(f"arithmetic/{self._seed}/{step}/{position}".encode(), digest_size=16).digest()
        expression, answer = _problem(random.Random(int.from_bytes(key, "big")))
        question = {"role": "user", "content": f"What is {expression}?"}
        return Prompt(position, (*_EXAMPLE, question), str(answer), f"arithmetic:{step}/{position}")


def _problem(draw: random.Random) -> tuple[str, int]:
    """An expression and its value. Kinds and sizes are weighted towards problems that are sometimes solved."""
    kind = draw.choice(("+", "+", "-", "-", "×", "×"))
    if kind == "+":
        left, right = draw.randint(4, 19), draw.randint(3, 9)
        return f"{left} + {right}", left + right
    if kind == "-":
        left, right = draw.randint(4, 12), draw.randint(1, 9)
        return f"{left} - {right}", left - right
    left, right = draw.randint(2, 9), draw.randint(3, 12)
    return f"{left} × {right}", left * right
