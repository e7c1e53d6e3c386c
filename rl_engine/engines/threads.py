"""How many threads this process computes with; every worker of an engine says so once, with or without a Plan."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from rl_engine.numerics.providers import capabilities
from rl_engine.ops import library
from rl_engine.records.types import ThreadSettings


def use_threads(count: int, providers: Iterable[str] = ("cpu",)) -> ThreadSettings:
    """Sets the number of threads of torch, and of the C kernels where one of ``providers`` computes by them; says what
    is in force. The bits of the contract's operators do not depend on it.

    Raises:
        BuildError: the C kernels cannot be compiled, or a thread of theirs flushes subnormal numbers to zero.
    """
    torch.set_num_threads(count)
    if any(capabilities(name).compiled for name in providers):
        library.set_threads(count)
    omp = os.environ.get("OMP_NUM_THREADS")
    return ThreadSettings(torch.get_num_threads(), torch.get_num_interop_threads(), int(omp) if omp else None)
