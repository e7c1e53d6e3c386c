"""Parts of a proof in processes of their own, so that they compile side by side; what breaks one off is a failed case.

``PARTS`` of a module names its functions (config, inputs) -> Iterator[Case].
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor

from rl_engine.models.config import ModelConfig
from rl_engine.qualify.cases import Case
from rl_engine.qualify.gpu.data import Inputs

PROCESSES = 14  # each starts an interpreter and opens the device, some seconds of a core
Part = tuple[str, str]  # module, function


Found = tuple[list[Case], float]  # cases of a part, its seconds


def submit(pool: ProcessPoolExecutor, config: ModelConfig, provers: Sequence[str]) -> dict[Part, Future[Found]]:
    """Starts every part of the provers."""
    parts = [(module, name) for module in provers for name in importlib.import_module(module).PARTS]
    return {part: pool.submit(prove_part, part, config) for part in parts}


def prove_part(part: Part, config: ModelConfig) -> Found:
    """The cases of one part; whatever keeps it from its end is one more, which fails and says why."""
    found: list[Case] = []
    started = time.perf_counter()
    try:
        for case in getattr(importlib.import_module(part[0]), part[1])(config, Inputs()):
            found.append(case)
    except Exception as error:
        found.append(_broken(part, error))
    return found, time.perf_counter() - started


def collect(parts: dict[Part, Future[Found]], say: Callable[[str], None] = lambda line: None) -> list[Case]:
    """All cases, in the order of the parts; a part whose process died is a case that fails."""
    found: list[Case] = []
    for part, future in parts.items():
        try:
            cases, seconds = future.result()
        except concurrent.futures.BrokenExecutor as error:
            cases, seconds = [_broken(part, error)], 0.0
        failed = sum(not case.holds for case in cases)
        say(f"{_name_of(part)}: {len(cases)} cases, {failed} failed, {seconds:.0f} s")
        found += cases
    return found


def operators(
    config: ModelConfig, provers: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> list[Case]:
    """The cases of some provers alone."""
    with pool() as processes:
        return collect(submit(processes, config, provers), say)


def _name_of(part: Part) -> str:
    return f"{part[0].rpartition('.')[2].removeprefix('gpu_')} {part[1]}"


def _broken(part: Part, error: Exception) -> Case:
    reason = " ".join(str(error).split())[:160]
    return Case("proof", "every", f"{_name_of(part)} broke off, {type(error).__name__}: {reason}", 1, 1)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next task for ever, and hold the device's memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def pool() -> Iterator[ProcessPoolExecutor]:
    """Fresh interpreters, since a forked one cannot use the device; who is interrupted does not wait for them."""
    count = min(PROCESSES, os.cpu_count() or 1)
    processes = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    try:
        yield processes
    except BaseException:
        processes.shutdown(wait=False, cancel_futures=True)
        raise
    processes.shutdown()
