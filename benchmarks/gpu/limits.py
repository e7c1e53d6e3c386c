"""The limit that moving bytes sets: the device's own copies, measured in the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.device import Device

SIZES = (1 << 26, 1 << 27, 1 << 28)  # elements of four bytes; torch's copy slows down beyond


def copy_rate(device: Device) -> float:
    """Bytes a microsecond of the fastest copy, read and written bytes counted: torch's own, and a kernel that reads and
    writes (above some size a captured copy is handed to a slower engine)."""
    return max(max(_rates(device, size)) for size in SIZES)


def _rates(device: Device, size: int) -> list[float]:
    sources, targets = ([torch.zeros(size, device="cuda") for _ in range(2)] for _ in range(2))
    pairs = list(zip(sources, targets, strict=True))
    contestants: dict[str, list[Callable[[], object]]] = {
        "copy": [lambda a=a, b=b: b.copy_(a) for a, b in pairs],
        "kernel": [lambda a=a, b=b: torch.neg(a, out=b) for a, b in pairs],
    }
    return [8 * size / time for time in device.times(contestants, 0.02).values()]


def copy_time(device: Device, moved: int) -> float:
    """Microseconds of the faster such copy that moves ``moved`` bytes in all, launch included, over buffers that do not
    stay in the cache."""
    half = max(moved // 8, 1)
    count = max(2, min(16, (200 << 20) // (4 * half) + 1))
    sources, targets = ([torch.zeros(half, device="cuda") for _ in range(count)] for _ in range(2))
    pairs = list(zip(sources, targets, strict=True))
    contestants: dict[str, list[Callable[[], object]]] = {
        "copy": [lambda a=a, b=b: b.copy_(a) for a, b in pairs],
        "kernel": [lambda a=a, b=b: torch.neg(a, out=b) for a, b in pairs],
    }
    return min(device.times(contestants, 0.02).values())
