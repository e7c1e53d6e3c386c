"""Timing in turns, and the report that every benchmark returns."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

SCHEMA = "rlkernel.bench.v1"
BASELINE = "native"
ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass
class Timing:
    """Seconds of every turn. ``cpu_seconds`` counts all threads of the process and hardly feels other programs."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclasses.dataclass
class Case:
    """One size. ``work`` units (tokens, calls) are done per turn."""

    name: str
    work: int
    unit: str
    timings: Mapping[str, Timing]

    def speed(self, name: str) -> float:
        """Times as fast as the baseline."""
        return self.timings[BASELINE].median / self.timings[name].median

    def cpu_speed(self, name: str) -> float:
        """The same in CPU seconds, for a busy machine."""
        medians = [statistics.median(self.timings[key].cpu_seconds) for key in (BASELINE, name)]
        return medians[0] / medians[1] if medians[1] else math.nan

    def record(self) -> dict[str, Any]:
        contestants = {
            name: {**dataclasses.asdict(timing), "median": timing.median, "per_second": self.work / timing.median}
            for name, timing in self.timings.items()
        }
        others = [name for name in self.timings if name != BASELINE]
        speeds = {name: self.speed(name) for name in others}
        if self.timings[BASELINE].cpu_seconds:
            speeds |= {name + ", CPU seconds": self.cpu_speed(name) for name in others}
        return {"case": self.name, "work": self.work, "unit": self.unit, "times": contestants, "speed": speeds}


def in_turns(contestants: Mapping[str, Callable[[], object]], rounds: int, *, repeat: int = 1) -> dict[str, Timing]:
    """Runs everyone once to warm up, then ``rounds`` turns each, alternating; a turn's time is per repetition."""
    timings = {name: Timing() for name in contestants}
    for run in contestants.values():
        run()
    for _ in range(rounds):
        for name, run in contestants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                run()
            timings[name].seconds.append((time.perf_counter() - wall) / repeat)
            timings[name].cpu_seconds.append((time.process_time() - cpu) / repeat)
    return timings


@dataclasses.dataclass
class Report:
    """All cases of one benchmark, and where they ran."""

    benchmark: str
    about: dict[str, Any]
    cases: list[Case] = dataclasses.field(default_factory=list)
    load_before: float = dataclasses.field(default_factory=lambda: os.getloadavg()[0])

    def json(self) -> str:
        body = {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "about": self.about,
            "machine": machine(self.load_before),
            "cases": [case.record() for case in self.cases],
        }
        return json.dumps(body, indent=1) + "\n"

    def print(self, out: TextIO) -> None:
        """A table for people: tokens per second, or microseconds of a call."""
        out.write(f"{self.benchmark}: " + ", ".join(f"{key} {value}" for key, value in self.about.items()) + "\n")
        for case in self.cases:
            cells = [
                f"{name} {case.work / timing.median:.1f} {case.unit}/s"
                if case.unit != "calls"
                else f"{name} {_time(timing.median)}"
                for name, timing in case.timings.items()
            ]
            speeds = [f"{name} {case.speed(name):.2f}x {BASELINE}" for name in case.timings if name != BASELINE]
            out.write(f"  {case.name:44} {' | '.join(cells)} | {', '.join(speeds)}\n")
        cores = len(os.sched_getaffinity(0))
        if self.load_before > cores / 2:
            out.write(
                f"  the machine was busy (load {self.load_before:.1f} on {cores} cores): see the JSON's CPU seconds\n"
            )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e6:.0f} us"


def machine(load_before: float) -> dict[str, Any]:
    """Processor, versions and sources."""
    import numpy
    import torch

    from rl_engine.records.sources import FOLDERS, source_record

    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "source": dataclasses.asdict(source_record("rl_kernel", ROOT, (*FOLDERS, "benchmarks"))),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []
