"""Hostile input in CI: the same seeds in every run, so that a fault repeats; nightly tries more."""

from __future__ import annotations

import pytest

from tests.fuzz.families import FAMILIES
from tests.fuzz.runner import MEMORY_KB, run_family

INPUTS = 75  # of each of seven families: over 500
NIGHTLY_INPUTS = 400


def check(name: str, seed: int, inputs: int) -> None:
    outcome = run_family(name, seed, inputs)
    assert outcome.faults == [], "\n".join(f"{key}\n{text}" for key, text in outcome.faults)
    assert outcome.used + outcome.refused == inputs
    assert outcome.refused > inputs / 10, "the inputs are hardly spoilt"
    assert outcome.grown_kb < MEMORY_KB


@pytest.mark.parametrize("name", FAMILIES)
def test_hostile_input_is_refused_or_used(name: str) -> None:
    check(name, 1, INPUTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_more_hostile_input(name: str) -> None:
    check(name, 2, NIGHTLY_INPUTS)
