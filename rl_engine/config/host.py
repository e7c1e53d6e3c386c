"""What resolving needs to know about the machine, gathered without importing torch."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import itertools
import os
import shutil
from pathlib import Path

from rl_engine.config.child import run_child

SMI_SECONDS = 20.0
HOPPER = "9.0"  # what the contract cuda-sm90 is proven on
DEMO_BYTES = 8 * 2**30  # of a GPU: what both engines of the one-GPU demo take, rounded up


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """The machine as the resolver sees it.

    Attributes:
        cores: CPU cores this process may use.
        gpu_kind: ``cuda``, ``rocm`` or None.
        chain: True when the C chain kernel can be built here.
        gpus: GPUs that this process may use.
        refused: why the built-in engines would refuse the GPU; empty where they take it, where there is none, and where
            nobody asked.
        dirty: why these sources are no formal evidence; empty where they are a clean checkout.
    """

    cores: int
    gpu_kind: str | None
    chain: bool
    dirty: str = ""
    gpus: int = 0
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The NVIDIA GPU that a process takes first, by nvidia-smi's word; ``error`` says why it has none.

    ``memory`` in bytes, 0 where the device does not tell; ``capability`` as ``9.0``.
    """

    name: str = ""
    capability: str = ""
    memory: int = 0
    error: str = ""


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
    if named is None:
        return found
    return min(found, len(list(itertools.takewhile(lambda name: name.strip() not in ("", "-1"), named.split(",")))))


def first_gpu() -> Gpu:
    """Kind and memory of the first of those that CUDA_VISIBLE_DEVICES leaves."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    query = ["nvidia-smi", "-i", first, "--query-gpu=memory.total,compute_cap,name", "--format=csv,noheader,nounits"]
    out, error = run_child(query, SMI_SECONDS)
    size, capability, name = (*(cell.strip() for cell in out.partition("\n")[0].split(",", 2)), "", "", "")[:3]
    try:
        memory = int(float(size) * 2**20)
    except (ValueError, OverflowError):
        memory = 0  # "[N/A]" on devices that do not tell
    return Gpu(name, capability, memory, error)


def refused_gpu(kind: str | None) -> str:
    """Why the built-in engines would refuse the GPU of this machine, or its one-GPU demo would not fit; else empty."""
    if kind is None:
        return ""
    if kind != "cuda":
        return "the built-in engines do not run on an AMD GPU"
    if gpu_count() == 0:
        return "CUDA_VISIBLE_DEVICES leaves no GPU"
    gpu = first_gpu()
    if gpu.error:
        return f"nvidia-smi says nothing of the GPU ({gpu.error})"
    if gpu.capability != HOPPER:
        return f"{gpu.name} has compute capability {gpu.capability}, the GPU operators are proven on {HOPPER} (Hopper)"
    if gpu.memory < DEMO_BYTES:
        return f"{gpu.name} has {gpu.memory / 2**30:.1f} GiB, the GPU's demo takes {DEMO_BYTES / 2**30:g}"
    return ""


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


def this_host(ask_gpu: bool = False) -> HostFacts:
    """Facts of this machine; with ``ask_gpu`` also whether its GPU would be refused, which takes a moment."""
    kind = gpu_kind()
    refused = refused_gpu(kind) if ask_gpu else ""
    return HostFacts(usable_cores(), kind, has_c_compiler(), dirty_sources(), gpu_count(), refused)
