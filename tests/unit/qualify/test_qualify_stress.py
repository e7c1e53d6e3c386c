"""The stress of a GPU's operators, but for the GPU: children that die, hang, are wrong, and what is said of them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_engine.models.config import parse_config
from rl_engine.qualify.cli import DEMO_SHAPE
from rl_engine.qualify.gpu import stress
from rl_engine.qualify.gpu.stress import Subject, Tally

CHILD = """
import json, os, sys, time

task = json.loads(sys.argv[1])
say = lambda **words: print(json.dumps(words), flush=True)
for name in task["names"]:
    say(begin=name)
    say(sizes=f"sizes of {name}")
    print("a library's warning", flush=True)
    if "dies" in name:
        sys.exit("RuntimeError: unspecified launch failure")
    if "hangs" in name:
        time.sleep(60)
    say(done=name, what=f"sizes of {name}", calls=100, wrong=7 if "wrong" in name else 0)
say(end=True)
"""


@pytest.fixture
def forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Tally]]:
    """Runs the stress of these forms by a child that does what their names say; ``control`` in a name makes it one."""
    (tmp_path / "stress_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(stress, "MODULE", "stress_child")
    monkeypatch.setattr(stress, "SILENCE", 1.5)
    module: Any = types.ModuleType("rl_engine.qualify.gpu.subjects")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(*names: str, **words: Any) -> dict[str, Tally]:
        made = [Subject("op", name, lambda *_: None, control="control" in name) for name in names]  # type: ignore
        module.subjects = lambda config: made
        return {tally.name: tally for tally in stress.stress(parse_config(DEMO_SHAPE), 1.0, **words)}

    return run


def test_a_form_that_loses_the_device_is_named_and_the_next_is_still_tried(forms: Any) -> None:
    said: list[str] = []
    found = forms("first", "dies", "last", say=said.append)
    assert [found[f"op: {name}"].holds for name in ("first", "dies", "last")] == [True, False, True]
    dead = found["op: dies"]
    assert dead.lost == "RuntimeError: unspecified launch failure" and dead.first == "sizes of op: dies"
    assert said == ["op: dies: RuntimeError: unspecified launch failure"]
    assert found["op: last"].calls == 100


def test_a_form_that_hangs_is_ended_and_a_wrong_one_is_counted(forms: Any) -> None:
    found = forms("hangs", "wrong", "right", children=2)
    assert found["op: hangs"].lost == "it never ended" and not found["op: hangs"].holds
    assert found["op: wrong"].wrong == 7 and found["op: wrong"].first == "sizes of op: wrong"
    assert found["op: right"].holds and not found["op: wrong"].holds


def test_a_control_must_be_caught_by_its_own_fault(forms: Any) -> None:
    found = forms("right control", "wrong control", "control that dies", "control that hangs")
    assert [tally.holds for tally in found.values()] == [False, True, True, False]
    lines = list(stress.report(list(found.values())))
    assert lines[0].startswith("NOT CAUGHT op: right control") and lines[1].startswith("caught  op: wrong control")


def test_a_proof_fails_with_every_form_that_does(forms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stress.stress
    monkeypatch.setattr(stress, "SHORT", 1.0)
    monkeypatch.setattr(
        stress, "stress", lambda config, seconds, **words: [*run(config, seconds, **words), Tally("none")]
    )
    forms("right")
    module = sys.modules["rl_engine.qualify.gpu.subjects"]
    names = ("right", "wrong", "dies", "right control", "wrong control")
    made = [Subject("op", name, lambda *_: None, control="control" in name) for name in names]  # type: ignore
    monkeypatch.setattr(module, "subjects", lambda config: made)
    cases = stress.cases(parse_config(DEMO_SHAPE))
    held = {case.what.partition(",")[0]: case.holds for case in cases}
    assert held == {
        "op: right": True,
        "op: wrong": False,
        "op: dies": False,
        "op: right control": False,
        "op: wrong control": True,
        "none: not one call": False,
    }
