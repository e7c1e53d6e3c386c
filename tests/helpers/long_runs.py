"""What long runs on a GPU share: a model of Qwen3-8B's width made where it lies, a time limit, a result file."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import platform
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.model import QWEN3_8B
from rl_engine.models.config import ModelConfig, parse_config
from rl_engine.models.weights import ModelWeights

DEVICE = torch.device("cuda", 0)
SPREAD = 0.02  # of matrices


def qwen3_8b(layers: int, vocabulary: int | None = None) -> ModelConfig:
    """Qwen3-8B's shape with another number of layers, and of columns of the head where one is given."""
    config = dataclasses.replace(parse_config(QWEN3_8B), layers=layers)
    return config if vocabulary is None else dataclasses.replace(config, vocabulary=vocabulary)


def normal_weights(config: ModelConfig, seed: int, device: torch.device) -> ModelWeights:
    """Matrices N(0, 0.02), gains 1 + N(0, 0.1), bf16, drawn on ``device`` from the seed and each tensor's name. None is
    -0: an update with a learning rate of 0 may make that +0."""
    shapes = config.tensor_shapes()

    def read(name: str, first: int, last: int) -> Tensor:
        random = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = torch.randn(shapes[name], generator=random, device=device, dtype=torch.bfloat16)
        return (1 + 0.1 * values if len(shapes[name]) == 1 else SPREAD * values)[first:last] + 0.0

    return ModelWeights(config, read, device=device)


class Limit:
    """Seconds since it was made, and how many of ``seconds`` are left."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds, self.started = seconds, time.perf_counter()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.started

    @property
    def left(self) -> float:
        return float("inf") if self.seconds is None else self.seconds - self.spent

    def tell(self, text: str) -> None:
        """A line of progress, out at once."""
        print(f"{self.spent:8.1f} s  {text}", flush=True)


@contextlib.contextmanager
def as_in_production() -> Iterator[None]:
    """Fresh memory is not filled: a kernel that fills it between two others keeps the second from starting early."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before


def free() -> None:
    """Gives back what engines held that nobody knows any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Record:
    """A result file, written whole after every part, so that a process that is ended leaves what it had."""

    def __init__(self, path: Path | None, **about: Any) -> None:
        self.path = path
        self.body: dict[str, Any] = {**about, **_machine(), "parts": [], "failed": None, "finished": False}
        self.write()

    def add(self, part: object) -> None:
        """A frozen dataclass of plain values."""
        self.body["parts"].append(dataclasses.asdict(part))  # type: ignore[call-overload]
        self.write()

    @contextlib.contextmanager
    def of_this_run(self) -> Iterator[None]:
        """Notes an exception before it goes on, or that the run came to its end."""
        try:
            yield
        except BaseException as error:
            self.body["failed"] = f"{type(error).__name__}: {error}"
            raise
        else:
            self.body["finished"] = True
        finally:
            self.write()

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(self.path.name + ".tmp")
        fresh.write_text(json.dumps(self.body, indent=1) + "\n")
        fresh.replace(self.path)


def _machine() -> dict[str, Any]:
    device = torch.cuda.get_device_name(DEVICE) if torch.cuda.is_available() else "CPU"
    return {"device": device, "torch": torch.__version__, "python": platform.python_version()}
