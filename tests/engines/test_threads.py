"""Threads of a process, with or without a Plan."""

from __future__ import annotations

import torch

from rl_engine.engines.threads import use_threads
from rl_engine.ops import library
from tests.helpers.models import threads


def test_threads_are_set_for_torch_and_for_the_kernels_where_they_compute() -> None:
    asked: list[int] = []
    set_threads, library.set_threads = library.set_threads, asked.append
    try:
        with threads(1):
            asked.clear()
            assert use_threads(2).intra_op == torch.get_num_threads() == 2
            assert use_threads(1, {"stock"}).intra_op == 1
            assert asked == [2], "no kernel of ours computes for stock"
    finally:
        library.set_threads = set_threads
