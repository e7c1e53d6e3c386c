"""Tests that need a GPU: skipped with a reason where torch sees none. Fresh memory is filled with NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU here"))


@pytest.fixture(autouse=True)
def poisoned_gpu_memory() -> Iterator[None]:
    """``torch.empty`` holds NaN, so that an element nobody writes shows."""
    if not torch.cuda.is_available():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
