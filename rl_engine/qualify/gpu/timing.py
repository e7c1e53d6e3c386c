"""Time of GPU work without the host: runs are captured in a CUDA graph, replayed in turns, the median counts."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

Run = Callable[[], object]
L2_BYTES = 60 << 20  # a Hopper's second-level cache; inputs rotate over several times as much


def copies(bytes_per_call: int, most: int = 16) -> int:
    """How many sets of inputs make rotating runs read from memory instead of the cache."""
    return max(2, min(most, -(-3 * L2_BYTES // max(bytes_per_call, 1))))


def captured(runs: Sequence[Run]) -> Run:
    """One CUDA graph of all runs, after each ran once."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
        torch.cuda.synchronize()
        graph.capture_begin()  # without torch.cuda.graph, which gives all cached memory back first
        try:
            for run in runs:
                run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def launched(runs: Sequence[Run]) -> Run:
    """The runs one after another from the host."""

    def replay() -> None:
        for run in runs:
            run()

    return replay


def elapsed(replay: Run) -> float:
    """Seconds between two events around one replay."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def microseconds(
    contestants: Mapping[str, Sequence[Run]], seconds: float = 0.01, *, graph: bool = True
) -> dict[str, float]:
    """Microseconds per call of every contestant, in turns; a contestant is a list of runs over different inputs.

    Every contestant gets about ``seconds`` of device time and three replays at least.
    """
    replays = {name: captured(runs) if graph else launched(runs) for name, runs in contestants.items()}
    counts: dict[str, int] = {}
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for name, replay in replays.items():
        replay()
        counts[name] = max(3, min(100, int(seconds / (elapsed(replay) + 1e-7))))
    for turn in itertools.count():
        busy = [name for name in replays if turn < counts[name]]
        if not busy:
            break
        for name in busy:
            found[name].append(elapsed(replays[name]))
    return {name: statistics.median(found[name]) / len(contestants[name]) * 1e6 for name in contestants}
