"""The limit that moving bytes sets: the device's own copy, measured in the same run."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.device import Device

LARGE = 1 << 30  # elements of four bytes of the copy that sets the limit


def copy_rate(device: Device) -> float:
    """Bytes a microsecond of a copy of 4 GiB, read and written bytes counted."""
    source, target = torch.empty(LARGE, device="cuda"), torch.empty(LARGE, device="cuda")
    return 8 * LARGE / device.times({"copy": [lambda: target.copy_(source)]}, 0.05)["copy"]


def copy_time(device: Device, moved: int) -> float:
    """Microseconds of a copy that moves ``moved`` bytes in all, launch included, over buffers that do not stay in the
    cache."""
    half = max(moved // 8, 1)
    count = max(2, min(16, (200 << 20) // (4 * half) + 1))
    sources: list[Tensor] = [torch.empty(half, device="cuda") for _ in range(count)]
    targets: list[Tensor] = [torch.empty(half, device="cuda") for _ in range(count)]
    runs = [lambda a=a, b=b: b.copy_(a) for a, b in zip(sources, targets, strict=True)]
    return device.times({"copy": runs}, 0.02)["copy"]
