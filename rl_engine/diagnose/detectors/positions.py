"""Gaps tied to a position: growth with distance, block edges, a step, the first tokens behind the prompt."""

from __future__ import annotations

import numpy as np

from rl_engine.diagnose.causes import Evidence
from rl_engine.diagnose.frame import Array, Frame
from rl_engine.diagnose.stats import Mask, clustered_t

PERIODS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def _contrast_t(frame: Frame, values: Array, hit: Mask) -> float:
    """t of the mean of values inside ``hit`` minus outside, clustered by sample."""
    share = float(hit.mean())
    if share in (0.0, 1.0):
        return 0.0
    centred = values - values.mean()
    return clustered_t(frame, np.where(hit, centred / share, -centred / (1 - share)))


def _share(frame: Frame, hit: Mask) -> tuple[float, float]:
    """(share of gap energy above the level outside ``hit``, ratio of mean sizes inside / outside)."""
    energy = np.square(frame.size)
    base = float(energy[~hit].mean())
    excess = float(energy[hit].sum()) - base * float(hit.sum())
    ratio = float(frame.size[hit].mean() / max(frame.size[~hit].mean(), 1e-9))
    return float(np.clip(excess / max(float(energy.sum()), 1e-12), 0, 1)), ratio


def _bin_fit(position: Array, size: Array, bins: np.ndarray) -> tuple[float, float]:
    """(share of the variance of position-bin means that a line explains, that the best step explains)."""
    count = np.bincount(bins)
    used = count > 0
    x = np.bincount(bins, weights=position)[used] / count[used]
    y = np.bincount(bins, weights=size)[used] / count[used]
    total = float(np.square(y - y.mean()).sum())
    if len(y) < 4 or total == 0:
        return 0.0, 0.0
    line = float(np.corrcoef(x, y)[0, 1]) ** 2
    steps = [
        (i * (y[:i].mean() - y.mean()) ** 2 + (len(y) - i) * (y[i:].mean() - y.mean()) ** 2) / total
        for i in range(1, len(y))
    ]
    return line, float(max(steps))


def _steps_to_try(frame: Frame) -> list[int]:
    facts = frame.log.facts
    top = int(frame.position.max())
    known = [f for f in (facts.split_size, facts.chunk_size) if f]
    steps = {m * k for k in known for m in range(1, min(64, top // k + 1))} | {p for p in PERIODS if 64 <= p <= top}
    return sorted(steps)[:200]


def trend(frame: Frame) -> list[Evidence]:
    """Growth with position (rotary angles) against one step at a split or chunk edge."""
    size = np.minimum(frame.size, 12.0)
    position = frame.position.astype(np.float64)
    if position.std() == 0:
        return []
    slope_t = clustered_t(frame, (position - position.mean()) / position.std() * (size - size.mean()))
    if slope_t <= 0:
        return []
    ranks = np.searchsorted(np.quantile(position, np.linspace(0, 1, 17)[1:-1]), position, side="right")
    line, step = _bin_fit(position, size, ranks)
    early = float(size[ranks <= 2].mean())
    excess = float(np.clip(1 - early / max(float(size[ranks >= 10].mean()), 1e-9), 0, 1))
    best_t, best_edge = 0.0, 0
    for edge in _steps_to_try(frame):
        t = _contrast_t(frame, size, frame.position >= edge)
        if t > best_t:
            best_t, best_edge = t, edge
    by_step = float(np.clip((step - line) / 0.15, 0, 1) * np.clip((step - 0.75) / 0.15, 0, 1))
    if best_edge:
        # Behind a real edge the level stays; rotary errors double with every octave and go on growing on both sides.
        by_step *= float(np.clip(1 - (_trend_inside(frame, size, best_edge) - 2.0) / 2.5, 0, 1))
    detail = (
        f"mean relative gap grows from {early:.2f} at the start to {size[ranks >= 14].mean():.2f} at the end "
        f"(t {slope_t:.1f}; a line explains {line:.0%} of the profile, a step {step:.0%})"
    )
    numbers: dict[str, float | str] = {"slope_t": slope_t, "line": line, "step": step}
    grade = float(np.clip(excess / 0.3, 0, 1))
    out = [Evidence("rope-dtype", slope_t, grade * (1 - by_step) * line, detail, numbers)]
    if best_edge:
        share, ratio = _share(frame, frame.position >= best_edge)
        text = f"from position {best_edge} on gaps are {ratio:.2f} times larger (t {best_t:.1f}): a split or chunk edge"
        told: dict[str, float | str] = {"position": best_edge, "ratio": ratio, "t": best_t, "explained": share}
        out.append(Evidence("block-edges", best_t, grade * by_step * step, text, told))
    return out


def _trend_inside(frame: Frame, size: Array, edge: int) -> float:
    """Normal score of the growth of size with position that is left inside the two sides of an edge."""
    moment = np.zeros(len(frame))
    for part in (frame.position < edge, frame.position >= edge):
        place = frame.position[part].astype(np.float64)
        if len(place) > 1 and place.std() > 0:
            moment[part] = (place - place.mean()) / place.std() * (size[part] - size[part].mean())
    return clustered_t(frame, moment)


def edges(frame: Frame) -> list[Evidence]:
    """Larger gaps at the same place of every page or chunk."""
    size = np.minimum(frame.size, 12.0)
    facts = frame.log.facts
    known = [f for f in (facts.page_size, facts.chunk_size, facts.split_size) if f and f > 1]
    best: tuple[float, int, int] = (0.0, 0, 0)
    spread = float(size.std())
    if spread == 0:
        return []
    for period in sorted({*PERIODS, *known}):
        phase = frame.position % period
        count = np.bincount(phase, minlength=period).astype(np.float64)
        mean = np.bincount(phase, weights=size, minlength=period) / np.maximum(count, 1)
        places = np.arange(period) if period <= 64 else np.array([0, 1, period - 1])
        z = np.where(count[places] >= 8, (mean[places] - size.mean()) * np.sqrt(count[places]) / spread, 0.0)
        # The more places are tried, the larger the largest of them by chance.
        z = z - np.sqrt(2 * np.log(len(places)))
        i = int(z.argmax())
        if z[i] > best[0] * 1.05:
            best = (float(z[i]), period, int(places[i]))
    strength, period, place = best
    if not period:
        return []
    phase = frame.position % period
    hit = (phase == place) | (phase == (place + 1) % period) if period > 16 else phase == place
    share, ratio = _share(frame, hit)
    detail = (
        f"tokens at position {place} of every {period} have {ratio:.2f} times the gap; {share:.0%} of all gap energy"
    )
    numbers: dict[str, float | str] = {"period": period, "place": place, "ratio": ratio, "explained": share}
    fit = float(np.clip(share / 0.3, 0, 1)) * float(np.clip((ratio - 1) / 1.0, 0, 1))
    return [Evidence("block-edges", strength, fit, detail, numbers)]


def after_prompt(frame: Frame) -> list[Evidence]:
    """Gaps that are largest, and cost most likelihood, right behind the prompt.

    Two windows: the first two tokens, which a differing last prompt token hits hardest, and the first eight.
    """
    out = []
    late = frame.order >= 24
    for width in (2, 8):
        early = frame.order < width
        if early.sum() < 24 or late.sum() < 32:
            continue
        size = np.minimum(frame.size, 12.0)
        t = -_between_t(frame, frame.gap, early, late)
        gap, cost = float(np.abs(frame.gap[early]).mean()), -float(frame.gap[early].mean())
        usual = max(-float(frame.gap[late].mean()), 0.15 * gap, 1e-9)
        ratio = float(size[early].mean() / max(size[late].mean(), 1e-9))
        detail = (
            f"the first {width} response tokens have a mean gap of {-cost:+.3f} against {-usual:+.3f} later, and "
            f"{ratio:.2f} times the relative size (t {t:.1f})"
        )
        numbers: dict[str, float | str] = {"tokens": width, "gap": -cost, "later": -usual, "ratio": ratio, "t": t}
        # The cost must stand out against later tokens, be most of the gap, and the size must not be smaller.
        fit = float(np.clip((cost / usual - 1.3) / 1.2, 0, 1) * np.clip(cost / max(gap, 1e-9) / 0.3, 0, 1))
        fit *= float(ratio > 1.0)
        out.append(Evidence("template-drift", t, fit, detail, numbers))
    return out


def _between_t(frame: Frame, values: Array, early: Mask, late: Mask) -> float:
    """Normal score of mean(values | early) - mean(values | late), clustered by sample."""
    a, b = early.mean(), late.mean()
    centre_early, centre_late = values[early].mean(), values[late].mean()
    middle = (centre_early + centre_late) / 2
    return clustered_t(frame, np.where(early, (values - middle) / a, np.where(late, (middle - values) / b, 0.0)))


def detect(frame: Frame) -> list[Evidence]:
    """All position detectors."""
    if len(frame) < 64:
        return []
    return [*trend(frame), *edges(frame), *after_prompt(frame)]
