"""A CPU in the place of a GPU that captures: a replay computes again, from the memory that the capture saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_engine.engines.rollout.builtin.engine import RolloutEngine
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.sample.cpu import CpuSample


class WordsSample(CpuSample):
    """The CPU's sampler with identities as a tensor, as the GPU's has them."""

    def best_of(self, z: Tensor, first: int, inv_t: float, mask: Tensor | None, words: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for row, identity in enumerate(words.tolist()):
            seed, step, position, sample, prompt = (value % 2**32 for value in identity)
            key = DrawKey(seed, step, prompt, sample, position)
            rows.append(self.best(z[row : row + 1], first, inv_t, None, [key]))
        return torch.cat([score for score, _ in rows]), torch.cat([token for _, token in rows])


Addresses = tuple[list[tuple[dict[str, Any], dict[str, Any]]], list[Tensor], list[Tensor], Any]


class RememberedGraphs:
    """Host and device memory are two pieces of the CPU's. A capture remembers every tensor that a graph would hold the
    address of: weights, cache, inputs. A replay runs on those, whatever the engine has now."""

    device = torch.device("cpu")
    engine: RolloutEngine

    def host_bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        seen = self._addresses()
        run()  # a graph would not compute yet; the replay that follows does the same again

        def replay() -> None:
            now = self._addresses()
            self._use(seen)
            with self.engine.ops.recording():
                run()
            self._use(now)

        return replay

    def _addresses(self) -> Addresses:
        graphs = self.engine.graphs
        assert graphs is not None
        cache = graphs.memory.cache
        weights = [(dict(weight.__dict__), dict(weight.memory.__dict__)) for weight in self.engine.weights]
        return weights, cache.k[:], cache.v[:], graphs._inputs

    def _use(self, addresses: Addresses) -> None:
        weights, keys, values, inputs = addresses
        graphs = self.engine.graphs
        assert graphs is not None
        for weight, (attributes, tensors) in zip(self.engine.weights, weights, strict=True):
            weight.__dict__.update(attributes)
            weight.memory.__dict__.update(tensors)
        graphs.memory.cache.k[:], graphs.memory.cache.v[:] = keys, values
        graphs._inputs = inputs

    def wait(self) -> None:
        return


class LateGraphs(RememberedGraphs):
    """A replay reads and computes nothing before the host waits for it: as late as a GPU may."""

    def __init__(self) -> None:
        self._started: list[Callable[[], None]] = []

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = super().capture(run)
        return lambda: self._started.append(replay)

    def wait(self) -> None:
        assert len(self._started) <= 1, "a pass began before the one in flight had ended"
        while self._started:
            self._started.pop()()
