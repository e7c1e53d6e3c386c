"""Engines that lie, in a real run of a model on which stock operators do round differently: what each lie shows in.

Every lie here left a run with all gates passed before scoring was counted apart, the update's count was a record, and a
fresh process drew tokens again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rl_engine.checks.finding import Finding
from rl_engine.checks.rescore import reach, rescore_findings
from rl_engine.checks.validate import run_validation
from rl_engine.config.plan import Plan, SamplingPlan
from rl_engine.engines.builtin import BuiltinRolloutEngine, BuiltinTrainEngine
from rl_engine.engines.protocol import Host
from rl_engine.engines.types import Request, Sample, UpdateResult
from rl_engine.models import decoder
from rl_engine.records.reader import RunReader
from rl_engine.records.statistics import logprob_statistics
from tests.e2e.harness import profile, save_model
from tests.helpers.plain_run import make_plan, plain_run

COOLER = 0.8  # the rollout's temperature where it is not the plan's


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden": 1024, "intermediate": 512, "heads": 16, "kv_heads": 8, "head_dim": 64}
    return save_model(tmp_path_factory.mktemp("wide") / "model", **shape)


def plan_for(folder: Path, model: Path, *arguments: str) -> Plan:
    small = {"rollouts": 1, "rollout_batch_size": 2, "samples_per_prompt": 4, "checkpoint_every": 0}
    return make_plan(folder, profile(folder, **small), model, ["--run-id", "r", *arguments])


def failed(findings: list[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.status == "FAIL"}


class Copying(BuiltinTrainEngine):
    """Scores nothing: the rollout's logprobs are its own."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.engine.score = self.copied  # type: ignore[method-assign]

    def copied(self, samples: list[Sample], progress: Any = None) -> list[np.ndarray]:
        return [sample.logprobs.copy() for sample in samples]


class CopyingSilently(Copying):
    """Its update finds no ratio but 1 either, it says."""

    def step(self, *arguments: Any) -> UpdateResult:
        return dataclasses.replace(super().step(*arguments), ratio_mismatches=0)


class CopyingInShow(CopyingSilently):
    """Computes every logprob where it is watched, and throws it away."""

    def copied(self, samples: list[Sample], progress: Any = None) -> list[np.ndarray]:
        type(self.engine).score(self.engine, samples, progress)
        return super().copied(samples)


class Sampling(BuiltinRolloutEngine):
    """Draws by other settings than it is told."""

    changes: ClassVar[dict[str, Any]]

    def generate(self, requests: list[Request], step: int, sampling: SamplingPlan, *more: Any) -> list[Sample]:
        return super().generate(requests, step, dataclasses.replace(sampling, **self.changes), *more)


class Cooler(Sampling):
    """Draws and reports at another temperature than the plan's."""

    changes: ClassVar = {"temperature": COOLER}


class OtherSeed(Sampling):
    """Draws with noise of its own choice, of which it keeps silent."""

    changes: ClassVar = {"rollout_seed": 4321}


class Filtering(Sampling):
    """Draws among five tokens where the plan has all, and says so in the retained sets alone."""

    changes: ClassVar = {"top_k": 5}


def mismatches(run: Path) -> int:
    reader = RunReader(run)
    return sum(logprob_statistics(reader.samples(step)).mismatches for step in reader.sample_steps())


def test_an_honest_run_passes_and_every_step_comes_out_again(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps: the first from the checkpoint, and the one whose weights were kept after it was over."""
    run = plain_run(plan_for(tmp_path, wide_model, "--rollouts", "3", "--top-p", "0.9"), monkeypatch)
    assert failed(run_validation(run)) == set()
    again = rescore_findings(run, "all")
    assert [finding.name for finding in again] == ["rescore", "redraw"] and failed(again) == set()
    kept = int(next((run / "kept").iterdir()).stem.removeprefix("step-"))
    assert kept in (1, 2)
    assert again[0].found.endswith(f"not computed again, of which no weights were kept: step {3 - kept}")
    assert f"steps 0, {kept}" in again[1].found and "retained sets" in again[1].found
    for step in RunReader(run).steps():
        assert (step.score_tokens, step.ratio_mismatches) == (step.tokens_compared, 0)
        assert step.score_calls is not None and step.score_calls > 0


class DiesInTheThirdStep(BuiltinTrainEngine):
    def step(self, *arguments: Any) -> UpdateResult:
        if self.engine.version == 2:
            raise RuntimeError("as asked")
        return super().step(*arguments)


@pytest.mark.parametrize("states", ["0", "1"])
def test_a_resumed_run_keeps_weights_that_give_its_bits(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    """Without trainer states finished steps are computed again; with them the last step has one as its weights."""
    plan = plan_for(tmp_path, wide_model, "--rollouts", "3", "--checkpoint-every", states)
    with pytest.raises(RuntimeError, match="as asked"):
        plain_run(plan, monkeypatch, DiesInTheThirdStep)
    assert len(RunReader(plan.run_dir).steps()) == 2
    run = plain_run(plan, monkeypatch)
    assert failed(run_validation(run)) == set()
    (kept,) = (run / "kept").iterdir()
    step = int(kept.name.removeprefix("step-").removesuffix(".safetensors"))
    assert reach(RunReader(run))[0] == ([0, step] if states == "0" else sorted({0, step, 2}))
    if states == "1":
        step = 2
        kept.unlink()
    again = rescore_findings(run, step)
    assert [finding.name for finding in again] == ["rescore", "redraw"] and failed(again) == set()


@pytest.mark.parametrize(
    ("trainer", "gates"),
    [(Copying, {"not_reused", "ratios"}), (CopyingSilently, {"not_reused"}), (CopyingInShow, set())],
)
def test_a_trainer_that_copies_hides_a_wrong_temperature(
    wide_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer: type[BuiltinTrainEngine],
    gates: set[str],
) -> None:
    run = plain_run(plan_for(tmp_path, wide_model), monkeypatch, trainer, Cooler)
    assert mismatches(run) == 0, "the lie is one that the comparison cannot see"
    assert failed(run_validation(run)) == gates
    if not gates:  # a trainer that lies wherever it is asked
        found = {finding.name: finding for finding in rescore_findings(run)}
        assert failed(list(found.values())) == {"rescore", "redraw"}
        tokens = RunReader(run).steps()[0].tokens_compared
        assert int(found["rescore"].found.split()[2]) > 0.9 * tokens, found["rescore"].found


def test_an_honest_trainer_sees_a_wrong_temperature(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plain_run(plan_for(tmp_path, wide_model), monkeypatch, BuiltinTrainEngine, Cooler)
    assert failed(run_validation(run)) == {"mismatches"}


def drawn_again(run: Path) -> Finding:
    """Everything but the draws is in order; the finding about them."""
    assert mismatches(run) == 0
    assert failed(run_validation(run)) == set()
    logprobs, draws = rescore_findings(run)
    assert logprobs.status == "PASS", logprobs
    assert draws.status == "FAIL" and draws.name == "redraw", draws
    return draws


def test_tokens_of_another_seed_are_not_the_noise_of_the_plan(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plain_run(plan_for(tmp_path, wide_model), monkeypatch, BuiltinTrainEngine, OtherSeed)
    tokens = RunReader(run).steps()[0].tokens_compared
    found = drawn_again(run).found
    assert f" of {tokens} tokens are not the drawn ones" in found
    assert int(found.removeprefix("step 0: ").split()[0]) > 0.2 * tokens, found


def test_a_filter_that_nobody_planned_is_seen(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plain_run(plan_for(tmp_path, wide_model), monkeypatch, BuiltinTrainEngine, Filtering)
    tokens = RunReader(run).steps()[0].tokens_compared
    assert f"{tokens} of {tokens} retained sets differ" in drawn_again(run).found


def test_retained_sets_of_a_wider_filter_are_seen(
    wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout keeps more than top-p says, and both sides score over what it kept."""
    honest = decoder.retained_mask

    def wider(z: Any, inv_t: float, top_k: int, top_p: float) -> Any:
        return honest(z, inv_t, top_k, top_p + 0.05)

    monkeypatch.setattr(decoder, "retained_mask", wider)
    run = plain_run(plan_for(tmp_path, wide_model, "--top-p", "0.8"), monkeypatch)
    assert "retained sets differ" in drawn_again(run).found


@pytest.mark.parametrize(("steps", "words"), [([0], "0"), ([0, 1], "0, 1"), ([0, 2, 3, 4, 9], "0, 2 to 4, 9")])
def test_steps_are_named_shortly(steps: Sequence[int], words: str) -> None:
    from rl_engine.checks.rescore import _words

    assert _words(list(steps)) == words
