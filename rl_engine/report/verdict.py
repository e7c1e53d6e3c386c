"""What the page says first: whether rollout and trainer agree, beside the control, and what that cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_engine.report import tables
from rl_engine.report.collect import Collection, RunView
from rl_engine.report.numbers import bytes_shown, duration, shown

WHAT = {"native": "stock operators: the control", "consistency": "RL-Kernel's operators"}


def hero(collection: Collection) -> dict[str, Any]:
    """State (good, warn, bad), headline, the two sides and the tiles."""
    sides = {mode: [run for run in collection.runs if run.mode == mode] for mode in ("native", "consistency")}
    state, headline, lead = _words(sides["native"], sides["consistency"])
    sealed = sum(run.sealed for run in collection.runs)
    return {
        "state": state,
        "eyebrow": f"{counted(len(collection.runs), 'run')} in {counted(len(collection.experiments), 'experiment')}, "
        f"{sealed} sealed",
        "headline": headline,
        "lead": lead,
        "sides": [_side(mode, runs) for mode, runs in sides.items() if runs],
        "tiles": _tiles(collection),
    }


def counted(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _total(runs: Sequence[RunView]) -> tuple[int, int]:
    return sum(run.mismatches for run in runs), sum(run.tokens for run in runs)


def _words(native: Sequence[RunView], consistency: Sequence[RunView]) -> tuple[str, str, str]:
    """The verdict: only valid runs can be called exact."""
    differing, tokens = _total(consistency)
    control, control_tokens = _total(native)
    bad = [run.run_id for run in [*native, *consistency] if tables.verdict_word(run) != "valid"]
    if not tokens:
        lead = "A native run shows what stock operators do. `rlk-repro run` makes the pair that can be exact."
        return "warn", "No consistency run to judge", lead
    if differing:
        lead = "Consistency mode promises none. The gates below say where the first one is."
        return "bad", f"Not exact: {shown(differing)} of {shown(tokens)} logprobs differ", lead
    headline = f"Exact: 0 of {shown(tokens)} logprobs differ"
    if bad:
        lead = (
            f"But {counted(len(bad), 'run')} here did not pass every gate, so nothing is proven: see the gates below."
        )
        return "warn", headline, lead
    if not native:
        lead = "There is no native run beside it: without a control, zero may only mean that nothing could differ."
        return "warn", headline, lead
    if not control:
        lead = "The native control is equal too, so the pair proves nothing: use a larger model or more tokens."
        return "warn", headline, lead
    lead = (
        "For every sampled token the rollout engine and the trainer computed the same 32 bits. With stock operators, "
        f"on the same model, prompts and seeds, {control / control_tokens:.1%} differ."
    )
    return "good", headline, lead


def _side(mode: str, runs: Sequence[RunView]) -> dict[str, Any]:
    differing, tokens = _total(runs)
    share = differing / tokens if tokens else 0.0
    return {
        "mode": mode,
        "what": WHAT[mode],
        "mismatches": differing,
        "tokens": tokens,
        "mismatches_shown": shown(differing),
        "tokens_shown": shown(tokens),
        "share_shown": f"{share:.1%}",
        "percent": f"{100 * share:.3f}",
        "largest": shown(max((step.max_abs_dlogp for run in runs for step in run.steps), default=0.0), 3),
    }


def _tiles(collection: Collection) -> list[dict[str, str]]:
    runs = collection.runs
    tiles = [*_cost(collection), _gates(runs), _seals(runs), _where(runs)]
    peaks = [run.peak_bytes for run in runs if run.peak_bytes]
    if peaks:
        text = "all processes of a run together, at its peak"
        tiles.insert(2, _tile("Memory", bytes_shown(max(peaks)), text))
    return tiles


def _tile(name: str, value: str, detail: str, state: str = "") -> dict[str, str]:
    return {"name": name, "value": value, "detail": detail, "state": state}


def _cost(collection: Collection) -> list[dict[str, str]]:
    """Speed of the newest pair, consistency against native; of the newest run where there is no pair."""
    for runs in collection.experiments.values():
        modes = {run.mode: run for run in runs if run.steps}
        if len(modes) < 2:
            continue
        stock, ours = modes["native"], modes["consistency"]
        speeds = (tables.rollout_speed(ours), tables.rollout_speed(stock))
        seconds = (tables.step_seconds(ours), tables.step_seconds(stock))
        return [
            _tile(
                "Rollout speed",
                f"{speeds[0] / speeds[1]:.2f}× native",
                f"{shown(speeds[0], 3)} against {shown(speeds[1], 3)} tokens/s, newest pair",
            ),
            _tile(
                "Time of a step",
                f"{seconds[0] / seconds[1]:.2f}× native",
                f"{duration(seconds[0])} against {duration(seconds[1])}, newest pair",
            ),
        ]
    with_steps = [run for run in collection.runs if run.steps]
    if not with_steps:
        return []
    last = with_steps[-1]
    return [
        _tile("Rollout speed", f"{shown(tables.rollout_speed(last), 3)} tokens/s", f"{last.mode}, newest run"),
        _tile("Time of a step", duration(tables.step_seconds(last)), f"{last.mode}, newest run"),
    ]


def _gates(runs: Sequence[RunView]) -> dict[str, str]:
    findings = [finding for run in runs for finding in run.findings if not finding.recorded or finding.status == "FAIL"]
    passed = sum(finding.status == "PASS" for finding in findings)
    failed = sum(finding.status == "FAIL" for finding in findings)
    missing = sum(not run.findings for run in runs)
    state = "bad" if failed else ("warn" if missing or passed < len(findings) else "good")
    parts = [f"{failed} failed"] if failed else []
    warned = len(findings) - passed - failed
    parts += [f"{warned} with a warning"] if warned else []
    parts += [f"{counted(missing, 'run')} not finished"] if missing else []
    return _tile("Gates passed", f"{passed} of {len(findings)}", ", ".join(parts) or "over all runs", state)


def _seals(runs: Sequence[RunView]) -> dict[str, str]:
    sealed = sum(run.sealed for run in runs)
    detail = "every file hashed again for this page" if sealed == len(runs) else "the others may still change"
    return _tile("Sealed", f"{sealed} of {len(runs)}", detail, "good" if sealed == len(runs) else "warn")


def _where(runs: Sequence[RunView]) -> dict[str, str]:
    devices = list(dict.fromkeys(tables.device_words(run) for run in runs))
    layouts = list(dict.fromkeys(tables.topology_words(run) for run in runs))
    kinds = list(dict.fromkeys(run.plan.evidence for run in runs))
    text = layouts[0] if len(layouts) == 1 else f"{len(layouts)} layouts"
    return _tile("Ran on", ", ".join(devices)[:80], f"{text}; {', '.join(kinds)} evidence")
