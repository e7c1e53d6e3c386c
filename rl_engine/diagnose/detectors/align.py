"""Logprobs that belong to other tokens: shifted, re-tokenised, or of another sample."""

from __future__ import annotations

import dataclasses

import numpy as np

from rl_engine.diagnose.causes import Evidence
from rl_engine.diagnose.frame import Array, Frame, Index
from rl_engine.diagnose.log import Bools, TokenLog

LAGS = (1, -1, 2, -2, 3, -3)
FLOOR = -8.0


def _lagged_gain(frame: Frame, lag: int) -> tuple[Array, Array]:
    """(best gain, where it starts) of every sample if train logprobs are paired with rollout ones ``lag`` later.

    The gain at a start c is the sum over later tokens of |train - rollout| minus |train - lagged rollout|; the best
    start has the largest gain. Starts are token orders; a sample without gain has 0 and start 0.
    """
    n = len(frame)
    rollout, train = np.maximum(frame.rollout, FLOOR), np.maximum(frame.train, FLOOR)
    own = np.abs(train - rollout)
    other = np.clip(np.arange(n) + lag, 0, n - 1)
    inside = (frame.sample[other] == frame.sample) & (np.arange(n) + lag == other)
    gain = np.where(inside, own - np.abs(train - rollout[other]), 0.0)
    samples = frame.log.sample_count
    counts = np.bincount(frame.sample, minlength=samples)
    ends = np.cumsum(counts)
    # Sum from each token to its sample's end: the global sum from the end minus what lies behind the sample.
    behind = np.concatenate([np.cumsum(gain[::-1])[::-1], [0.0]])
    suffix = behind[:-1] - behind[ends[frame.sample]]
    best, start = np.zeros(samples), np.zeros(samples)
    filled = np.flatnonzero(counts > 0)
    begin = ends[filled] - counts[filled]
    best[filled] = np.maximum(np.maximum.reduceat(suffix, begin), 0.0)
    top = np.flatnonzero(suffix >= best[frame.sample])
    start[frame.sample[top[::-1]]] = frame.order[top[::-1]]
    return best, start


def correlation_by_sample(frame: Frame) -> tuple[Array, Index]:
    """(correlation of rollout and train logprobs, tokens) of every sample; NaN where undefined."""
    x, y = np.maximum(frame.rollout, FLOOR), np.maximum(frame.train, FLOOR)
    mx, count = frame.per_sample(x)
    my, _ = frame.per_sample(y)
    dx, dy = x - mx[frame.sample], y - my[frame.sample]
    with np.errstate(invalid="ignore", divide="ignore"):
        top = frame.per_sample(dx * dy)[0]
        return top / np.sqrt(frame.per_sample(dx * dx)[0] * frame.per_sample(dy * dy)[0]), count


def realigned(log: TokenLog, lags: Index) -> TokenLog:
    """The log with the train logprobs of sample i moved ``lags[i]`` places later; tokens without a partner leave the
    loss."""
    train, mask = log.train.copy(), log.mask.copy()
    for i in np.flatnonzero(lags):
        start, stop, lag = int(log.offsets[i]), int(log.offsets[i + 1]), int(lags[i])
        source = np.arange(start, stop) - lag
        inside = (source >= start) & (source < stop)
        inside[inside] &= log.mask[source[inside]]
        train[start:stop][inside] = log.train[source[inside]]
        mask[start:stop] &= inside
    return dataclasses.replace(log, train=train, mask=mask)


def shifted(frame: Frame) -> tuple[list[Evidence], Bools, Index]:
    """Samples that fit at another lag, from the start (shift) or from a later token on (re-tokenised).

    Returns the evidence, the samples hit, and the lag of those that are shifted as a whole (0 elsewhere).
    """
    none = np.zeros(frame.log.sample_count, bool)
    lags = np.zeros(frame.log.sample_count, np.int64)
    if len(frame) < 16:
        return [], none, lags
    total, count = frame.per_sample(np.abs(np.maximum(frame.train, FLOOR) - np.maximum(frame.rollout, FLOOR)))
    energy = np.nan_to_num(total) * count
    gains = [_lagged_gain(frame, lag) for lag in LAGS]
    best = np.stack([g for g, _ in gains])
    pick = best.argmax(axis=0)
    rows = np.arange(frame.log.sample_count)
    gain, start = best[pick, rows], np.stack([s for _, s in gains])[pick, rows]
    tail = np.maximum(count - start, 1)
    # Half of the gap must go away, over at least four tokens and by a size that chance does not reach.
    hit = (gain > 3.0) & (gain > 0.4 * energy) & (tail >= 4) & (gain / tail > 0.1)
    if not hit.any():
        return [], none, lags
    out = []
    excess = float(energy.sum())
    for cause, chosen in (("shift", hit & (start <= 2)), ("retokenised", hit & (start > 2))):
        if not chosen.any() or chosen.sum() < 0.15 * hit.sum():
            continue
        lag = LAGS[int(np.bincount(pick[chosen], minlength=len(LAGS)).argmax())]
        share = float(gain[chosen].sum() / max(excess, 1e-9))
        inside = float(np.median(gain[chosen] / energy[chosen]))
        where = "" if cause == "shift" else f" from token {int(np.median(start[chosen]))} on (median)"
        detail = (
            f"{int(chosen.sum())} of {int((count > 0).sum())} samples fit when train logprobs are paired with rollout "
            f"logprobs {abs(lag)} place{'s' if abs(lag) > 1 else ''} {'later' if lag > 0 else 'earlier'}{where}; that "
            f"removes {inside:.0%} of their gap (median) and {share:.0%} of the whole"
        )
        numbers: dict[str, float | str] = {"samples": int(chosen.sum()), "lag": lag, "removed": share}
        out.append(Evidence(cause, float(gain[chosen].sum()), 0.5 + 0.47 * min(1.0, inside * 1.2), detail, numbers))
    whole = hit & (start <= 2)
    lags[whole] = np.array(LAGS)[pick[whole]]
    return out, hit, lags


def permuted(frame: Frame, ignore: Bools) -> tuple[list[Evidence], Bools]:
    """Samples whose train logprobs follow another sample's rollout logprobs."""
    none = np.zeros(frame.log.sample_count, bool)
    own, count = correlation_by_sample(frame)
    length = 24
    able = np.flatnonzero(count >= length)[:3000]
    suspects = np.flatnonzero((count >= length) & (own < 0.6) & ~ignore)[:300]
    if len(suspects) < 2 or len(able) < 3:
        return [], none
    starts = np.cumsum(np.concatenate([[0], count]))[:-1]
    window = np.arange(length)

    def unit(values: Array, rows: Index) -> Array:
        x = np.maximum(values[starts[rows][:, None] + window], FLOOR)
        x = x - x.mean(axis=1, keepdims=True)
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)

    match = unit(frame.train, suspects) @ unit(frame.rollout, able).T
    match[suspects[:, None] == able[None, :]] = -1
    # Samples that repeat themselves resemble many others; a permutation has one clear donor for each, and each once.
    ranked = np.sort(match, axis=1)
    found = (ranked[:, -1] > 0.95) & (ranked[:, -2] < 0.85)
    donors = match.argmax(axis=1)[found]
    if found.sum() < 2 or len(np.unique(donors)) < 0.8 * len(donors):
        return [], none
    hit = none.copy()
    hit[suspects[found]] = True
    pairs = ", ".join(f"{a}<-{able[b]}" for a, b in zip(suspects[found][:3], donors[:3], strict=True))
    detail = f"train logprobs of {int(hit.sum())} samples follow other samples' rollout logprobs ({pairs})"
    strength = 10.0 * float(found.sum())
    fit = 0.6 + 0.37 * float(found.mean())
    return [Evidence("sample-order", strength, fit, detail, {"samples": int(hit.sum())})], hit


def unrelated(frame: Frame) -> list[Evidence]:
    """Train logprobs that follow nothing and are far below: an output head that was never loaded."""
    if len(frame) < 64:
        return []
    x, y = np.maximum(frame.rollout, FLOOR), np.maximum(frame.train, 2 * FLOOR)
    if x.std() == 0 or y.std() == 0:
        return []
    related = float(np.corrcoef(x, y)[0, 1])
    drop = float(np.median(frame.train - frame.rollout))
    if related > 0.4 or drop > -1.5:
        return []
    detail = f"correlation of rollout and train logprobs is {related:.2f}, median gap {drop:.1f} nats"
    numbers: dict[str, float | str] = {"correlation": related, "median_gap": drop}
    return [Evidence("tied-head", 40.0, 0.97 - max(0.0, related), detail, numbers)]
