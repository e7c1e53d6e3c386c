"""Gaps tied to a property of the sample: worker, batch size, weight version, prefix cache."""

from __future__ import annotations

import dataclasses

import numpy as np

from rl_engine.diagnose.causes import Evidence
from rl_engine.diagnose.frame import Array, Frame
from rl_engine.diagnose.stats import Mask, contrast

LEAST = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Levels:
    """Per sample: ``level`` = log of the mean relative gap size (NaN without tokens), ``energy`` = its sum."""

    level: Array
    energy: Array
    count: Array


def levels(frame: Frame) -> Levels:
    """How large each sample's gap is, given how certain its tokens are."""
    size = np.minimum(frame.size, 12.0)
    mean, count = frame.per_sample(size)
    # Below 2 % of the usual size a gap counts as none: exact samples must compare as finite numbers.
    level = np.log(mean + 0.02)
    level[count < 4] = np.nan
    return Levels(level, np.nan_to_num(frame.per_sample(np.square(frame.size))[0]) * count, count.astype(np.float64))


def _split(levels_: Levels, hit: Mask) -> tuple[float, float, float]:
    """(normal score of the levels' contrast, share of all energy that the chosen hold in excess, size ratio)."""
    valid = np.isfinite(levels_.level)
    inside, outside = levels_.level[hit & valid], levels_.level[~hit & valid]
    t = contrast(inside, outside)
    if not len(inside) or not len(outside):
        return 0.0, 0.0, 1.0
    base = levels_.energy[~hit].sum() / max(levels_.count[~hit].sum(), 1)
    excess = levels_.energy[hit].sum() - base * levels_.count[hit].sum()
    total = levels_.energy.sum()
    ratio = float(np.exp(inside.mean() - outside.mean()))
    return t, float(np.clip(excess / max(total, 1e-12), 0, 1)), ratio


def _grade(share: float, ratio: float) -> float:
    """Fit of a split: the share of all energy it explains, full marks from a half on; small ratios count less."""
    return float(np.clip(share / 0.35, 0, 1)) * float(np.clip((ratio - 1) / 0.3, 0, 1))


def worker(frame: Frame, lev: Levels) -> list[Evidence]:
    """One engine or rank with larger gaps than all others."""
    best: Evidence | None = None
    samples = frame.log.samples
    for kind, codes, names in (
        ("rank", samples.rank, samples.rank_names),
        ("engine", samples.engine, samples.engine_names),
    ):
        if codes is None or len(np.unique(codes)) < 2:
            continue
        for code in np.unique(codes)[:256]:
            hit = codes == code
            if hit.sum() < LEAST or (~hit).sum() < LEAST:
                continue
            t, share, ratio = _split(lev, hit)
            name = names[code] if 0 <= code < len(names) else str(code)
            detail = f"{kind} {name}: gaps are {ratio:.2f} times the others' (t {t:.1f}); {share:.0%} of all gap energy"
            numbers: dict[str, float | str] = {kind: name, "ratio": ratio, "t": t, "explained": share}
            one = Evidence("bad-worker", t, _grade(share, ratio), detail, numbers, hit)
            if best is None or one.strength > best.strength:
                best = one
    return [best] if best is not None and best.strength > 0 else []


def _best_threshold(values: Array, lev: Levels, both_ways: bool) -> tuple[float, float, float, float, bool] | None:
    """(t, share, ratio, threshold, above) of the best split of samples by value >= threshold."""
    best = None
    for cut in np.unique(values[np.isfinite(values)])[1:64]:
        high = values >= cut
        for hit, above in ((high, True), (~high, False)):
            if not above and not both_ways:
                continue
            if hit.sum() < LEAST or (~hit).sum() < LEAST:
                continue
            t, share, ratio = _split(lev, hit)
            if best is None or t > best[0]:
                best = (t, share, ratio, float(cut), above)
    return best


def batch(frame: Frame, lev: Levels) -> list[Evidence]:
    """Gaps that change with the number of sequences in flight."""
    sizes = frame.log.samples.batch_size
    if sizes is None:
        return []
    found = _best_threshold(sizes.astype(np.float64), lev, both_ways=True)
    if found is None:
        return []
    t, share, ratio, cut, above = found
    equal, small = frame.raw_gap == 0, sizes[frame.sample] < cut
    low, high = equal[small].mean() if small.any() else 0.0, equal[~small].mean() if (~small).any() else 0.0
    detail = (
        f"batches of {cut:g} and more have {'larger' if above else 'smaller'} gaps (ratio {ratio:.2f}, t {t:.1f}); "
        f"exact tokens {low:.0%} below, {high:.0%} above"
    )
    numbers: dict[str, float | str] = {"batch_size": cut, "ratio": ratio, "t": t, "explained": share}
    touched = sizes >= cut if above else sizes < cut
    return [Evidence("batch-dependence", t, _grade(share, ratio), detail, numbers, touched)]


def versions(frame: Frame, lev: Levels) -> list[Evidence]:
    """Gaps that grow with the age of the weights, or that start at a version."""
    samples = frame.log.samples
    out = []
    if samples.weight_version is None:
        return []
    version = samples.weight_version.astype(np.float64)
    if samples.train_version is not None:
        age = samples.train_version - version
        if len(np.unique(age)) > 1:
            found = _best_threshold(age, lev, both_ways=False)
            if found is not None:
                t, share, ratio, cut, _ = found
                by_age = ", ".join(f"{a:g}: {_mean_gap(frame, age == a):.4f}" for a in np.unique(age)[:5])
                detail = (
                    f"samples {cut:g} or more versions old have {ratio:.2f} times the gap (t {t:.1f}); by age {by_age}"
                )
                numbers: dict[str, float | str] = {"age": cut, "ratio": ratio, "t": t, "explained": share}
                out.append(Evidence("stale-weights", t, _grade(share, ratio), detail, numbers, age >= cut))
    if len(np.unique(version)) > 2:
        found = _best_threshold(version, lev, both_ways=False)
        if found is not None:
            t, share, ratio, cut, _ = found
            detail = f"from version {cut:g} on gaps are {ratio:.2f} times larger (t {t:.1f}): did the weight sync stop?"
            numbers = {"version": cut, "ratio": ratio, "t": t, "explained": share}
            # One change point among several versions is found by search: it must be clearer than a given age.
            out.append(Evidence("stale-weights", t * 0.8, _grade(share, ratio), detail, numbers, version >= cut))
    return sorted(out, key=lambda e: -e.strength * e.fit)[:1]


def _mean_gap(frame: Frame, hit: Mask) -> float:
    chosen = hit[frame.sample]
    return float(np.abs(frame.gap[chosen]).mean()) if chosen.any() else 0.0


def prefix_cache(frame: Frame, lev: Levels) -> list[Evidence]:
    """Gaps of samples that hit the prefix cache only."""
    cached = frame.log.samples.cached_tokens
    if cached is None:
        return []
    hit = cached > 0
    if hit.sum() < LEAST or (~hit).sum() < LEAST:
        return []
    t, share, ratio = _split(lev, hit)
    detail = (
        f"samples that hit the prefix cache have {ratio:.2f} times the gap of those that missed it (t {t:.1f}); "
        f"mean {_mean_gap(frame, hit):.4f} against {_mean_gap(frame, ~hit):.4f}"
    )
    numbers: dict[str, float | str] = {"ratio": ratio, "t": t, "explained": share}
    return [Evidence("stale-prefix-cache", t, _grade(share, ratio), detail, numbers, hit)]


def detect(frame: Frame) -> list[Evidence]:
    """All sample-level detectors."""
    if len(frame) < 64:
        return []
    lev = levels(frame)
    return [*worker(frame, lev), *batch(frame, lev), *versions(frame, lev), *prefix_cache(frame, lev)]
