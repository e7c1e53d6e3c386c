"""Kills of a run's processes at random moments, each followed by ``run --resume``; what must be left is checked.

``python -m tests.e2e.kills --sessions 12 --seed 100`` runs many sessions and prints what was killed when, as JSON.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rl_engine.checks.compare import compare_runs
from rl_engine.records.reader import RunReader
from tests.e2e.harness import Cli, Command, copy_sources, profile, save_model

TARGETS = ("trainer", "rollout", "orchestrator", "head")
STEPS = 60  # of every run; a session's kills come within the first half of them
DRIVER = "driver"
TITLES = {
    "trainer": ("ray::TrainWorker",),
    "rollout": ("ray::RolloutWorker",),
    "orchestrator": (DRIVER,),
    "head": ("raylet/raylet", "gcs/gcs_server"),
}


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill as it happened: ``moment`` is ``checkpoint`` only where one was left half-written."""

    target: str
    moment: str
    process: str
    finished_steps: int
    code: int
    seconds: float


def small_model(folder: Path) -> Path:
    """One layer of width 64: a step takes hundredths of a second."""
    return save_model(folder, layers=1, hidden=64, intermediate=64, heads=2, kv_heads=2, head_dim=32)


def make_cli(sources: Path, model: Path, folder: Path) -> Cli:
    settings = {"rollouts": STEPS, "rollout_batch_size": 1, "samples_per_prompt": 4, "max_response_len": 6}
    file = profile(folder, fold_tokens=64, **settings)
    return Cli(sources, folder, ["--profile", str(file), "--model-root", str(model)])


class Session:
    """One run that is killed again and again and then finishes."""

    def __init__(self, cli: Cli, run_id: str, reference: Path, rng: random.Random) -> None:
        self.cli, self.run_id, self.rng = cli, run_id, rng
        self.run_dir = cli.run_dir(run_id)
        self.reference = RunReader(reference)
        self.kills: list[Kill] = []

    def kill(self, target: str, moment: str) -> Kill:
        """Starts or goes on, kills ``target``, and checks what is left."""
        started = time.monotonic()
        command, before = self._start(), self.finished()
        try:
            pid, name = self._await(command, target, moment, before)
        except BaseException:
            command.end()
            raise
        partial = list(self.run_dir.glob("checkpoints/.step-*.partial"))
        os.kill(pid, signal.SIGKILL)
        done = command.finish(120.0)
        assert done.code == 3, f"exit code {done.code} after the death of {target}: {done.err}"
        assert done.strays == (), f"{done.strays} outlived the death of {target}"
        assert "Traceback" not in done.err, done.err
        half = bool(partial) or bool(list(self.run_dir.glob("checkpoints/.step-*.partial")))
        happened = "checkpoint" if half else "step" if self.finished() else "start"
        self.kills.append(Kill(target, happened, name, self.finished(), done.code, time.monotonic() - started))
        assert self.finished() >= before, "a finished step is gone"
        if self.run_dir.exists():
            assert [state.name for state in RunReader(self.run_dir).states()][-1] == "failed"
            self.check_steps()
        return self.kills[-1]

    def finish(self) -> None:
        """The rest without a kill: a valid run, bit for bit the uninterrupted one."""
        done = self._start().finish(300.0)
        assert done.code == 0, done.err
        result = compare_runs(self.reference.run_dir, self.run_dir)
        assert result.results == (), result.results
        assert [state.name for state in RunReader(self.run_dir).states()][-2:] == ["finished", "valid"]

    def finished(self) -> int:
        path = self.run_dir / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def check_steps(self) -> None:
        """Every finished step has its samples and weights, and they are the uninterrupted run's bytes."""
        for step in range(self.finished()):
            for name in (f"samples/step-{step:05d}.safetensors", f"weights/{step + 1}.json"):
                assert (self.run_dir / name).read_bytes() == (self.reference.run_dir / name).read_bytes(), name

    def _start(self) -> Command:
        if (self.run_dir / "plan.json").exists():
            return self.cli.start("run", "--resume", self.run_id)
        return self.cli.start("run", "--run-id", self.run_id)

    def _await(self, command: Command, target: str, moment: str, before: int) -> tuple[int, str]:
        """(process to kill, its name) at the chosen moment."""
        title, steps = self.rng.choice(TITLES[target]), self.rng.randint(1, 5)
        if moment == "start":
            command.wait_for(lambda: self._find(command, title) is not None, 300.0, poll=0.02)
            time.sleep(self.rng.random() * 2.0)
        else:
            command.wait_for(lambda: self.finished() >= before + steps, 300.0, poll=0.005)
        found = self._find(command, title)
        assert found is not None, f"no {title} to kill"
        if moment == "checkpoint":
            end = time.monotonic() + 10.0
            while not any(self.run_dir.glob("checkpoints/.step-*.partial")) and time.monotonic() < end:
                time.sleep(0.0005)
        elif moment == "step":
            time.sleep(self.rng.random() * 0.1)
        return found

    def _find(self, command: Command, title: str) -> tuple[int, str] | None:
        if title == DRIVER:
            return self._driver(command)
        found = [pid for pid, text in command.processes(title).items() if title in text.split()[0]]
        return (found[0], title) if found else None

    def _driver(self, command: Command) -> tuple[int, str] | None:
        if not (self.run_dir / "plan.json").exists():
            return None
        begun = [event.fields["pid"] for event in RunReader(self.run_dir).events() if event.kind == "attempt"]
        return (int(begun[-1]), DRIVER) if begun and int(begun[-1]) in command.processes() else None


def plan_kills(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Every target in turn; half of the moments lie in a checkpoint."""
    targets = [TARGETS[number % len(TARGETS)] for number in range(count)]
    rng.shuffle(targets)
    return [(target, rng.choice(["step", "checkpoint", "checkpoint", "start"])) for target in targets]


def reference_run(cli: Cli) -> Path:
    """The uninterrupted run."""
    done = cli("run", "--run-id", "reference")
    assert done.code == 0, done.err
    return cli.run_dir("reference")


def run_session(cli: Cli, seed: int, count: int, reference: Path, tell: Callable[[Kill], None]) -> None:
    rng = random.Random(seed)
    session = Session(cli, f"killed-{seed}", reference, rng)
    for target, moment in plan_kills(count, rng):
        tell(session.kill(target, moment))
    session.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--kills", type=int, default=5, help="of every session")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seen: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="rlk-kills-") as name:
        folder = Path(name)
        cli = make_cli(copy_sources(folder / "sources"), small_model(folder / "model"), folder)
        reference = reference_run(cli)

        def tell(kill: Kill) -> None:
            seen.update((kill.target, f"during {kill.moment}", "kills"))
            print(json.dumps(dataclasses.asdict(kill)), flush=True)

        for session in range(options.sessions):
            try:
                run_session(cli, options.seed + session, options.kills, reference, tell)
            except AssertionError:
                seen["faults"] += 1
                print(traceback.format_exc(), file=sys.stderr, flush=True)
            print(json.dumps({"sessions": session + 1, **seen}), flush=True)
    return 1 if seen["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
