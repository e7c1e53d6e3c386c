"""The runs of one command, one or a pair, in turn on one Ray head, and the verdict."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rl_engine.config.plan import Plan
from rl_engine.orchestrators.actors import BaselineWorker
from rl_engine.orchestrators.causes import RunFailed
from rl_engine.orchestrators.display import Display
from rl_engine.orchestrators.fleet import Fleet
from rl_engine.orchestrators.gpu_proof import ensure_proof
from rl_engine.orchestrators.interrupts import hear, interruptible
from rl_engine.orchestrators.local import LocalRun
from rl_engine.orchestrators.memory import MemoryWatch
from rl_engine.orchestrators.ray_head import HeadFailed, ray_head
from rl_engine.orchestrators.supervise import Word, supervise
from rl_engine.orchestrators.verdict import print_runs, verdict
from rl_engine.records.errors import UserError
from rl_engine.records.reader import RunReader
from rl_engine.records.writer import RunWriter

FINISHED = ("finished", "valid", "invalid")


def check(plans: list[Plan]) -> None:
    """Everything about new runs that can be judged before anything starts.

    Raises:
        UserError: an input that cannot be used.
    """
    for plan in plans:
        LocalRun(plan, Display())


def run(
    plans: list[Plan], *, json_output: bool, earlier: Sequence[RunReader | None] = (), rescore: bool = False
) -> int:
    """Runs every plan in turn, validates each, and judges a pair. Returns the exit code.

    Args:
        earlier: for every plan the directory to go on with, or None; empty where all are new.
        rescore: a fresh process computes a step again on every backend, not on a CPU alone.

    Raises:
        UserError: an input that cannot be used; nothing has run, or the run directory says what happened.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; the run directory says so.
    """
    display = Display()
    runs = [LocalRun(plan, display, old) for plan, old in zip(plans, earlier or [None] * len(plans), strict=True)]
    word = supervise(lambda why: _lost(runs, why, json_output))
    with interruptible():  # to the last word: an impatient second signal must not keep it back
        return _said(runs, display, word, json_output, rescore)


def _said(runs: list[LocalRun], display: Display, word: Word, json_output: bool, rescore: bool) -> int:
    """The runs, and how they ended: in the display, on stdout, and to the waiting process."""
    status, code = "failed", 3
    try:
        hear()
        code = _run_all(runs, display, word, rescore)
        status = "failed" if code else "succeeded"
    except (RunFailed, HeadFailed) as error:
        display.say(f"rlk-repro: run failed: {error}{_remains(runs, getattr(error, 'resume', True))}")
    except UserError:
        code = 2
        raise
    except KeyboardInterrupt:
        status, code = "interrupted", 130
        display.say(f"interrupted{_remains(runs)}")
        raise
    except BrokenPipeError:
        code = 141
        raise
    finally:
        try:
            print_runs([local.plan for local in runs if local.started or local.finished], status, json_output)
        finally:
            word.ended(code)
    return code


def _lost(runs: list[LocalRun], why: str, json_output: bool) -> None:
    """Says for a run what its process could not."""
    for local in runs:
        folder = Path(local.plan.run_dir)
        if local.finished or not (folder / "plan.json").exists():
            continue
        local.started = True
        with contextlib.suppress(OSError, UserError):
            local.writer = RunWriter.take_over(folder, "failed", why)
            local.steps = RunReader(folder).steps()
            local.leave()
            local.writer.close()
    runs[0].display.say(f"rlk-repro: run failed: {why}{_remains(runs)}")
    print_runs([local.plan for local in runs if local.started or local.finished], "failed", json_output)


def _run_all(runs: list[LocalRun], display: Display, word: Word, rescore: bool) -> int:
    plans = [local.plan for local in runs]
    open_runs = [local for local in runs if not local.finished]
    model_bytes = 2 * sum(math.prod(shape) for shape in runs[0].config.tensor_shapes().values())
    baseline = None
    with MemoryWatch() as memory, contextlib.ExitStack() as stack:
        if open_runs:
            ensure_proof([local.plan for local in open_runs], display)
            with display.task("starting Ray"):
                head = stack.enter_context(ray_head(plans[0].threads, model_bytes, word.folder))
        # Both directories of a pair before its first run: whatever happens then, both plans are there to go on with.
        for local in open_runs:
            stack.callback(local.leave)
            local.claim()
        for local in open_runs:
            local.run(head, memory)
        if len(runs) == 2 and runs[0].fleet is not None:
            baseline = _baseline(runs[0], runs[0].fleet)
    return verdict(plans, [local.steps for local in runs], display, baseline, memory.peak, rescore)


def _baseline(local: LocalRun, fleet: Fleet) -> tuple[int, float]:
    """(tokens, seconds) of transformers' generate on the first step's prompts."""
    requests = local.asker.requests(local.prompts.batch(0, local.plan.data.prompts_per_step))
    worker = local.head.start(BaselineWorker, local.plan)
    try:
        with local.display.task("transformers: generating, for comparison"):
            tokens = [list(request.tokens) for request in requests]
            return fleet.calls.wait([worker.measure.remote(tokens)])[0]
    finally:
        local.head.stop([worker])


def _remains(runs: list[LocalRun], resume: bool = True) -> str:
    """What is left, in words, after a run that did not end well, and how to go on where ``resume`` can help."""
    begun = [local for local in runs if local.started and hasattr(local, "writer") and local.writer.attempts]
    if not begun:
        return ""
    last = begun[-1]
    where = f"; {len(last.steps)} finished steps are in {last.plan.run_dir}, log {last.writer.log_path}"
    if not resume:
        return f"{where}; --resume would end in the same way"
    if last.plan.pair_id is None and last.writer.current_state in FINISHED:
        return f"{where}; judge it with: rlk-repro validate --run-dir {shlex.quote(last.plan.run_dir)}"
    name = last.plan.run_dir if last.plan.pair_id is None else os.path.join(last.plan.output_root, last.plan.pair_id)
    return f"{where}; go on with: rlk-repro run --resume {shlex.quote(name)}"
