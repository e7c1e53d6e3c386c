"""The limit that moving bytes sets: the device's own copies, measured in the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks.gpu.device import Device
from rl_engine.ops.triton_functions import launch

SIZES = (1 << 26, 1 << 27, 1 << 28)  # elements of four bytes; torch's copy slows down beyond
READS = ((4096, 2, 8), (4096, 4, 8), (2048, 4, 4))  # int32 a step, steps, warps: the fastest of ten on an H200


@triton.jit
def read_kernel(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr):
    """Reads STEPS blocks of int32 and writes one number. EARLY: its programs may start before the last kernel ends."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at = x + tl.program_id(0).to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    mixed = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(STEPS):
        mixed ^= tl.load(at + i * BLOCK)
    tl.store(out + tl.program_id(0), tl.xor_sum(mixed, 0))


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


def read_time(device: Device, moved: int) -> float:
    """Microseconds of the fastest kernel that reads ``moved`` bytes and does nothing else, launch included, over
    buffers that do not stay in the cache: no kernel that needs these bytes gets below."""
    count = max(2, min(16, (200 << 20) // moved + 1))
    sources = [torch.empty(moved // 4, dtype=torch.int32, device="cuda").random_() for _ in range(count)]
    out = torch.empty(moved // 4 // min(block * steps for block, steps, _ in READS), dtype=torch.int32, device="cuda")

    def read(x: Tensor, block: int, steps: int, warps: int, early: bool) -> None:
        grid = (x.shape[0] // (block * steps),)
        launch(read_kernel, grid, x, out, warps=warps, BLOCK=block, STEPS=steps, EARLY=early, launch_pdl=early)

    contestants: dict[str, list[Callable[[], object]]] = {
        f"{form} {early}": [lambda x=x, form=form, early=early: read(x, *form, early) for x in sources]
        for form in READS
        for early in (False, True)[: 1 + (torch.cuda.get_device_capability()[0] >= 9)]
    }
    return min(device.times(contestants, 0.01).values())
