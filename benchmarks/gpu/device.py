"""One GPU as the families use it: graph-captured timing in turns, peak memory, a deadline."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_engine.ops import device
from rl_engine.qualify.gpu.timing import Run, copies, microseconds

__all__ = ["Device", "OutOfTime", "Run", "copies"]


class OutOfTime(Exception):
    """The deadline of the whole call has passed; what was yielded is kept."""


class Device:
    """The first GPU, with a deadline ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @functools.cached_property
    def random(self) -> torch.Generator:
        return torch.Generator("cuda").manual_seed(20251)

    def over(self) -> bool:
        return time.monotonic() > self.end

    def stop(self) -> None:
        """Ends the time now.

        Raises:
            OutOfTime: always.
        """
        self.end = time.monotonic()
        raise OutOfTime

    def check(self) -> None:
        if self.over():
            raise OutOfTime

    def about(self) -> dict[str, Any]:
        import triton

        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability(0)),
            "driver": device.driver(),
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
        """Microseconds per call of every contestant, in turns (:func:`rl_engine.qualify.gpu.timing.microseconds`)."""
        self.check()
        return microseconds(contestants, seconds, graph=graph)

    def peak(self, run: Run) -> int:
        """Bytes that ``run`` allocates at its peak above what was alive before it."""
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
