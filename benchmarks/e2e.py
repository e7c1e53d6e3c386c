"""The whole job: a paired run on Ray through the command line; seconds per phase of every step, from its records."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import ROOT, Case, Report, Timing
from rl_engine.records.errors import UserError

PHASES = ("rollout", "reward", "old_logp", "train", "optimizer", "weight_sync", "other")


def main(options: argparse.Namespace) -> Report:
    """The two runs follow each other (native, consistency), each with all of its steps; ``--rounds`` counts steps."""
    command = [sys.executable, "-m", "rl_engine.entrypoints.repro", "run", "--mode", "paired", "--json"]
    command += ["--rollouts", str(max(2, options.rounds))]
    command += ["--threads", str(options.threads)]
    for flag, folder in (("--workspace", options.workspace), ("--model-root", options.model_root)):
        if folder:
            command += [flag, str(Path(folder).resolve())]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise UserError(f"a run that ended with exit code {done.returncode}", "a paired run", "its message is above")
    folders = [Path(run["run_dir"]) for run in json.loads(done.stdout)["runs"]]
    steps = {_mode(folder): _steps(folder) for folder in folders}
    report = Report("e2e", {"exit code": done.returncode, "runs": [str(folder) for folder in folders]})
    for phase in ("step", *PHASES):
        timings = {mode: Timing([_seconds(step, phase) for step in rows]) for mode, rows in steps.items()}
        if all(timing.median > 0 for timing in timings.values()):
            report.cases.append(Case(phase, 1, "calls", timings))
    return report


def _mode(folder: Path) -> str:
    return str(json.loads((folder / "plan.json").read_text())["plan"]["mode"])


def _steps(folder: Path) -> list[dict[str, dict[str, float]]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def _seconds(step: dict[str, dict[str, float]], phase: str) -> float:
    seconds = step["seconds"]
    return sum(seconds.values()) if phase == "step" else seconds[phase]
