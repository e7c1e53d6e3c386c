"""doctor: GPUs, driver, shared memory, disk, memory, threads, compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rl_engine.checks.doctor_ask import judged, passed
from rl_engine.checks.finding import Finding
from rl_engine.config.child import run_child
from rl_engine.config.host import HOPPER, SMI_SECONDS, first_gpu, gpu_count, usable_cores
from rl_engine.config.memory import rollout_memory, train_memory
from rl_engine.config.paths import PLACEHOLDER
from rl_engine.config.resolve import ResolvedPlan

SHARED_MEMORY = Path("/dev/shm")
GIB = 2**30
BUSY_BYTES = 2 * GIB
CONTEXT_BYTES = GIB // 2  # of a GPU, what CUDA and its libraries take in every process
_QUERY = "index,name,memory.total,memory.used,utilization.gpu,driver_version"


def gpus(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Count, model, memory in use and driver of the GPUs that the backend needs."""
    backend = resolved.plan.backend
    if backend == "cpu":
        yield passed("gpus", "none needed", "none (backend cpu)")
    elif backend == "rocm":
        yield from _amd(resolved)
    else:
        yield from _nvidia(resolved)


def _nvidia(resolved: ResolvedPlan) -> Iterator[Finding]:
    requirements = resolved.profile.profile.requirements
    needs = requirements.gpus or 1
    out, error = run_child(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], SMI_SECONDS)
    if error:
        yield Finding(
            "gpus", "FAIL", error, f"at least {needs} that nvidia-smi shows", "install the driver, or --backend cpu"
        )
        return
    rows = [
        [cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.count(",") == _QUERY.count(",")
    ]
    yield judged(
        "gpus", len(rows) >= needs, f"{len(rows)}", f"at least {needs}", "use a machine with more, or --oversubscribe"
    )
    if requirements.gpu_model:
        words = requirements.gpu_model.split()
        other = sorted({row[1] for row in rows if not all(word in row[1] for word in words)})
        names = ", ".join(other or sorted({row[1] for row in rows})) or "none"
        yield judged(
            "gpu model",
            bool(rows) and not other,
            names,
            requirements.gpu_model,
            "the profile's evidence holds for that model only",
        )
    busy = [row[0] for row in rows if _number(row[3]) * 2**20 > BUSY_BYTES or _number(row[4]) > 10]
    shown = "GPUs " + ", ".join(busy) + " in use" if busy else "idle"
    yield judged(
        "gpus idle",
        not busy,
        shown,
        "under 2 GiB in use and under 10 % busy",
        "end what runs there; nvidia-smi names it",
    )
    if rows:
        least = min(_number(row[2]) for row in rows) / 1024
        yield passed("gpu driver", f"driver {rows[0][5]}, {least:.0f} GiB per GPU", "any")


def shared_gpu(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Kind and memory of the first GPU that the built-in engines share, its memory against the plan's estimate."""
    plan = resolved.plan
    if (plan.backend, plan.stack) != ("cuda", "builtin") or plan.model is None:
        return
    gpu = first_gpu()
    found = gpu.error or f"{gpu.name}, compute capability {gpu.capability}"
    yield judged("gpu kind", gpu.capability == HOPPER, found, f"compute capability {HOPPER} (Hopper)", "--backend cpu")
    shape, gpus = plan.topology, max(1, gpu_count())
    train, rollout = shape.train_tp * shape.train_cp, shape.rollout_engines * shape.rollout_tp * shape.rollout_cp
    needs = -(-train // gpus) * (train_memory(plan).total + CONTEXT_BYTES)
    needs += -(-rollout // gpus) * (rollout_memory(plan, None).total + CONTEXT_BYTES)
    yield judged(
        "gpu memory",
        not gpu.error and gpu.memory >= needs,
        gpu.error or f"{gpu.memory / GIB:.1f} GiB",
        f"{needs / GIB:.1f} GiB for its share of trainer and rollout ranks",
        "lower --max-tokens-per-gpu, --rollout-batch-size or --max-response-len, or use a smaller model",
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # "[N/A]" on devices that do not tell


def _amd(resolved: ResolvedPlan) -> Iterator[Finding]:
    needs = resolved.profile.profile.requirements.gpus or 1
    out, error = run_child(["rocminfo"], SMI_SECONDS)
    if error:
        yield Finding("gpus", "FAIL", error, f"{needs} GPUs that rocminfo shows", "install ROCm, or --backend cpu")
        return
    names = [line.split(":", 1)[1].strip() for line in out.splitlines() if line.strip().startswith("Name:")]
    found = [name for name in names if name.startswith("gfx")]
    yield judged("gpus", len(found) >= needs, f"{len(found)}", f"at least {needs}", "use a machine with more")
    other = sorted({name for name in found if name != "gfx942"})
    shown = ", ".join(other) or "gfx942"
    yield judged("gpu model", not other, shown, "gfx942", "only gfx942 has evidence; run qualify first", "WARN")


def shared_memory(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Free space of /dev/shm, where Ray keeps its object store; a small local run works without, only slower."""
    large = resolved.plan.stack == "vime"
    least, otherwise = (32 * GIB, "FAIL") if large else (GIB // 2, "WARN")
    expected = f"at least {least / GIB:g} GiB"
    hint = "mount a larger /dev/shm (docker: --shm-size), or give Ray a spill path"
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        yield Finding(
            "shared memory", otherwise, f"{SHARED_MEMORY}: {error.strerror}", f"{least / GIB:g} GiB free", hint
        )
        return
    found, expected = f"{free / GIB:.1f} GiB free", f"at least {least / GIB:g} GiB"
    yield judged("shared memory", free >= least, found, expected, hint, otherwise)


def disk(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Free space where runs are written, and that it can be written to."""
    least = (100 if resolved.plan.stack == "vime" else 3) * GIB
    root = resolved.plan.output_root
    if PLACEHOLDER in root:
        yield Finding("disk", "FAIL", "edit me", "an output root", "--workspace DIR or RLK_REPRO_WORKSPACE")
        return
    folder = next(path for path in (Path(root), *Path(root).parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("disk", "FAIL", f"{folder} is not writable", "a writable output root", "--output-root DIR")
        return
    free = shutil.disk_usage(folder).free
    yield judged(
        "disk",
        free >= least,
        f"{free / GIB:.1f} GiB free at {folder}",
        f"at least {least / GIB:g} GiB",
        "free space, or --output-root DIR",
    )


def memory(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Host memory against the plan's estimate, where ranks live in it."""
    plan = resolved.plan
    if plan.backend != "cpu" or plan.model is None:
        return
    shape = plan.topology
    train = train_memory(plan).total * shape.train_tp * shape.train_cp
    rollout = rollout_memory(plan, None).total * shape.rollout_engines * shape.rollout_tp * shape.rollout_cp
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            needs = train + rollout
            hint = "lower --rollout-batch-size or --max-tokens-per-gpu, or use fewer ranks"
            yield judged(
                "memory",
                free >= needs,
                f"{free / GIB:.1f} GiB available",
                f"{needs / GIB:.1f} GiB for all ranks",
                hint,
                "WARN",
            )


def threads(resolved: ResolvedPlan) -> Iterator[Finding]:
    """The plan's thread count against the cores here; every process of a run uses that one count."""
    cores, wanted = usable_cores(), resolved.plan.threads
    yield judged("threads", wanted <= cores, f"{cores} cores", f"at least {wanted}", f"--threads {cores}", "WARN")
    given = os.environ.get("OMP_NUM_THREADS")
    if given is not None:
        yield passed("OMP_NUM_THREADS", given, f"any: workers set {wanted} themselves")


def compiler(resolved: ResolvedPlan) -> Iterator[Finding]:
    """The C chain kernel of a CPU run."""
    if resolved.plan.backend != "cpu":
        return
    chain = not resolved.plan.contract_id.endswith("chain256")
    found = "available" if chain else "no C compiler: the slower fallback runs"
    yield judged("cpu kernel", chain, found, "the C chain kernel", "install a C compiler (cc, gcc or clang)", "WARN")
