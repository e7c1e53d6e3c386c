"""Numbers for people, and ticks for axes."""

from __future__ import annotations

import math


def shown(value: float, digits: int = 4) -> str:
    """Whole numbers with separators, others with ``digits`` significant digits; NaN and infinities by name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def short(value: float) -> str:
    """For the space beside an axis: 1.2k, 3M, 0.05, 2e-6."""
    size = abs(value)
    for least, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= least:
            unit = {"G": 1e9, "M": 1e6, "k": 1e3}[letter]
            return f"{value / unit:.3g}{letter}"
    if size and size < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values that cover ``low`` to ``high``, about ``count`` steps apart; the ends may lie outside."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low, low + 1.0]
    raw = span / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) if step >= 1e-9 else index * step for index in range(first, last + 1)]


def bytes_shown(size: int) -> str:
    """Decimal gigabytes, or megabytes below one."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """``1 h 2 min``, ``3 min 4 s``, ``12.3 s``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
