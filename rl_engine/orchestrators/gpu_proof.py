"""A GPU's proof before a run that computes by it: made in a process of its own where none that holds is kept.

The workers look at the kept proof again when they start; here it is only seen to that there is one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO

from rl_engine.config.plan import Plan
from rl_engine.orchestrators.actors import SOURCE_ROOT
from rl_engine.orchestrators.display import Display
from rl_engine.records.errors import UserError

LAST_LINES = 4  # of a proof that broke off


def ensure_proof(plans: Sequence[Plan], display: Display) -> None:
    """A kept proof of this GPU, its software and the model's shapes, for plans that need one; seconds where it is
    there, one to three minutes where it is not.

    Raises:
        UserError: an operator is wrong here, or the proof could not be made.
    """
    plan = next((plan for plan in plans if plan.backend == "cuda" and plan.mode == "consistency"), None)
    if plan is None:
        return
    command = [sys.executable, "-m", "rl_engine.entrypoints.repro", "qualify", "--provider", "gpu"]
    command += ["--model-root", plan.model_root]
    for size in sorted({plan.topology.train_tp, plan.topology.rollout_tp} - {1}):
        command += ["--tp", str(size)]
    with (
        display.task("proving this GPU's operators"),
        tempfile.TemporaryFile("w+", errors="replace") as out,
        _process(command, out) as child,
    ):
        assert child.stderr is not None
        lines: list[str] = []
        for line in child.stderr:
            if not lines:
                display.say(line.strip())
            lines.append(line.strip())
        code = child.wait()
        out.seek(0)
        named = " ".join(out.readline().split())[:200]  # failures come first
    if code == 1:
        raise UserError(
            f"operators that fail their proof on this GPU (first {named})",
            "bits equal to the contract",
            "rlk-repro qualify names them all",
        )
    if code:
        said = " | ".join(lines[-LAST_LINES:])[-400:] or f"exit code {code}"
        raise UserError(f"no proof of this GPU's operators ({said})", "rlk-repro qualify with exit code 0", "run it")
    if len(lines) > 1:
        display.say(lines[-1])


@contextlib.contextmanager
def _process(command: list[str], out: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """The command in a group of its own, ended with all it started when this is left early; ``out`` gets its output."""
    path = os.pathsep.join(filter(None, (str(SOURCE_ROOT), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if child.stderr is not None:
            child.stderr.close()
