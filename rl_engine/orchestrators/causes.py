"""Why a run ended: one table of causes that can be told from what is known, and whether ``--resume`` can help.

What is not known is said as such: an error has its own words, a death its signal.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
from pathlib import Path

from rl_engine.engines.types import UpdateResult
from rl_engine.records.codec import RecordError


class RunFailed(RuntimeError):
    """A run ended by itself: a worker died or an engine raised. The message says which and why.

    Attributes:
        resume: whether going on can end otherwise.
    """

    def __init__(self, message: str, *, resume: bool = True) -> None:
        super().__init__(message)
        self.resume = resume


@dataclasses.dataclass(frozen=True)
class Cause:
    """One row: an error whose type's name or text matches; ``words`` say what it means, None leaves the error's own."""

    pattern: str
    words: str | None
    resume: bool


# The first row that matches. Text is searched after the type's name: "AcceleratorError: CUDA error: ...".
ERRORS = (
    Cause(
        r"(?i)CUDA out of memory|CUDA error: out of memory|^(?:Cuda|HIP)?OutOfMemoryError: (?:CUDA|HIP)",
        "the GPU's memory ran out",
        True,
    ),
    Cause(r"^NonFinite", None, False),
    Cause(
        r"(?i)CUDA error|HIP error|unspecified launch failure|illegal memory access|uncorrectable|\bECC\b|\bXid\b"
        r"|device(?: is| was)? lost|GPU(?: is| was)? lost|fallen off the bus|CUDNN_STATUS_\w+|CUBLAS_STATUS_\w+"
        r"|^AcceleratorError",
        "the GPU was lost",
        True,
    ),
    Cause(
        r"(?i)^MemoryError|can't allocate memory|cannot allocate memory|bad_alloc|\[enforce fail at alloc",
        "memory ran out",
        True,
    ),
    Cause(r"(?i)OutOfMemoryError|memory usage threshold|low on memory", "Ray's memory limit ended it", True),
)


def of_error(error: BaseException, where: str = "") -> RunFailed:
    """An error as the end of its run, in one line.

    Args:
        where: the worker that raised, where it is known.
    """
    name, said = type(error).__name__, " ".join(str(error).split())
    text, place = f"{name}: {said[:300]}", f" ({where})" if where else ""
    for cause in ERRORS:
        if re.search(cause.pattern, f"{name}: {said}"):
            return RunFailed(f"{cause.words}{place}: {text}" if cause.words else text, resume=cause.resume)
    return RunFailed(text)


def of_death(name: str, pid: int, said: str, kills: int) -> RunFailed:
    """A worker that is gone: by the kernel's count of kills for want of memory, by what it ``said`` last, or for a
    reason that nobody knows."""
    if not (why := by_memory(kills)):
        known = (cause.words for cause in ERRORS if cause.words and re.search(cause.pattern, said))
        why = f": {words}" if (words := next(known, None)) else ": killed from outside or by a crash"
    return RunFailed(f"{name} (process {pid}) died{why}")


def check_finite(step: int, update: UpdateResult) -> None:
    """
    Raises:
        RunFailed: an update whose numbers are not finite; it would be the same again.
    """
    for name in ("loss", "entropy_mean", "clip_fraction", "grad_norm"):
        value = getattr(update, name)
        if not math.isfinite(value):
            raise RunFailed(f"step {step + 1}: the update's {name} is {value}; look at the learning rate", resume=False)


def of_record(error: OSError | RecordError) -> RunFailed:
    """A record that could not be written, or a step that was computed again with another result."""
    return RunFailed(str(error), resume=not isinstance(error, RecordError))


def of_exit(status: int, memory_kills: int) -> str:
    """A process' end in words, by its wait status; ``memory_kills`` is by how much :func:`memory_kills` grew."""
    if not os.WIFSIGNALED(status):
        return (
            f"its process ended without a word (exit code {os.WEXITSTATUS(status)}), as Ray ends it when its head dies"
        )
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL:
        return f"its process was killed (signal {number}){by_memory(memory_kills)}"
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS):
        return f"its process crashed (signal {number}, {signal.Signals(number).name})"
    return f"its process was ended by signal {number}"


def by_memory(kills: int) -> str:
    """What the kernel's count says about a death by SIGKILL."""
    return f": the kernel's memory limit killed {kills} process{'es' * (kills > 1)} meanwhile" if kills > 0 else ""


def memory_kills() -> int:
    """How many processes the kernel has killed for want of memory: in this process' control group where it has one
    that counts, else on the machine. 0 where nothing counts."""
    for path in _counters():
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def _counters() -> list[Path]:
    found = []
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers:
                found.append(Path("/sys/fs/cgroup") / place.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(Path("/sys/fs/cgroup/memory") / place.lstrip("/") / "memory.oom_control")
    except (OSError, ValueError):
        pass
    # The root of a container's own view, then the whole machine.
    return [*found, Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")]
