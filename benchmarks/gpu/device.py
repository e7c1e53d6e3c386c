"""One GPU as the families use it: graph-captured timing in turns, peak memory, a deadline."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], object]
L2_BYTES = 60 << 20  # an H200's second-level cache; inputs rotate over several times as much


class OutOfTime(Exception):
    """The deadline of the whole call has passed; what was yielded is kept."""


class Device:
    """The first GPU, with a deadline ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.random = torch.Generator("cuda").manual_seed(20251)

    def check(self) -> None:
        if time.monotonic() > self.end:
            raise OutOfTime

    def about(self) -> dict[str, Any]:
        import triton

        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability(0)),
            "driver": driver(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """bf16 normal values."""
        return (torch.randn(shape, generator=self.random, device="cuda") * scale).bfloat16()

    def times(
        self, contestants: Mapping[str, Sequence[Run]], seconds: float = 0.01, *, graph: bool = True
    ) -> dict[str, float]:
        """Microseconds per call of every contestant, in turns; a contestant is a list of runs over different inputs.

        With ``graph`` a contestant's runs are captured once and replayed; without, they are launched from the host.
        Median over replays; every contestant gets about ``seconds`` of device time.
        """
        self.check()
        replays = {name: captured(runs) if graph else eager(runs) for name, runs in contestants.items()}
        counts, found = {}, {name: [] for name in contestants}
        for name, replay in replays.items():
            replay()
            counts[name] = max(3, min(100, int(seconds / (_elapsed(replay) + 1e-7))))
        for turn in itertools.count():
            busy = [name for name in replays if turn < counts[name]]
            if not busy:
                break
            for name in busy:
                found[name].append(_elapsed(replays[name]))
        return {name: statistics.median(found[name]) / len(contestants[name]) * 1e6 for name in contestants}

    def peak(self, run: Run) -> int:
        """Bytes that ``run`` allocates at its peak above what was alive before it."""
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def copies(bytes_per_call: int, most: int = 16) -> int:
    """How many sets of inputs make rotating runs read from memory instead of the cache."""
    return max(2, min(most, -(-3 * L2_BYTES // max(bytes_per_call, 1))))


def driver() -> str:
    """The driver's version, as its kernel module says it; empty where it says nothing."""
    import ctypes

    library = ctypes.CDLL("libnvidia-ml.so.1")
    text = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, 96):
        return ""
    return text.value.decode()


def captured(runs: Sequence[Run]) -> Run:
    """One CUDA graph of all runs, after each ran once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay


def eager(runs: Sequence[Run]) -> Run:
    def replay() -> None:
        for run in runs:
            run()

    return replay


def _elapsed(replay: Run) -> float:
    """Seconds between two events around one replay."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3
