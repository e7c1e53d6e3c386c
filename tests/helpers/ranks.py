"""Ranks of a test: each a process of its own. When one fails or time runs out, all are ended by their ids."""

from __future__ import annotations

import dataclasses
import datetime
import json
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from rl_engine.parallel import Mesh, join_mesh, single_mesh
from rl_engine.parallel.groups import CPU, make_mesh

# Children are forked from a small server that has imported torch once and computed nothing: cheap, and still fresh.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "rl_engine.engines.train.builtin", "rl_engine.engines.rollout.builtin.engine"]
)


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message has its traceback."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a rank's function gets: its number, how many there are, a folder that all share, and how to meet."""

    index: int
    size: int
    folder: Path

    def join(self, seconds: float = 300.0, *, device: torch.device = CPU, shared: bool = False) -> Mesh:
        """All ranks as one tensor-parallel group; exchanges wait at most ``seconds``."""
        store = f"file://{self.folder}/store"
        timeout = datetime.timedelta(seconds=seconds)
        return join_mesh(self.size, 1, self.index, store, timeout, device=device, shared=shared)

    def mesh(self, tp: int, cp: int, *, device: torch.device = CPU, shared: bool = False) -> Mesh | None:
        """A mesh of the first ``tp * cp`` joined ranks, None on the others; every joined rank must call it."""
        if tp * cp == 1:
            return single_mesh() if self.index == 0 else None
        return make_mesh(tp, cp, self.index, device=device, nccl=device.type == "cuda" and not shared)


def _main(function: Callable[..., Any], rank: Rank, arguments: tuple[Any, ...]) -> None:
    code = 0
    try:
        from tests.helpers.models import set_threads

        if torch.cuda.is_available():
            torch.set_num_threads(1)  # a GPU's ranks run no kernel of the CPU's
        else:
            set_threads(1)
        result = function(rank, *arguments)
        _publish(rank.folder / f"rank{rank.index}.json", json.dumps({"cpu": time.process_time(), "result": result}))
    except BaseException:
        code = 1
        _publish(rank.folder / f"rank{rank.index}.error", traceback.format_exc())
    os._exit(code)  # a clean exit would wait for peers that may be gone


def _publish(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    partial.rename(path)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit code (negative: the signal), its result or its traceback."""

    index: int
    pid: int
    code: int | None
    result: Any
    error: str


class Ranks:
    """``function(rank, *arguments)`` in ``size`` processes; a result is whatever JSON holds. Leaving the ``with`` block
    ends what still runs."""

    def __init__(self, function: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.processes = [
            _CONTEXT.Process(target=_main, args=(function, Rank(index, size, folder), arguments), daemon=True)
            for index in range(size)
        ]

    def __enter__(self) -> Ranks:
        for process in self.processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def end(self) -> None:
        """Kills what still runs and collects every process."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()

    def wait(self, seconds: float, *, together: bool = False) -> list[Ended]:
        """How every rank ended; those that run after ``seconds`` have code None. ``together``: returns at the first
        failure."""
        deadline = time.monotonic() + seconds
        while (alive := [p for p in self.processes if p.is_alive()]) and time.monotonic() < deadline:
            if together and any(p.exitcode for p in self.processes):
                time.sleep(0.5)  # the others' own reports, if they fail of themselves
                break
            multiprocessing.connection.wait([p.sentinel for p in alive], timeout=0.5)
        return [self._ended(index) for index in range(len(self.processes))]

    def _ended(self, index: int) -> Ended:
        process, result, error = self.processes[index], None, ""
        path, failure = self.folder / f"rank{index}.json", self.folder / f"rank{index}.error"
        if path.is_file():
            result = json.loads(path.read_text())["result"]
        if failure.is_file():
            error = failure.read_text()
        return Ended(index, process.pid or 0, process.exitcode, result, error)


def run_ranks(
    function: Callable[..., Any], size: int, folder: Path, *arguments: Any, seconds: float = 900.0
) -> list[Ended]:
    """Every rank's result, in order, of different processes.

    Raises:
        RankFailed: the first failure; all other ranks have been ended.
    """
    with Ranks(function, size, folder, *arguments) as ranks:
        ended = ranks.wait(seconds, together=True)
    failed = [rank for rank in ended if rank.code]
    if failed:
        reports = "\n".join(f"rank {r.index} (exit code {r.code}):\n{r.error}" for r in failed)
        raise RankFailed(f"{len(failed)} of {size} ranks failed\n{reports}")
    late = [rank.index for rank in ended if rank.code is None]
    if late:
        raise RankFailed(f"ranks {late} of {size} did not end within {seconds} s")
    assert len({rank.pid for rank in ended} | {os.getpid()}) == size + 1, "ranks share a process"
    return ended
