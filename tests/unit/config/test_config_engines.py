"""Engines by name: what is installed, which a plan names, and what earlier plans are."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from rl_engine.config.codec import plan_digest, plan_from_json, plan_to_json
from rl_engine.config.engines import GROUP, OWN, STACKS, Engines, find_engine, installed, stack_of
from rl_engine.records.errors import UserError
from tests.helpers.synthetic_run import make_plan

ROOT = Path(__file__).resolve().parents[3]
EARLIER = "d539827780b1d6e175d7e72974f72a7a9ddbf6649b5174e2c53becdd32ae3e11"  # before a plan could name engines


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with engines of its own, one under the name of a built-in one."""
    metadata = tmp_path / "other-2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    points = [
        "rollout.quick = other:Quick",
        "rollout.builtin = other:Thief",
        "train. = other:Nameless",
        "odd = other:X",
    ]
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n" + "\n".join(points) + "\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_the_packaging_names_the_engines_that_are_known_without_it() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    assert points == {f"{engine.side}.{engine.name}": engine.target for engine in OWN}


def test_engines_of_other_packages_are_found_and_replace_none_of_ours(package: None) -> None:
    assert {name: engine.target for name, engine in installed("rollout").items()} == {
        "builtin": "rl_engine.engines.builtin:BuiltinRolloutEngine",
        "quick": "other:Quick",
    }
    assert list(installed("train")) == ["builtin"]
    quick = find_engine("rollout", "quick")
    assert (quick.package, quick.version) == ("other", "2.0")
    with pytest.raises(UserError, match="an installed engine: builtin, quick; hint: did you mean quick"):
        find_engine("rollout", "quack")
    with pytest.raises(UserError, match=f"train.quick in the group {GROUP}"):
        find_engine("train", "quick")


def test_a_side_is_named_by_flag_or_profile_and_a_stack_is_short_for_a_pair(plan_for, package: None) -> None:
    plan = plan_for(rollout_engine="quick")[1].plan
    assert (plan.stack, plan.engines) == ("custom", Engines("builtin", "quick"))
    assert plan.evidence in ("experimental", "development")
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan_for(rollout_engine="builtin", train_engine="builtin")[1].plan == plan_for()[1].plan
    mixed = plan_for(stack="megatron-vllm", train_engine="builtin")[1].plan
    assert (mixed.stack, mixed.engines) == ("custom", Engines("builtin", "vllm"))
    assert {stack: stack_of(pair) for stack, pair in STACKS.items()} == {
        "builtin": "builtin", "megatron-vllm": "megatron-vllm", "vime": "megatron-vllm",
    }  # fmt: skip
    for flags, message in (
        ({"rollout_engine": "quack"}, "--rollout-engine quack"),
        ({"train_engine": "quick"}, "an installed engine: builtin"),
        ({"stack": "vime", "rollout_engine": "quick"}, "its own engines|use --stack builtin"),
    ):
        with pytest.raises(UserError, match=message):
            plan_for(**flags)


def test_plans_of_earlier_versions_keep_their_digests(plan_for) -> None:
    plan = make_plan(Path("/runs/run-1"))
    assert plan_digest(plan) == EARLIER and "train_engine" not in plan_to_json(plan)
    assert plan.engines == Engines("builtin", "builtin") and plan.local
    assert plan_digest(plan_from_json(plan_to_json(plan))) == EARLIER
    named = dataclasses.replace(plan, stack="custom", train_engine="builtin", rollout_engine="quick")
    assert plan_digest(named) != EARLIER and plan_from_json(plan_to_json(named)) == named
