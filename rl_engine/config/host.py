"""What resolving needs to know about the machine, gathered without importing torch."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import os
import shutil
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """The machine as the resolver sees it.

    Attributes:
        cores: CPU cores this process may use.
        gpu_kind: ``cuda``, ``rocm`` or None.
        chain: True when the C chain kernel can be built here.
        gpus: GPUs that this process may use.
        dirty: why these sources are no formal evidence; empty where they are a clean checkout.
    """

    cores: int
    gpu_kind: str | None
    chain: bool
    dirty: str = ""
    gpus: int = 0


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


def gpu_count() -> int:
    """NVIDIA GPUs whose device files exist, of those that CUDA_VISIBLE_DEVICES leaves."""
    found = len(glob.glob("/dev/nvidia[0-9]*"))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if named is None else min(found, len([name for name in named.split(",") if name.strip()]))


def has_c_compiler() -> bool:
    """Whether the C chain kernel can be built here.

    The same answer as ``rl_engine.ops.library.available()`` (a test compares them), without that room's torch import:
    plan and doctor must answer quickly, and on a machine without torch.
    """
    named = os.environ.get("CC", "").split()
    if named and shutil.which(named[0]):
        return True
    return any(shutil.which(name) for name in ("cc", "gcc", "clang")) or importlib.util.find_spec("ziglang") is not None


def dirty_sources() -> str:
    """Why a run of these sources is development, as its validation will say; empty for a clean checkout."""
    from rl_engine.records.sources import source_record

    source = source_record("rl_kernel", Path(__file__).resolve().parents[2])
    if source.revision is None:
        return "these sources are under no version control"
    return "this checkout has uncommitted changes" if source.dirty else ""


def this_host() -> HostFacts:
    """Facts of this machine."""
    return HostFacts(usable_cores(), gpu_kind(), has_c_compiler(), dirty_sources(), gpu_count())
