"""Selected logp as one of a model's operators; the comparisons are those of ``qualify/gpu/logp.py``."""

from __future__ import annotations

from collections.abc import Iterator

from rl_engine.models.config import ModelConfig
from rl_engine.qualify.cases import Case
from rl_engine.qualify.gpu import logp
from rl_engine.qualify.gpu.data import Inputs

PARTS = ("selected_logp",)


def selected_logp(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """At the model's vocabulary."""
    yield from logp.prove(config.vocabulary, inputs)
