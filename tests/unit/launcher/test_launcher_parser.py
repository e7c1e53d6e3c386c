"""The command line: exit codes, one-line refusals, help without an environment."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from rl_engine.config.paths import REPOSITORY
from rl_engine.entrypoints.parser import VERBS
from rl_engine.entrypoints.repro import main
from tests.helpers.checkpoints import write_model


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    import os

    for name in [name for name in os.environ if name.startswith("RLK_REPRO_") or name == "RAY_API_SERVER_ADDRESS"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def refused(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    line = capsys.readouterr().err.rstrip("\n").splitlines()[-1]
    assert line.startswith("rlk-repro: found ")
    assert ", expected " in line
    assert "; hint: " in line
    return line


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["pln"], "did you mean plan?"),
        (["plan", "--temprature", "1"], "did you mean --temperature?"),
        (["plan", "--temperature", "0"], "--temperature 0"),
        (["plan", "--temperature", "nan"], "finite number"),
        (["plan", "--temperature", "-inf"], "--temperature"),
        (["plan", "--top-k", "0"], "--top-k 0"),
        (["plan", "--seed"], "--seed"),
        (["plan", "surplus"], "surplus"),
        (["run", "--wait", "--detach"], "not allowed"),
        (["run", "--model-root", "/does/not/exist"], "/does/not/exist"),
        (["run", "--resume", "nowhere"], "no run nowhere"),
        (["run", "--resume", "x", "--lr", "1"], "--lr with --resume"),
        (["attach", "nowhere"], "no run nowhere"),
        (["stop", "nowhere", "--output-root", "x"], "no run nowhere"),
        (["validate"], "exactly one"),
        (["validate", "--run-dir", "nowhere"], "nowhere"),
        (["compare", "a", "b"], "no run directory a"),
        (["plan", "--profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(capsys, argv, part):
    assert part in refused(capsys, *argv)


def test_no_verb_shows_help_and_refuses(capsys):
    assert "no verb" in refused(capsys)


def test_plan_prints_every_value_with_its_source(capsys):
    assert main(["plan", "--tp", "3", "--steps", "7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("profile cpu-smollm2 ")
    for part in (
        "flag: --tp]",
        "flag: --steps]",
        "derived: training ranks / TP]",
        "profile: defaults.lr]",
        "SmolLM2-135M-Instruct (run makes it)",
    ):
        assert part in out
    assert "missing" not in out, "a path that nobody has to give"


def test_plan_says_which_paths_are_missing_and_which_nobody_needs(capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    assert main(["plan", "--model-root", "/nowhere", "--prompt-data", str(prompts), "--vime-root", "/here"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  --")}
    assert "/nowhere (missing, --model-root)" in rows["--model-root"]
    assert f"{prompts} (missing, --prompt-data)" in rows["--prompt-data"]
    assert "/here (missing, --vime-root)" in rows["--vime-root"], "what was asked for is shown"
    for flag in ("--megatron-root", "--ref-load", "--te-root"):
        assert "not used by this run" in rows[flag]


def test_plan_json_is_one_object(capsys):
    assert main(["plan", "--json", "--mode", "consistency"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [entry["plan"]["mode"] for entry in body["plans"]] == ["consistency"]
    assert {value["source"] for value in body["values"]} <= {"flag", "env", "profile", "derived", "default"}


def test_run_hands_both_plans_to_the_orchestrator(monkeypatch, capsys, tmp_path):
    seen: dict[str, object] = {}

    def run(plans, *, json_output, rescore):
        seen.update(plans=plans, json_output=json_output, rescore=rescore)
        return 1

    monkeypatch.setitem(sys.modules, "rl_engine.orchestrators.runs", types.SimpleNamespace(run=run, __spec__=None))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    model = write_model(tmp_path / "model")
    assert main(["run", "--model-root", str(model), "--json"]) == 1
    assert [plan.mode for plan in seen["plans"]] == ["native", "consistency"]
    assert (seen["json_output"], seen["rescore"]) == (True, False)
    assert capsys.readouterr().err.startswith("profile cpu-smollm2")
    assert not (tmp_path / ".rlk-workspace").exists()
    assert main(["verify", "--model-root", str(model)]) == 1
    assert seen["rescore"] is True  # on every backend, where a run does so on a CPU


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("RUN", None),
        ("RUN --rescore", "chosen"),
        ("--rescore RUN", "chosen"),
        ("--rescore --run-dir RUN", "chosen"),
        ("--rescore=RUN --seal", "chosen"),
        ("RUN --rescore all", "all"),
        ("--rescore all RUN", "all"),
        ("--rescore 2 RUN", 2),
        ("--run-dir RUN --rescore=0", 0),
    ],
)
def test_rescore_takes_a_step_or_none(monkeypatch, tmp_path, line, wanted):
    """Without a value it stands before the run, too."""
    from rl_engine.checks import validate

    seen = {}
    monkeypatch.setattr(validate, "main", lambda run, **options: seen.update(options, run=run) or 0)
    assert main(["validate", *line.replace("RUN", str(tmp_path)).split()]) == 0
    assert (seen["run"], seen["rescore"]) == (tmp_path, wanted)


def test_rescore_takes_no_second_run(tmp_path, capsys):
    assert main(["validate", "--rescore", str(tmp_path), str(tmp_path)]) == 2
    assert "2 run directories" in capsys.readouterr().err
    assert main(["validate", str(tmp_path), "--rescore", "-1"]) == 2


def test_dry_run_writes_nothing(tmp_path, capsys):
    assert main(["run", "--dry-run"]) == 0
    assert "plan consistency" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help(capsys, verb):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"usage: rlk-repro {verb}" in capsys.readouterr().out


def test_interrupt_is_130(monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("rl_engine.entrypoints.repro._VERBS", {"plan": interrupt})
    assert main(["plan"]) == 130


def test_help_imports_the_standard_library_alone():
    code = (
        "import sys; from rl_engine.entrypoints.parser import build_parser; build_parser(); "
        "print([m for m in ('torch', 'numpy', 'pydantic', 'ray', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("shell", ["sh", "dash"])
def test_launcher_is_posix_shell_and_answers_help_without_an_environment(shell, tmp_path):
    import shutil

    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n", str(REPOSITORY / "rlk")], check=True, timeout=30)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    started = time.monotonic()
    for argv in (["--help"], ["plan", "--help"]):
        done = subprocess.run(
            [shell, str(REPOSITORY / "rlk"), *argv],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout[:16]) == (0, "usage: rlk-repro"), done.stderr
    assert time.monotonic() - started < 10  # generous: this bounds a hang or an install, not speed


def test_launcher_refuses_a_named_interpreter_that_is_not_there(tmp_path):
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "RLK_REPRO_RUNTIME_ROOT": str(tmp_path / "none")}
    done = subprocess.run(
        ["sh", str(REPOSITORY / "rlk"), "run"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "RLK_REPRO_RUNTIME_ROOT" in done.stderr


def test_lock_pins_everything_exactly():
    folder = REPOSITORY / "requirements"
    for file in sorted(folder.glob("*.txt")):
        for line in file.read_text().splitlines():
            if line and not line.startswith("#"):
                assert line.count("==") == 1, f"{file.name}: {line}"
                assert not line.lower().startswith("nvidia"), line
                assert "://" not in line
                assert "+" not in line  # a local version would bind the lock to one build of torch
    assert "torch==2.13.0" in Path(folder / "lock.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("bench", ("rollout", "train", "ops", "e2e")),
        ("diagnose", ("--fields",)),
        ("locate", ("OTHER", "--records-only")),
        ("qualify", ("--again",)),
    ],
)
def test_help_of_a_forwarded_verb_is_its_own(verb, words):
    """Asked without third-party packages: -S leaves site-packages out."""
    command = [sys.executable, "-S", "-m", "rl_engine.entrypoints.repro", verb, "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words)
