"""The doctor on the fault suite: a sample of it in every run, all of it in the nightly tier."""

from __future__ import annotations

import pytest

from rl_engine.diagnose.doctor import diagnose

from .clean import VARIANTS, clean_log
from .registry import FAULTS, make_log
from .score import HELD_OUT, right_causes, score_clean, score_faults, score_pairs

SEED = 403  # a small run (40 samples of up to 96 tokens)


def test_the_suite_is_large_enough() -> None:
    assert len(FAULTS) >= 25
    assert len({item.cause for item in FAULTS.values()}) >= 25


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_severe_fault_is_named_first(name: str) -> None:
    log = make_log((name,), SEED, (FAULTS[name].ladder[-1],))
    said = [finding.cause for finding in diagnose(log).reported]
    assert said[0] in right_causes(name), said


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_clean_run_raises_no_alarm(variant: str) -> None:
    diagnosis = diagnose(clean_log(variant, SEED))
    assert not diagnosis.alarm, [finding.evidence for finding in diagnosis.reported]


def test_equal_settings_give_equal_logs() -> None:
    a, b = (make_log(("stale-weights",), SEED, (0.02,)) for _ in range(2))
    assert (a.train == b.train).all() and (a.rollout == b.rollout).all()


@pytest.mark.slow
def test_scores_on_the_held_out_seeds() -> None:
    tallies = score_faults(HELD_OUT)
    runs = sum(tally.runs for tally in tallies.values())
    assert sum(tally.first for tally in tallies.values()) >= 0.90 * runs
    assert sum(tally.third for tally in tallies.values()) >= 0.97 * runs
    count, alarms = score_clean(HELD_OUT[:2])
    assert count >= 20 and not alarms


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="a strong fault hides a weak one: both named in 66.7 % of runs, wanted 75 %")
def test_both_of_two_faults_are_among_the_first_three() -> None:
    pairs, first, both, _ = score_pairs(HELD_OUT[:2])
    assert first >= 0.9 * pairs and both >= 0.75 * pairs
