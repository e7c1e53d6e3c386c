"""The answer as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math

from rl_engine.diagnose.causes import CAUSES
from rl_engine.diagnose.doctor import Diagnosis, Finding
from rl_engine.diagnose.fields import FORMATS, LOG_FIELDS, SAMPLE_FIELDS, TOKEN_FIELDS
from rl_engine.diagnose.metrics import QUANTILES, Metrics


def text(diagnosis: Diagnosis, metrics: Metrics, everything: bool = False) -> str:
    """The report for a terminal: metrics, ranked causes with evidence and hint, worst tokens."""
    log = diagnosis.log
    lines = [f"{log.source}: {metrics.samples} samples, {metrics.tokens} loss tokens, {metrics.compared} compared"]
    lines += [f"  note: {note}" for note in log.notes]
    if metrics.compared:
        lines += _numbers(metrics)
    lines.append("")
    lines.append("causes, best first")
    for place, finding in enumerate(diagnosis.reported, 1):
        lines += _finding(place, finding)
    weak = [f for f in diagnosis.findings if not f.reported and f.score > 0.02]
    if everything and weak:
        lines.append("below the reporting threshold")
        lines += [f"  {f.score:.2f}  {CAUSES[f.cause].title}: {f.evidence.detail}" for f in weak]
    if metrics.worst and metrics.max_abs > 0:
        lines.append("")
        lines.append("worst tokens   sample  position     token    rollout      train        gap")
        for w in metrics.worst:
            token = "-" if w.token is None else str(w.token)
            gap = w.train - w.rollout
            lines.append(
                f"            {w.sample:9d} {w.position:9d} {token:>9} {w.rollout:10.4f} {w.train:10.4f} {gap:+10.4f}"
            )
    return "\n".join(lines)


def _numbers(m: Metrics) -> list[str]:
    spread = "  ".join(f"p{100 * q:g} {v:+.4f}" for q, v in zip(QUANTILES, m.quantiles, strict=True))
    return [
        f"  gap = train - rollout (nats): mean {-m.k1:+.5f}, mean size {m.mean_abs:.5f}, largest {m.max_abs:.4f}, "
        f"equal bits {m.equal:.2%}",
        f"  {spread}",
        f"  k1 {m.k1:.5f}  k3 {m.k3:.5f}  chi2 {m.chi2:.5f}  "
        f"effective sample size {m.ess:.2%} (sequences {m.sequence_ess:.2%})",
        f"  ratio: mean {m.ratio_mean:.5f}, largest {m.ratio_max:.3f}; clipped at {m.clip:g}: {m.clip_fraction:.2%}; "
        f"sequences: mean {m.sequence_ratio_mean:.4f}, largest {m.sequence_ratio_max:.3f}",
    ]


def _finding(place: int, finding: Finding) -> list[str]:
    cause = CAUSES[finding.cause]
    return [
        f"  {place}. {cause.title}  [{finding.cause}, score {finding.score:.2f}]",
        f"     evidence: {finding.evidence.detail}",
        f"     next: {cause.hint}",
    ]


def _clean(value: object) -> object:
    """JSON has no NaN: non-finite numbers become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def as_json(diagnosis: Diagnosis, metrics: Metrics) -> str:
    """One JSON object: source, notes, metrics, findings (reported and weak), alarm."""
    findings = [
        {
            "cause": f.cause,
            "title": CAUSES[f.cause].title,
            "score": f.score,
            "reported": f.reported,
            "strength": f.evidence.strength,
            "fit": f.evidence.fit,
            "evidence": f.evidence.detail,
            "numbers": {k: v if isinstance(v, str) else float(v) for k, v in f.evidence.numbers.items()},
            "hint": CAUSES[f.cause].hint,
        }
        for f in diagnosis.findings
    ]
    answer = {
        "schema": "rlkernel.diagnose.v1",
        "source": diagnosis.log.source,
        "notes": list(diagnosis.log.notes),
        "alarm": diagnosis.alarm,
        "metrics": dataclasses.asdict(metrics),
        "findings": findings,
    }
    return json.dumps(_clean(answer), indent=2, allow_nan=False)


def fields_text() -> str:
    """The table of fields and of every format's names."""
    lines = []
    for title, table in (("token columns", TOKEN_FIELDS), ("sample columns", SAMPLE_FIELDS), ("log facts", LOG_FIELDS)):
        lines.append(title)
        lines += [f"  {name:18} {about}" for name, about in table.items()]
    lines.append("formats")
    for form in FORMATS.values():
        lines.append(f"  {form.name:10} {form.about}")
        for name, keys in form.names.items():
            if keys != FORMATS["rlk"].names[name]:
                lines.append(f"             {name:18} {', '.join(keys)}")
    return "\n".join(lines)
