"""What resolving needs to know about the machine, gathered without importing torch."""

from __future__ import annotations

import dataclasses
import glob
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """The machine as the resolver sees it.

    Attributes:
        cores: CPU cores this process may use.
        gpu_kind: ``cuda``, ``rocm`` or None.
        chain: True when the C chain kernel can be had here (a compiler, or an already built library).
    """

    cores: int
    gpu_kind: str | None
    chain: bool


def usable_cores() -> int:
    """Cores of this process: the affinity mask, cut by a cgroup quota where there is one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores  # no cgroup v2 quota on this machine
    return cores


def gpu_kind() -> str | None:
    """The kind of GPU whose device files exist, or None."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return "cuda"
    return "rocm" if os.path.exists("/dev/kfd") else None


def this_host(chain: bool) -> HostFacts:
    """Facts of this machine; ``chain`` comes from the operators' room, which this one may not import."""
    return HostFacts(usable_cores(), gpu_kind(), chain)
