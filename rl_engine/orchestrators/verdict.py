"""What a run ends with: the gates, the pair's verdict from files, and the run directories on stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rl_engine.checks.rescore import rescore_findings
from rl_engine.checks.validate import passed, record_validation, run_validation
from rl_engine.config.plan import Plan
from rl_engine.orchestrators.display import Display, rollout_speed, summary_table, total_seconds, verdict_lines
from rl_engine.records.pair import pair_path, pair_record, write_pair
from rl_engine.records.reader import RunReader
from rl_engine.records.types import StepRecord

Steps = Sequence[list[StepRecord]]


def verdict(
    plans: list[Plan],
    steps: Steps,
    display: Display,
    baseline: tuple[int, float] | None,
    peak: int,
    rescore: bool = False,
) -> int:
    """Validates every run, computes a step of it again in a fresh process on a CPU or where ``rescore`` asks for it,
    judges a pair, and prints all. Returns the exit code.

    Args:
        baseline: (tokens, seconds) of transformers' generate, or None.
        peak: bytes of all processes at once.
    """
    good = True
    for plan in plans:
        with display.task(f"{plan.mode}: validating"):
            findings = run_validation(plan.run_dir)
        if rescore or plan.backend == "cpu":
            with display.task(f"{plan.mode}: computing a step again in a fresh process"):
                findings += rescore_findings(plan.run_dir)
        with display.task(f"{plan.mode}: writing the validation"):
            if not RunReader(plan.run_dir).sealed:  # the finished half of a pair may be
                record_validation(plan.run_dir, findings)
        good &= passed(findings)
        for finding in findings:
            if finding.name in ("rescore", "redraw") and finding.status == "PASS":
                display.say(f"{plan.mode}: fresh process: {finding.found}")
            if finding.status == "FAIL":
                display.say(f"{plan.mode}: [FAIL] {finding.name}: found {finding.found}, expected {finding.expected}")
        display.say(f"{plan.mode}: {sum(f.status == 'PASS' for f in findings)} of {len(findings)} gates pass")
    display.console.print(summary_table([(plan.mode, done) for plan, done in zip(plans, steps, strict=True)]))
    code = 0 if good else 1
    if len(plans) == 2:
        code = max(code, _pair_verdict(plans, steps, display, baseline))
    display.say(f"peak memory of all processes, Ray included: {peak / 1e9:.1f} GB")
    return code


def _pair_verdict(plans: list[Plan], steps: Steps, display: Display, baseline: tuple[int, float] | None) -> int:
    """The verdict from the two run directories' files; 1 where it is not what a pair promises."""
    native, consistency = plans
    assert native.pair_id is not None
    pair = pair_record(native.pair_id, Path(native.run_dir), Path(consistency.run_dir))
    path = write_pair(Path(native.output_root), pair)
    stock, ours = steps
    if baseline is not None:
        display.say(f"transformers' generate on the same model and prompts: {baseline[0] / baseline[1]:.1f} tok/s")
    step_ratio = sum(map(total_seconds, ours)) / sum(map(total_seconds, stock))
    speed = rollout_speed(ours) / rollout_speed(stock)
    display.say(f"consistency against native: {speed:.2f}x the rollout tokens/s, {step_ratio:.2f}x the time of a step")
    for line in verdict_lines(pair):
        display.say(line)
    display.say(f"pair: {path}")
    wanted = pair.control or not native.require_control
    return 0 if pair.exact and pair.same_start and wanted else 1


def print_runs(plans: Sequence[Plan], status: str, json_output: bool) -> None:
    """Where the runs are, on stdout: ``run_dir: PATH`` for each, or one JSON object.

    The object's ``run_dir`` is the last run's; a pair's also has ``runs``, one object each, and ``pair`` once it is
    judged. ``status`` is succeeded, failed or interrupted.
    """
    if not json_output:
        for plan in plans:
            print(f"run_dir: {plan.run_dir}", flush=True)
        return
    found = [{"submission_id": plan.run_id, "run_dir": plan.run_dir} for plan in plans]
    last = found[-1] if found else {"submission_id": None, "run_dir": None}
    body: dict[str, object] = {"status": status, **last}
    pair_id = plans[0].pair_id if plans else None
    if pair_id is not None:
        path = pair_path(Path(plans[0].output_root), pair_id)
        body |= {"submission_id": pair_id, "runs": found, "pair": str(path) if path.is_file() else None}
    print(json.dumps(body), flush=True)
