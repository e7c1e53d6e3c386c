"""Every test here computes with the session's thread count."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _threads(compute_threads: int) -> None:
    """Takes the session's thread count before the test."""
