"""Every operator test runs on one thread and on poisoned memory: ``torch.empty`` is filled with NaN (integers with
their largest value), so an output element that a kernel forgets to write, or scratch that it reads unwritten, shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rl_engine.ops import library


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    library.set_threads(1)
    yield
    library.set_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
