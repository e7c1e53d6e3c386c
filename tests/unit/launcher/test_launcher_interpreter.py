"""Which interpreter a command line, the environment or a profile names."""

from __future__ import annotations

import json

import pytest

from rl_engine.entrypoints import interpreter
from rl_engine.entrypoints.interpreter import named_interpreter


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def profile(tmp_path, name="p.json", **paths: str) -> str:
    file = tmp_path / name
    file.write_text(json.dumps({"paths": paths}))
    return str(file)


def test_order(tmp_path):
    file = profile(tmp_path, python="bin/py")
    env = {"RLK_REPRO_RUNTIME_ROOT": "/env", "RLK_REPRO_PROFILE": file}
    assert named_interpreter(["run", "--python", "/flag/py"], env) == ("/flag/py", "--python")
    assert named_interpreter(["run", "--runtime-root=/flag"], env) == ("/flag/bin/python", "--runtime-root")
    assert named_interpreter(["run"], env) == ("/env/bin/python", "RLK_REPRO_RUNTIME_ROOT")
    del env["RLK_REPRO_RUNTIME_ROOT"]
    assert named_interpreter(["run"], env) == (str(tmp_path / "bin/py"), f"paths.python of {file}")
    other = profile(tmp_path, "q.json", runtime_root="/root")
    assert named_interpreter(["run", "--profile", other], env) == ("/root/bin/python", f"paths.runtime_root of {other}")
    assert named_interpreter(["run"], {}) is None
    profile(tmp_path, ".rlk-profile.json", python="/local/py")
    assert named_interpreter(["run"], {}) == ("/local/py", "paths.python of .rlk-profile.json")


def test_placeholders_and_broken_profiles_name_none(tmp_path):
    assert named_interpreter(["plan", "--profile", profile(tmp_path, python="edit me: python")], {}) is None
    (tmp_path / "bad.json").write_text("[")
    for file in ("bad.json", "none.json"):
        assert named_interpreter(["plan", "--profile", file], {}) is None


def test_a_missing_one_stops_a_run_but_not_a_plan(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RLK_REPRO_PYTHON", str(tmp_path / "none"))
    assert interpreter.main(["run"]) == 2
    assert capsys.readouterr().err.startswith("rlk-repro: found no interpreter")
    assert interpreter.main(["plan"]) == 0
    assert capsys.readouterr().out == ""
