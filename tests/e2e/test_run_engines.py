"""Runs with engines of another package: found by name, judged by what they declare."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from rl_engine.records.reader import RunReader
from tests.e2e.harness import REPOSITORY, Cli

POINTS = """[rl_kernel.engines]
rollout.plain = foreign_engines:PlainRollout
train.quiet = foreign_engines:QuietTrainer
rollout.lost = foreign_engines:Nothing
"""
QUICK = ["--run-id", "r", "--max-response-len", "6", "--rollout-batch-size", "1", "--samples-per-prompt", "4"]


@pytest.fixture
def package(sources: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a command where a package with these engines is installed."""
    folder = tmp_path / "site"
    metadata = folder / "foreign_engines-1.5.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests/helpers/foreign_engines.py", folder)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-engines\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    return {"PYTHONPATH": os.pathsep.join([str(sources), str(folder)])}


def findings(cli: Cli, env: dict[str, str], *arguments: str) -> tuple[dict[str, dict[str, str]], dict[str, list[str]]]:
    done = cli("validate", str(cli.run_dir("r")), "--json", *arguments, env=env)
    assert done.code == 0, done.out + done.err
    body = json.loads(done.out)
    return {finding["name"]: finding for finding in body["findings"]}, body


def test_a_foreign_rollout_engine_beside_the_built_in_trainer(cli: Cli, package: dict[str, str]) -> None:
    """It draws the built-in engine's bits; what it does not record is said, and nothing else is let off."""
    done = cli("run", *QUICK, "--rollout-engine", "plain", env=package)
    assert (done.code, done.strays) == (0, ()), done.err
    assert cli("run", *QUICK[2:], "--run-id", "own", env=package).code == 0
    reader, own = RunReader(cli.run_dir("r")), RunReader(cli.run_dir("own"))
    plan, own_plan = reader.plan().plan, own.plan().plan
    assert (plan["stack"], plan["train_engine"], plan["rollout_engine"]) == ("custom", "builtin", "plain")
    assert "rollout_engine" not in own_plan and own_plan["stack"] == "builtin"
    for step in (0, 1):
        here, there = reader.samples(step), own.samples(step)
        assert here.tokens.tobytes() == there.tokens.tobytes()
        assert here.rollout_logprob.tobytes() == there.rollout_logprob.tobytes()
    assert [record.mismatches for record in reader.steps()] == [0, 0]
    assert reader.weights() == own.weights()
    found, body = findings(cli, package, "--rescore")
    warned = {name for name, finding in found.items() if finding["status"] == "WARN"}
    assert warned == {"workers", "routes", "contract", "qualification", "threads", "execution", "passes"}
    assert found["passes"]["found"] == "not declared: passes by rollout engine plain"
    assert "all through the planned providers; not declared: routes by rollout engine plain" in found["routes"]["found"]
    assert found["replicas"]["status"] == found["rescore"]["status"] == found["redraw"]["status"] == "PASS"
    assert any("on the train side" in line for line in body["certifies"])
    assert any(
        "rollout engine plain does not declare: contract, threads, routes" in s for s in body["does_not_certify"]
    )


def test_two_foreign_engines_and_names_that_nobody_has(cli: Cli, package: dict[str, str]) -> None:
    pair = ["--train-engine", "quiet", "--rollout-engine", "plain"]
    done = cli("run", *QUICK, *pair, env=package)
    assert (done.code, done.strays) == (0, ()), done.err
    declared = [event.fields for event in RunReader(cli.run_dir("r")).events() if event.kind == "engine_declared"]
    assert [(fields["name"], fields["package"], fields["version"]) for fields in declared] == [
        ("quiet", "foreign-engines", "1.5"),
        ("plain", "foreign-engines", "1.5"),
    ]
    found, body = findings(cli, package, "--rescore")
    assert found["redraw"]["found"] == "not declared: draws by train engine quiet"
    assert found["rescore"]["status"] == "PASS"
    assert found["routes"]["found"] == "not declared: routes by train engine quiet, routes by rollout engine plain"
    assert not any("planned provider" in line for line in body["certifies"])
    assert found["mismatches"]["status"] == "PASS"
    for arguments, words in (
        (["--rollout-engine", "plan"], "an installed engine: builtin, lost, plain"),
        (["--rollout-engine", "plan"], "did you mean plain?"),
        (["--train-engine", "plain"], "an installed engine: builtin, quiet"),
        (["--rollout-engine", "lost"], "cannot be imported"),
        (["--stack", "megatron-vllm"], "an installed engine: builtin"),
    ):
        done = cli("run", *QUICK[2:], "--run-id", "other", *arguments, env=package)
        assert done.code == 2 and words in done.err and "Traceback" not in done.err, (arguments, done.err)
