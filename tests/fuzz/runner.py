"""Runs inputs of a family one after another, each from a seed of its own, with limits on time and memory."""

from __future__ import annotations

import dataclasses
import random
import resource
import signal
import tempfile
import traceback
from pathlib import Path
from types import FrameType

from tests.fuzz.families import FAMILIES, clear

SECONDS = 30  # for one input; the slowest takes a few tenths
MEMORY_KB = 400_000  # growth of the process over all inputs of a family


class Hang(BaseException):
    """An input took too long; no ``except Exception`` may swallow it."""


@dataclasses.dataclass
class Outcome:
    """What came of a family's inputs; ``faults`` are (seed, what was raised)."""

    used: int = 0
    refused: int = 0
    faults: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    grown_kb: int = 0


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {SECONDS} s")


def run_family(name: str, seed: int, inputs: int, most_faults: int = 10) -> Outcome:
    """``inputs`` of a family; the seed of input ``i`` is the text ``<name>/<seed>/<i>``."""
    outcome = Outcome()
    handler = signal.signal(signal.SIGALRM, _hang)
    try:
        with tempfile.TemporaryDirectory(prefix="rlk-fuzz-") as folder:
            good, place = Path(folder) / "good", Path(folder) / "spoilt"
            good.mkdir()
            place.mkdir()
            family = FAMILIES[name](good)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for number in range(inputs):
                key = f"{name}/{seed}/{number}"
                signal.alarm(SECONDS)
                try:
                    if family(random.Random(key), place):
                        outcome.used += 1
                    else:
                        outcome.refused += 1
                except (Exception, Hang):
                    outcome.faults.append((key, traceback.format_exc(limit=-6)))
                    if len(outcome.faults) >= most_faults:
                        break
                finally:
                    signal.alarm(0)
                    clear(place)
            outcome.grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    finally:
        signal.signal(signal.SIGALRM, handler)
    return outcome
