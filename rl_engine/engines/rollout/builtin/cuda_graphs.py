"""Captures on an NVIDIA GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor


class CudaGraphDevice:
    """All captures share one pool of memory: replays follow each other in one stream, and nothing that one leaves there
    is read by another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = self.capture(lambda: torch.zeros(1, device=device))  # a pool without a graph is gone for good

    def host_bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        graph, current, collects = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device), gc.isenabled()
        self._stream.wait_stream(current)
        gc.disable()  # what it would free may not be freed within a capture
        try:
            with torch.cuda.stream(self._stream):
                # Without torch.cuda.graph, which gives all cached memory back first.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        current.wait_stream(self._stream)
        return graph.replay

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
