"""Runs the detectors in order, ranks what they found and decides what is reported as a cause."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import numpy as np

from rl_engine.diagnose.causes import CAUSES, Evidence
from rl_engine.diagnose.detectors import align, distribution, facts, grids, groups, losses, models, positions
from rl_engine.diagnose.frame import Frame, build_frame
from rl_engine.diagnose.log import Bools, TokenLog

THRESHOLDS = pathlib.Path(__file__).with_name("thresholds.json")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A ranked cause. ``score`` 0 to 1; ``reported`` when it passes the cause's thresholds."""

    cause: str
    score: float
    reported: bool
    evidence: Evidence


@dataclasses.dataclass(frozen=True, eq=False)
class Diagnosis:
    """Findings, best first; those not reported are weak and kept for ``--json``. ``frame``: the cleaned tokens."""

    findings: tuple[Finding, ...]
    frame: Frame
    log: TokenLog

    @property
    def reported(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.reported)

    @property
    def alarm(self) -> bool:
        """Whether a cause other than rounding or equality is reported."""
        return any(CAUSES[f.cause].kind != "fine" for f in self.reported)


@functools.cache
def thresholds() -> dict[str, tuple[float, float]]:
    """(least strength, least fit) per cause, as calibrated by the fault suite."""
    stored = json.loads(THRESHOLDS.read_text(encoding="utf-8"))["thresholds"]
    return {name: (float(entry["strength"]), float(entry["fit"])) for name, entry in stored.items()}


def collect(log: TokenLog) -> tuple[list[Evidence], Frame]:
    """All evidence, and the frame without tokens and samples that facts already explain."""
    found = [*facts.non_finite(log), *facts.signed_zero(log), *facts.token_ids(log), *facts.end_token(log)]
    prompt, in_prompt = facts.prompt_in_mask(log)
    filler, is_filler = facts.filler_in_mask(log)
    found += prompt
    # A filler run in front of the response is the prompt again: say it once.
    found += [e for e in filler if not (prompt and e.cause == "mask-prompt")]
    found += losses.denominator(log)
    log = dataclasses.replace(log, mask=log.mask & ~in_prompt & ~is_filler)
    frame = build_frame(log)
    if not len(frame):
        return found, frame
    moved, hit, lags = align.shifted(frame)
    if lags.any():
        frame = build_frame(align.realigned(frame.log, lags))
    swapped, other = align.permuted(frame, hit)
    found += moved + swapped
    frame = _without(frame, (hit & (lags == 0)) | other)
    found += grids.stored(frame)
    lost = align.unrelated(frame)
    found += lost
    if lost:
        return found, frame  # no finer statistic means anything when the two columns are unrelated
    statistics = gap_evidence(frame)
    found += statistics
    spared = _spared(statistics)
    if spared is not None and spared[frame.sample].sum() >= 500 and spared.sum() >= 12:
        # One cause takes some samples and spares the rest: what else is there shows best in those.
        known = {evidence.cause for evidence in statistics if _reportable(evidence)}
        found += [e for e in gap_evidence(_without(frame, ~spared)) if e.cause not in known and _reportable(e)]
    return found, frame


def gap_evidence(frame: Frame) -> list[Evidence]:
    """What the detectors of forms, places and general shapes say about one frame."""
    if len(frame) < 32 or not np.any(frame.raw_gap):
        return []
    found = distribution.proportional(frame)
    if not found or found[0].fit < 0.9:  # a plain multiple is no distribution: mass and temperature mean nothing
        shape = distribution.measure(frame)
        found += distribution.temperature(frame, shape) + distribution.mass(frame, shape)
    found += distribution.penalty(frame)
    return found + grids.logits(frame) + groups.detect(frame) + positions.detect(frame) + models.detect(frame)


def _reportable(evidence: Evidence) -> bool:
    strength, fit = thresholds().get(evidence.cause, (5.0, 0.1))
    return evidence.strength >= strength and evidence.fit >= fit


def _spared(found: list[Evidence]) -> Bools | None:
    """bool [S]: the samples that the clearest cause with a known reach leaves alone; None without one."""
    clear = [e for e in found if e.touched is not None and _reportable(e) and e.fit > 0.5]
    if not clear:
        return None
    touched = max(clear, key=lambda e: e.strength).touched
    return None if touched is None else ~touched


def _without(frame: Frame, drop: Bools) -> Frame:
    """The frame without some samples, unless too little would be left to say anything."""
    keep = ~drop[frame.sample]
    if keep.all() or keep.sum() < 64:
        return frame if keep.all() else build_frame(frame.log.select(np.zeros_like(drop)))
    mask = frame.log.mask.copy()
    mask[frame.index[~keep]] = False
    return build_frame(dataclasses.replace(frame.log, mask=mask))


def rank(found: list[Evidence]) -> tuple[Finding, ...]:
    """Best evidence per cause, scored; general causes count only for what no specific cause explains."""
    limits = thresholds()
    best: dict[str, Finding] = {}
    for evidence in found:
        least_strength, least_fit = limits.get(evidence.cause, (5.0, 0.1))
        reported = evidence.strength >= least_strength and evidence.fit >= least_fit
        score = evidence.fit * (1 - 2.0 ** -max(0.0, evidence.strength / least_strength))
        finding = Finding(evidence.cause, float(min(score, 0.999)), reported, evidence)
        old = best.get(evidence.cause)
        if old is None or (finding.reported, finding.score) > (old.reported, old.score):
            best[evidence.cause] = finding
    findings = list(best.values())
    specific = [f.score for f in findings if f.reported and CAUSES[f.cause].kind in ("form", "fact", "place")]
    # Two readings of one specific shape (T twice, T rescored) speak together against "noise, just larger".
    top = 1.0 - float(np.prod([1.0 - score for score in specific]))
    findings = [_discount(f, top) if CAUSES[f.cause].kind == "general" else f for f in findings]
    # "Noise too large" is what is left when nothing else has a shape, the head and the router included.
    shaped = max((f.score for f in findings if f.reported and f.cause in ("tied-head", "router-dtype")), default=0.0)
    findings = [_discount(f, shaped) if f.cause == "quantised-rollout" else f for f in findings]
    return tuple(sorted(findings, key=lambda f: (not f.reported, -f.score)))


def _discount(finding: Finding, explained: float) -> Finding:
    """A general cause next to specific ones; what little is left below a fifth is not worth reporting."""
    score = finding.score * max(0.05, 1 - 1.2 * explained)
    return dataclasses.replace(finding, score=score, reported=finding.reported and (explained == 0 or score >= 0.2))


def diagnose(log: TokenLog) -> Diagnosis:
    """Collect, rank, and say what is left when nothing is reported."""
    found, frame = collect(log)
    findings = rank(found)
    if not any(f.reported for f in findings):
        findings = (_remainder(frame), *findings)
    return Diagnosis(findings, frame, log)


def _remainder(frame: Frame) -> Finding:
    """The answer when no fingerprint fits: equal, rounding, or honestly unexplained."""
    equal = len(frame) > 0 and not np.any(frame.raw_gap)
    if equal:
        evidence = Evidence("exact", 0.0, 1.0, f"all {len(frame)} compared logprobs are equal", {"tokens": len(frame)})
        return Finding("exact", 1.0, True, evidence)
    if not len(frame):
        evidence = Evidence("unexplained", 0.0, 0.5, "no loss token has two finite logprobs to compare", {"tokens": 0})
        return Finding("unexplained", 0.5, True, evidence)
    noise, limit = models.logit_noise(frame), models.honest_limit(frame)
    mean, size = float(frame.gap.mean()), float(np.abs(frame.gap).mean())
    numbers: dict[str, float | str] = {"mean": mean, "size": size, "logit_noise": noise, "tokens": len(frame)}
    told = f"mean {mean:+.5f}, mean size {size:.5f}, logit noise {noise:.4f}, {len(frame)} tokens"
    # Below eight uncertain tokens there is no noise estimate; the plain size must do. Rare large gaps move it alone.
    if (noise or size) > 1.25 * limit or size > 2 * limit:
        detail = f"the gap ({told}) is more than {frame.log.facts.dtype or 'bf16'} rounding makes"
        return Finding("unexplained", 0.5, True, Evidence("unexplained", 0.0, 0.5, detail, numbers))
    detail = f"the gap ({told}) is as large as rounding makes it; no other fingerprint fits"
    return Finding("rounding", 0.9, True, Evidence("rounding", 0.0, 0.9, detail, numbers))
