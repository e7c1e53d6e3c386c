"""Gaps with a formula: temperature, lost mass, raw logprobs, division after the softmax, base of the logarithm.

The identity behind most of them: if y is drawn from the distribution whose logprob is ``rollout``, and ``train`` is a
distribution over the same tokens, the mean of exp(train - rollout) is 1. Temperature, other weights and rounding keep
it; lost or gained mass and logprobs that did not sample break it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rl_engine.diagnose.causes import Evidence
from rl_engine.diagnose.detectors.facts import is_filtered
from rl_engine.diagnose.frame import Array, Frame, quantile_bins
from rl_engine.diagnose.log import TokenLog
from rl_engine.diagnose.stats import binned_share, clustered_t


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shared measurements. ``plus`` = log mean exp(gap), ``minus`` = log mean exp(-gap), with t values of mean - 1;
    ``by_logprob``: share of the gap that is a function of the logprob; ``likely``/``rare``: signed share of the gap
    (-1 to 1) among tokens with probability 0.6 to 0.99 and among the least likely; ``*_t`` their t values."""

    plus: float
    minus: float
    plus_t: float
    minus_t: float
    by_logprob: float
    likely: float
    rare: float
    likely_t: float
    rare_t: float
    size: float


def measure(frame: Frame) -> Shape:
    """Compute the shared measurements of a frame with at least one token."""
    up = np.exp(np.clip(frame.raw_gap, -30, 4))
    down = np.exp(np.clip(-frame.raw_gap, -30, 4))
    p = frame.probability
    likely = (p > 0.6) & (p < 0.99)
    rare = p < min(0.1, float(np.quantile(p, 0.2)))

    def signed(chosen: np.ndarray) -> float:
        total = float(np.abs(frame.gap[chosen]).sum())
        return float(frame.gap[chosen].sum()) / total if total > 0 else 0.0

    return Shape(
        plus=float(np.log(up.mean())),
        minus=float(np.log(down.mean())),
        plus_t=clustered_t(frame, up - 1),
        minus_t=clustered_t(frame, down - 1),
        by_logprob=binned_share(frame.gap, quantile_bins(frame.rollout, 24)),
        likely=signed(likely),
        rare=signed(rare),
        likely_t=clustered_t(frame, frame.gap, likely),
        rare_t=clustered_t(frame, frame.gap, rare),
        size=float(np.abs(frame.gap).mean()),
    )


def setting(values: np.ndarray | None) -> float | None:
    """The median of a per-sample setting, None where unknown."""
    return None if values is None or len(values) == 0 else float(np.median(values))


def temperature_ratio(frame: Frame) -> float:
    """Best-fit T_rollout / T_train.

    A token with one strong rival has log-odds that scale with the inverse temperature exactly; more rivals push the
    implied ratio further from 1. The tenth of tokens nearest to 1 on the right side is therefore the estimate.
    """
    p = frame.probability
    chosen = (p > 0.6) & (p < 0.995) & (frame.train < -1e-6)
    if chosen.sum() < 20:
        return 1.0

    def odds(x: Array) -> Array:
        return x - np.log(-np.expm1(x))

    before, after = odds(frame.rollout[chosen]), odds(np.minimum(frame.train[chosen], -1e-9))
    clear = before > max(1.0, float(np.median(before)))
    if clear.sum() < 20:
        return 1.0
    ratio = after[clear] / before[clear]
    # Where likely tokens became unlikely the ratio is negative: no temperature does that.
    return max(0.01, float(np.quantile(ratio, 0.9 if np.median(ratio) < 1 else 0.1)))


def temperature(frame: Frame, shape: Shape) -> list[Evidence]:
    """Flatter or sharper distribution on one side; says which of twice, missing, raw or another value fits."""
    if shape.likely * shape.rare >= 0 or len(frame) < 64:
        return []
    ratio = temperature_ratio(frame)
    strength = min(abs(shape.likely_t), abs(shape.rare_t))
    form = min(1.0, shape.by_logprob / 0.5) * min(1.0, abs(shape.likely) / 0.7)
    sampled_by_train = _train_sampled(shape)
    known = setting(frame.log.samples.temperature)
    numbers: dict[str, float | str] = {
        "temperature_ratio": ratio,
        "mean_exp_gap": float(np.exp(shape.plus)),
        "mean_exp_minus_gap": float(np.exp(shape.minus)),
    }
    if known is not None:
        numbers |= {"sampling_temperature": known, "implied_train_temperature": known / max(ratio, 1e-6)}
    fits = _temperature_fits(ratio, known, sampled_by_train)
    told = "" if known is None else f" (sampled at {known:g}, so the trainer's is about {known / max(ratio, 1e-6):.3g})"
    detail = (
        f"train logprobs fit softmax(z / T') with T_rollout / T_train = {ratio:.3f}{told}; "
        f"mean exp(gap) {np.exp(shape.plus):.4f}, mean exp(-gap) {np.exp(shape.minus):.4f}"
    )
    return [Evidence(cause, strength, form * fit, detail, numbers) for cause, fit in fits.items()]


def _train_sampled(shape: Shape) -> float:
    """0 to 1: how much the sampled tokens look drawn from the train side rather than from the rollout logprobs."""
    plus, minus = abs(shape.plus_t), abs(shape.minus_t)
    return 0.5 if plus + minus < 3 else plus / (plus + minus)


def _temperature_fits(ratio: float, known: float | None, sampled_by_train: float) -> dict[str, float]:
    """How well each reading of a temperature gap fits, 0 to 1."""
    raw = float(np.clip((sampled_by_train - 0.3) / 0.4, 0, 1))
    if known is None:
        return {"temperature-rescored": 0.9 * (1 - raw), "raw-logprobs": 0.9 * raw}
    if abs(known - 1) < 1e-3:
        return {"temperature-rescored": 1 - 0.5 * raw, "raw-logprobs": 0.5 * raw}

    def near(expected: float) -> float:
        # In units of the whole effect of T. Where few tokens have a single rival the estimate errs away from 1 only,
        # so that side is wider; the floor is what noise does to it.
        away = abs(np.log(ratio)) > abs(np.log(expected))
        scale = max((0.6 if away else 0.25) * abs(np.log(known)), 0.01)
        return float(np.exp(-((np.log(ratio / expected) / scale) ** 2)))

    missing, twice = near(known), near(1 / known)
    return {
        "temperature-missing": missing * (1 - raw),
        "temperature-twice": twice * (1 - raw),
        "raw-logprobs": twice * raw,
        "temperature-rescored": 0.95 * (1 - max(missing, twice)),
    }


def mass(frame: Frame, shape: Shape) -> list[Evidence]:
    """Mass lost or gained by one side: support, padded columns, raw logprobs, division after the softmax."""
    if shape.size == 0 or len(frame) < 64:
        return []
    # Against the root mean square: rare large gaps (other weights) also pull mean exp(gap) below 1 in a finite log.
    fit = min(1.0, abs(shape.plus) / float(np.sqrt(np.square(frame.gap).mean())) / 0.45)
    if shape.likely * shape.rare < 0 and abs(shape.likely) > 0.5 and abs(shape.likely_t) > 4:
        return []  # likely and rare tokens move apart: a temperature, not mass
    # Both tests must agree: the mean of exp(gap), and the mean gap of rare tokens, where every cause here shows.
    strength = min(abs(shape.plus_t), 2 * abs(shape.rare_t))
    if np.sign(shape.plus) != np.sign(shape.rare_t) or (shape.plus > 0 and shape.minus > 0):
        return []
    lost = shape.plus < 0
    side = "train" if lost else "rollout"
    kept = float(np.exp(-abs(shape.plus)))
    numbers: dict[str, float | str] = {"mean_kept_mass": kept, "side": side}
    detail = f"the {side} side misses {1 - kept:.3%} of the mass on average (mean exp(gap) {np.exp(shape.plus):.4f})"
    out = []
    for cause, factor, more in _mass_readings(frame, lost):
        out.append(Evidence(cause, strength, fit * factor, detail + more, numbers))
    return out


def _mass_readings(frame: Frame, lost: bool) -> list[tuple[str, float, str]]:
    log = frame.log
    filtered = is_filtered(log)
    top_p = setting(log.samples.top_p)
    known = setting(log.samples.temperature)
    noise = max(0.02, 3 * float(np.median(np.abs(frame.gap - np.median(frame.gap)))))
    division = 0.0
    if known is not None and abs(known - 1) > 1e-3 and (known < 1) == lost:
        division = _division_fits(frame, known, noise)
    out = [("division-after-softmax", division, f"; the gap obeys the bound of lp / {known} at every token")]
    if filtered is not False:
        inside = 1.0
        if top_p is not None and top_p < 1:
            beyond = np.abs(frame.gap) > -np.log(top_p) + min(noise, 0.1)
            inside = float(np.clip(1 - beyond.mean() / 0.1, 0, 1))
        certainty = 1.0 if filtered else 0.6
        cause = "support-not-replayed" if lost else "raw-logprobs"
        told = f"; top_p {top_p:g} bounds the gap by {-np.log(top_p):.3f}" if top_p is not None and top_p < 1 else ""
        out.append((cause, certainty * inside * (1 - 0.9 * division), told))
    pads = _pads(log)
    padded = (1.0 if pads else 0.6 if pads is None else 0.1) * (0.15 if filtered else 0.7 if filtered is None else 1.0)
    told = f"; {pads} padded columns are known" if pads else ""
    out.append(("padded-vocab", padded * (1 - 0.9 * division), told))
    return [(cause, factor, more) for cause, factor, more in out if factor > 0.01]


def _pads(log: TokenLog) -> int | None:
    vocab, padded = log.facts.vocab_size, log.facts.padded_vocab_size
    return None if vocab is None or padded is None else padded - vocab


def _division_fits(frame: Frame, known: float, noise: float) -> float:
    """1 when no token breaks the bound that lp / T after the softmax must obey, 0 when many do.

    With q = exp(T * train) the untempered probability, exp(gap) = sum of p^(1/T) over the vocabulary, which lies
    between q^(1/T) alone and q^(1/T) + (1-q)^(1/T) for T < 1, and above the latter for T > 1.
    """
    q = np.exp(np.minimum(frame.train * known, -1e-9))
    bound = np.log(q ** (1 / known) + (1 - q) ** (1 / known))
    broken = frame.gap > bound + noise / 3 if known < 1 else frame.gap < bound - noise / 3
    middle = (q > 0.2) & (q < 0.95)
    if middle.sum() < 10:
        return 0.5
    return float(np.clip(1 - broken[middle].mean() / 0.15, 0, 1))


def proportional(frame: Frame) -> list[Evidence]:
    """Train logprobs that are the rollout's times a constant: 1/T, 1/ln 2, 1/ln 10, -1."""
    energy = float(np.square(frame.raw_gap).sum())
    base = float(np.square(frame.rollout).sum())
    if energy == 0 or base == 0 or len(frame) < 16:
        return []
    factor = float((frame.rollout * frame.train).sum()) / base
    share = 1 - float(np.square(frame.train - factor * frame.rollout).sum()) / energy
    if share < 0.8 or abs(factor - 1) < 1e-3:
        return []
    residual = frame.train - factor * frame.rollout
    strength = abs(factor - 1) * float(np.sqrt(base / max(np.square(residual).mean(), 1e-12)))
    known = setting(frame.log.samples.temperature)
    names = {"log2": 1 / np.log(2), "log10": 1 / np.log(10), "negative log-likelihood": -1.0}
    names |= {f"{k}, rollout": 1 / v for k, v in names.items() if v > 0}
    close = {name: abs(factor / value - 1) for name, value in names.items()}
    best = min(close, key=lambda name: close[name])
    numbers: dict[str, float | str] = {"factor": factor, "explained": share}
    fit = max(0.0, (share - 0.8) / 0.2)
    if known is not None and known != 1 and min(abs(factor * known - 1), abs(factor / known - 1)) < 0.02:
        detail = f"train logprobs are the rollout's times {factor:.4f} = 1/T after the softmax ({share:.2%} of the gap)"
        return [Evidence("division-after-softmax", strength, fit, detail, numbers)]
    told = f"{best}" if close[best] < 0.03 else "no known base"
    detail = f"train logprobs are the rollout's times {factor:.4f} ({told}; {share:.2%} of the gap)"
    return [Evidence("log-base", strength, fit * (1.0 if close[best] < 0.03 else 0.7), detail, numbers)]


def seen_before(frame: Frame) -> np.ndarray | None:
    """int64 [M]: earlier occurrences of each token in its own sample (prompt included where logged)."""
    log = frame.log
    if log.tokens is None:
        return None
    sample = np.repeat(np.arange(log.sample_count), np.diff(log.offsets))
    key = sample * (int(log.tokens.max(initial=0)) + 1) + log.tokens
    order = np.argsort(key, kind="stable")
    ranked = key[order]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    place = np.arange(len(ranked)) - np.repeat(starts, np.diff(np.append(starts, len(ranked))))
    count = np.empty(len(ranked), np.int64)
    count[order] = place
    return count[frame.index]


def occurrence_level(count: np.ndarray) -> np.ndarray:
    """0 for new tokens, 1 to 3 for tokens seen once, twice or three times, four times and more."""
    return np.minimum(count, 1) + (count >= 2) + (count >= 4)


def penalty(frame: Frame) -> list[Evidence]:
    """Tokens seen before are pushed one way against new ones of the same certainty."""
    count = seen_before(frame)
    if count is None or len(frame) < 200:
        return []
    level = occurrence_level(count)
    bins = quantile_bins((frame.rollout + frame.train) / 2, 12)
    plain = binned_share(frame.gap, bins)
    both = binned_share(frame.gap, bins * 4 + level)
    mean = np.bincount(bins, weights=frame.gap) / np.maximum(np.bincount(bins), 1)
    rest = frame.gap - mean[bins]
    t = 0.0
    for least in (1, 2, 3):
        hit = level >= least
        if min(hit.sum(), (~hit).sum()) < 30:
            continue
        contrast = clustered_t(frame, np.clip(np.where(hit, rest / hit.mean(), -rest / (~hit).mean()), -20, 20))
        t = contrast if abs(contrast) > abs(t) else t
    seen = count > 0
    if t == 0.0 or not seen.any() or seen.all():
        return []
    share = max(0.0, both - plain)
    repeated, new = float(frame.gap[seen].mean()), float(frame.gap[~seen].mean())
    side = "rollout" if t > 0 else "train"
    detail = (
        f"mean gap {repeated:+.4f} for tokens seen before and {new:+.4f} for new ones (t {t:.1f}): "
        f"penalised on the {side} side; {share:.0%} of the gap"
    )
    numbers: dict[str, float | str] = {"gap_seen": repeated, "gap_new": new, "t": t, "explained": share, "side": side}
    return [Evidence("penalty", abs(t), min(1.0, share / 0.12), detail, numbers)]
