"""Gaps of the model as a whole: adapter scale, output head, routing, quantisation."""

from __future__ import annotations

import numpy as np

from rl_engine.diagnose.causes import Evidence
from rl_engine.diagnose.detectors.distribution import occurrence_level, seen_before, setting
from rl_engine.diagnose.frame import Frame, quantile_bins
from rl_engine.diagnose.stats import clustered_t

# Largest honest size of logit noise (median |gap| / (1 - p), scaled to a standard deviation), by compute type.
# At temperature 1: dividing logits by T divides their noise as well.
HONEST = {"bf16": 0.12, "fp16": 0.015, "fp32": 0.0012}


def logit_noise(frame: Frame) -> float:
    """Standard deviation of logit noise that would explain the median gap of tokens that are not certain."""
    p = np.exp(np.minimum((frame.rollout + frame.train) / 2, 0.0))
    chosen = p < 0.9
    if chosen.sum() < 8:
        return 0.0
    return 1.4826 * float(np.median(np.abs(frame.raw_gap[chosen]) / (1 - p[chosen])))


def honest_limit(frame: Frame) -> float:
    """Largest logit noise that rounding explains in this log."""
    hot = setting(frame.log.samples.temperature) or 1.0
    return HONEST.get(frame.log.facts.dtype or "bf16", HONEST["bf16"]) / hot


def adapter(frame: Frame) -> list[Evidence]:
    """The gap is a multiple of (policy - reference): the adapter acts with another scale, or on one side only."""
    if frame.log.ref_logprob is None or len(frame) < 64:
        return []
    reference = frame.log.ref_logprob[frame.index].astype(np.float64)
    x, y = frame.rollout - reference, frame.train - reference
    chosen = np.isfinite(x) & np.isfinite(y) & (np.abs(x) < 4) & (np.abs(y) < 4)
    if chosen.sum() < 64:
        return []
    x, y = x[chosen], y[chosen]
    energy = float(np.square(y - x).sum())
    if energy == 0:
        return []
    moments = np.array([[float((x * x).sum()), float((x * y).sum())], [float((x * y).sum()), float((y * y).sum())]])
    values, vectors = np.linalg.eigh(moments)
    main = vectors[:, 1]
    slope = float(main[1] / main[0]) if abs(main[0]) > 1e-6 else 1e6
    # Off the main axis lies what a scale cannot explain; on it, only what differs from slope 1.
    along = float(values[1]) * float((main[1] - main[0]) ** 2)
    share = float(np.clip(along / energy, 0, 1))
    t = abs(clustered_t_of(frame, chosen, (y - x) * (x + y)))
    equal_side = "train" if abs(slope) < 0.2 else "rollout" if abs(slope) > 5 else ""
    fit = float(np.clip((share - 0.3) / 0.5, 0, 1))
    if equal_side:
        # The side that equals the reference must do so within rounding; otherwise the other side has its own error.
        p = frame.probability[chosen]
        open_ = p < 0.9
        off = np.abs(y if equal_side == "train" else x)
        noise = 1.4826 * float(np.median(off[open_] / (1 - p[open_]))) if open_.sum() > 8 else 1.0
        fit *= float(np.clip(2 - noise / (0.4 * honest_limit(frame)), 0, 1))
        told = f"the {equal_side} side equals the reference model (no adapter?)"
    else:
        told = f"train - reference is {slope:.2f} times rollout - reference"
    numbers: dict[str, float | str] = {"scale_ratio": slope, "explained": share}
    return [Evidence("lora-scale", t, fit, f"{told}; that explains {share:.0%} of the gap", numbers)]


def clustered_t_of(frame: Frame, chosen: np.ndarray, values: np.ndarray) -> float:
    """Clustered t of values given for the chosen tokens only."""
    full = np.zeros(len(frame))
    full[chosen] = values
    return clustered_t(frame, full, chosen)


def head(frame: Frame) -> list[Evidence]:
    """The gap depends on the token's id: the rows of the output head differ."""
    if frame.log.tokens is None or len(frame) < 500:
        return []
    tokens = frame.log.tokens[frame.index]
    bins = quantile_bins((frame.rollout + frame.train) / 2, 12)
    seen = seen_before(frame)
    if seen is not None:
        bins = bins * 4 + occurrence_level(seen)
    mean = np.bincount(bins, weights=frame.gap) / np.maximum(np.bincount(bins), 1)
    # In units of what is usual for tokens of that certainty: otherwise the few uncertain ones decide alone.
    usual = np.bincount(bins, weights=np.abs(frame.gap)) / np.maximum(np.bincount(bins), 1)
    rest = np.clip((frame.gap - mean[bins]) / np.maximum(usual[bins], 1e-12), -4, 4)
    count = np.bincount(tokens)
    used = np.flatnonzero(count >= 5)
    if len(used) < 20:
        return []
    total = np.bincount(tokens, weights=rest)[used]
    square = np.bincount(tokens, weights=rest * rest)[used]
    between = float((np.square(total) / count[used]).sum())
    within = float(square.sum()) - between
    free, left = len(used), int(count[used].sum()) - len(used)
    if within <= 0 or left < 50:
        return []
    ratio = (between / free) / (within / left)
    share = float(np.clip((between - free * within / left) / (between + within), 0, 1))
    strength = max(0.0, (ratio - 1) * float(np.sqrt(free / 2)))
    detail = f"the token's id explains {share:.0%} of the gap's variance (F {ratio:.1f}): rows of the head differ"
    numbers: dict[str, float | str] = {"explained": share, "f": ratio}
    # A head that differs is still a distribution: lost mass makes a gap per position that looks like one per token.
    lost = abs(float(np.log(np.exp(np.clip(frame.raw_gap, -30, 4)).mean()))) / max(
        float(np.abs(frame.gap).mean()), 1e-9
    )
    fit = float(np.clip((share - 0.06) / 0.1, 0, 1)) * float(np.clip(1.5 - 3 * lost, 0, 1))
    return [Evidence("tied-head", strength, fit, detail, numbers)]


def heavy_tail(frame: Frame) -> list[Evidence]:
    """A small bulk and rare large gaps: discrete decisions that flip."""
    if len(frame) < 500:
        return []
    far = frame.size > 6
    rate = float(far.mean())
    energy = np.square(frame.size)
    share = float(energy[far].sum() / max(float(energy.sum()), 1e-12))
    # Rounding noise has under 1.2 % of tokens beyond six times its mean size, with about a quarter of the energy.
    strength = (rate - 0.012) / np.sqrt(0.012 / len(frame))
    median = float(np.median(np.abs(frame.gap)))
    detail = f"{rate:.1%} of tokens hold {share:.0%} of the gap energy; the bulk is small (median {median:.4f})"
    # Logits on a grid also flip rarely, but by one small step and between equal values; another expert moves far.
    reach = float(np.quantile(np.abs(frame.gap), 0.999))
    equal = float((frame.raw_gap == 0).mean())
    numbers: dict[str, float | str] = {"far_share": rate, "energy": share, "p999": reach, "equal": equal}
    fit = float(np.clip((share - 0.45) / 0.3, 0, 1) * np.clip(reach / 0.5, 0, 1) * (0.2 if equal > 0.2 else 1.0))
    return [Evidence("router-dtype", float(strength), fit, detail, numbers)]


def too_large(frame: Frame) -> list[Evidence]:
    """Noise of the right shape that is larger than the compute type explains."""
    noise, limit = logit_noise(frame), honest_limit(frame)
    if noise == 0:
        return []
    detail = (
        f"logit noise of about {noise:.3f} against at most {limit:.3g} that "
        f"{frame.log.facts.dtype or 'bf16'} arithmetic explains"
    )
    fit = float(np.clip(1 - (limit / noise) ** 2, 0, 1)) if noise > limit else 0.0
    return [Evidence("quantised-rollout", 6 * noise / limit, fit, detail, {"logit_noise": noise, "limit": limit})]


def detect(frame: Frame) -> list[Evidence]:
    """All detectors of the model as a whole."""
    return [*adapter(frame), *head(frame), *heavy_tail(frame), *too_large(frame)]
