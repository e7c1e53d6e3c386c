"""The gates that a run must pass: each judges one thing, from typed records only."""

from __future__ import annotations

from rl_engine.checks.gates.engines import ENGINE_GATES
from rl_engine.checks.gates.evidence import Gate
from rl_engine.checks.gates.lifecycle import LIFECYCLE_GATES
from rl_engine.checks.gates.passes import PASS_GATES
from rl_engine.checks.gates.samples import SAMPLE_GATES
from rl_engine.checks.gates.weights import WEIGHT_GATES

GATES: tuple[Gate, ...] = (*LIFECYCLE_GATES, *SAMPLE_GATES, *ENGINE_GATES, *WEIGHT_GATES, *PASS_GATES)
