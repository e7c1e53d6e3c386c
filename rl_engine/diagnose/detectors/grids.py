"""Values on a grid: logprobs stored in a narrow type, logits rounded before the softmax."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_engine.diagnose.causes import Evidence
from rl_engine.diagnose.detectors.distribution import setting
from rl_engine.diagnose.frame import Array, Frame

# Log-odds looked at: below, several rivals share the rest; above, fp32 itself rounds the logprob too coarsely.
LOW, HIGH = 1.5, 8.0


def _storage(values: npt.NDArray[np.float32]) -> str | None:
    """``bf16``, ``fp16`` or ``N decimals`` when nearly all non-zero values are on that grid, else None."""
    values = values[(values != 0) & np.isfinite(values)]
    if len(values) < 30:
        return None
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if ((bits & np.uint32(0xFFFF)) == 0).mean() > 0.98:
        return "bf16"
    with np.errstate(over="ignore"):
        if (values.astype(np.float16).astype(np.float32) == values).mean() > 0.98:
            return "fp16"
    for places in (1, 2, 3, 4):
        rounded = np.round(values.astype(np.float64), places).astype(np.float32)
        if (rounded == values).mean() > 0.98:
            return f"{places} decimals"
    return None


def stored(frame: Frame) -> list[Evidence]:
    """One side's logprobs are all on a coarse grid and the other's are not."""
    a = _storage(frame.log.rollout[frame.index])
    b = _storage(frame.log.train[frame.index])
    if a == b:
        return []
    side, kind = ("rollout", a) if a is not None else ("train", b)
    detail = f"{side} logprobs are all representable in {kind}, the other side's are " + (
        "not" if a is None or b is None else f"in {b if side == 'rollout' else a}"
    )
    return [Evidence("logprob-dtype", 60.0, 0.9, detail, {"side": side, "grid": str(kind)})]


def _odds(x: Array) -> Array:
    return x - np.log(-np.expm1(np.minimum(x, -1e-9)))


def _resultant(values: Array, spacing: float) -> float:
    """Length of the mean of exp(2 pi i value / spacing), 0 to 1, tapered so that the range's ends leave no trace."""
    weight = np.square(np.sin(np.pi * (values - LOW) / (HIGH - LOW)))
    return float(np.abs((weight * np.exp(2j * np.pi * values / spacing)).sum()) / max(float(weight.sum()), 1e-12))


def logits(frame: Frame) -> list[Evidence]:
    """Log-odds of likely tokens cluster on multiples of a power of two on one side only.

    A token with one strong rival has log-odds z_y - z_rival, a multiple of the logits' spacing when they were rounded
    before the softmax. The resultant length of the phase of log-odds / spacing measures it (0: none, 1: all).
    """
    storage = {"rollout": _storage(frame.log.rollout[frame.index]), "train": _storage(frame.log.train[frame.index])}
    sides = {}
    for side, values in (("rollout", frame.rollout), ("train", frame.train)):
        odds = _odds(values[(values < -1e-4) & (values > -0.3)])
        sides[side] = odds[(odds > LOW) & (odds < HIGH)]
    count = min(len(odds) for odds in sides.values())
    if count < 100:
        return []
    known = setting(frame.log.samples.temperature) or 1.0
    best: tuple[float, str, float, float] = (0.0, "", 0.0, 0.0)
    for step in 2.0 ** np.arange(-9, -1):
        for scale in {1.0, 1.0 / known}:
            length = {side: _resultant(value, step * scale) for side, value in sides.items()}
            for side, other in (("rollout", "train"), ("train", "rollout")):
                # 1.5: what the taper costs in independent tokens.
                z = (length[side] - length[other]) * np.sqrt(2 * count / 1.5)
                if z <= best[0] or storage[side] is not None:
                    continue
                # A lump in the distribution of log-odds also shows at spacings that no format has.
                lump = max(_resultant(sides[side], step * scale * off) for off in (0.81, 0.9, 1.1, 1.23))
                z = min(z, (length[side] - lump) * np.sqrt(2 * count / 1.5))
                if z > best[0]:
                    best = (float(z), side, float(step), length[side])
    z, side, step, resultant = best
    if z == 0.0:
        return []
    kind = "bf16" if step >= 1 / 16 else "fp16, or bf16 of small logits"
    detail = (
        f"log-odds of likely tokens lie on multiples of {step:g} on the {side} side only "
        f"(resultant {resultant:.2f}, {z:.1f} standard errors): logits rounded to {kind}"
    )
    numbers: dict[str, float | str] = {"side": side, "spacing": step, "resultant": resultant}
    return [Evidence("logits-dtype", z, 0.6 + 0.35 * min(1.0, resultant / 0.3), detail, numbers)]
