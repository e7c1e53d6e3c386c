"""A cause is named only where it is known, and ``--resume`` is offered only where it can help."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_engine.ops.sample import NonFiniteLogits
from rl_engine.orchestrators import causes, runs
from rl_engine.orchestrators.causes import RunFailed, of_death, of_error, of_exit
from rl_engine.orchestrators.failures import Failures
from rl_engine.records.codec import RecordError

ROOT = Path(__file__).resolve().parents[3]
GPU_LOST = [
    torch.AcceleratorError(
        "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported"
    ),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: the launch timed out and was terminated"),
    RuntimeError("CUDA driver error: device lost"),
    RuntimeError("unspecified launch failure"),
    RuntimeError("NVML: GPU is lost, it has fallen off the bus (Xid 79)"),
    RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasLtMatmul"),
]
OTHERS = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "the GPU's memory ran out"),
    (torch.AcceleratorError("CUDA error: out of memory"), "the GPU's memory ran out"),
    (MemoryError(), "memory ran out"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), "memory ran out"),
    (ValueError("a second decimal"), "ValueError: a second decimal"),
    (RuntimeError("an electric eccentric record"), "RuntimeError: an electric eccentric record"),
]


@pytest.mark.parametrize("error", GPU_LOST, ids=str)
def test_a_lost_gpu(error: Exception) -> None:
    failed = of_error(error)
    assert str(failed).startswith("the GPU was lost: ") and "\n" not in str(failed) and failed.resume


@pytest.mark.parametrize(("error", "words"), OTHERS, ids=str)
def test_other_errors_are_no_lost_gpu(error: Exception, words: str) -> None:
    assert str(of_error(error)).startswith(words)


class TaskError(Exception):
    """As Ray's: the worker's error is its cause."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"worker: {cause}")
        self.cause = cause


class DiedError(Exception):
    actor_id = "aa"


def guarded(error: Exception, said: str = "") -> Any:
    """A run whose workers fail with ``error``."""
    names = {"RayTaskError": TaskError, "RayError": (TaskError, DiedError)}
    ray = SimpleNamespace(exceptions=SimpleNamespace(**names))
    writer: Any = SimpleNamespace(
        log=lambda text: None, event=lambda *_, **__: None, attempts=1, log_path="run.log", current_state="failed"
    )
    member = SimpleNamespace(actor=SimpleNamespace(_actor_id=b"\xaa"), name="trainer train rank 0", engine="t", rank=0)
    head: Any = SimpleNamespace(last_words=lambda pid: said, ray=ray)
    failures = Failures(head, writer)
    failures.members, failures.pids = [member], {member.name: 7}

    def call() -> None:
        raise failures.explained(error) from error

    plan = SimpleNamespace(run_dir="/runs/r", pair_id=None, output_root="/runs")
    return SimpleNamespace(call=call, writer=writer, plan=plan, started=True, finished=False, steps=[])


def ended(local: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """(exit code, what is said) of a command whose run is ``local``."""
    said = io.StringIO()
    monkeypatch.setattr(runs, "_run_all", lambda *_: local.call())
    monkeypatch.setattr(runs, "print_runs", lambda *_: None)
    monkeypatch.setattr(runs, "hear", lambda: None)
    display: Any = SimpleNamespace(say=lambda text: said.write(text + "\n"))
    word: Any = SimpleNamespace(ended=lambda code: None)
    return runs._said([local], display, word, False, False), said.getvalue()


@pytest.mark.parametrize("error", GPU_LOST, ids=str)
def test_a_worker_whose_gpu_is_lost_ends_the_run_in_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = ended(guarded(TaskError(error)), monkeypatch)
    assert code == 3 and said.count("\n") == 1
    assert said.startswith("rlk-repro: run failed: the GPU was lost: ")
    assert said.endswith("go on with: rlk-repro run --resume /runs/r\n")


def test_a_worker_that_dies_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in CUDA's own threads ends the process before Python sees it."""
    words = "terminate called after throwing an instance of 'c10::AcceleratorError'\n what(): CUDA error: device lost"
    code, said = ended(guarded(DiedError("gone"), words), monkeypatch)
    assert code == 3 and "trainer train rank 0 (process 7) died: the GPU was lost; " in said


def test_numbers_that_are_not_finite_end_without_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = ended(guarded(TaskError(NonFiniteLogits("a logit is NaN"))), monkeypatch)
    assert code == 3 and said.endswith("--resume would end in the same way\n") and "go on with" not in said


@pytest.mark.parametrize("name", ["loss", "entropy_mean", "clip_fraction", "grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite(name: str, value: float) -> None:
    update: Any = SimpleNamespace(loss=0.1, entropy_mean=1.0, clip_fraction=0.0, grad_norm=0.5)
    causes.check_finite(0, update)
    setattr(update, name, value)
    with pytest.raises(RunFailed, match=f"step 1: the update's {name} is {value}") as raised:
        causes.check_finite(0, update)
    assert not raised.value.resume


def test_a_step_that_came_out_differently_is_not_resumed() -> None:
    assert not causes.of_record(RecordError("step 1 computed again with other samples", "the recorded bits")).resume
    assert causes.of_record(OSError(28, "No space left on device")).resume


def test_deaths() -> None:
    assert str(of_death("w", 7, "", 0)) == "w (process 7) died: killed from outside or by a crash"
    assert str(of_death("w", 7, "", 2)).endswith("died: the kernel's memory limit killed 2 processes meanwhile")
    assert str(of_death("w", 7, "terminate called: std::bad_alloc", 0)).endswith("died: memory ran out")


@pytest.mark.parametrize(
    ("status", "kills", "words"),
    [
        (9, 0, "its process was killed (signal 9)"),
        (9, 1, "its process was killed (signal 9): the kernel's memory limit killed 1 process meanwhile"),
        (11, 0, "its process crashed (signal 11, SIGSEGV)"),
        (128 + 6, 0, "its process crashed (signal 6, SIGABRT)"),
        (12, 0, "its process was ended by signal 12"),
        (1 << 8, 0, "its process ended without a word (exit code 1), as Ray ends it when its head dies"),
    ],
)
def test_ends_of_a_runs_own_process(status: int, kills: int, words: str) -> None:
    assert of_exit(status, kills) == words


def test_the_kernels_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = tmp_path / "memory.events"
    monkeypatch.setattr(causes, "_counters", lambda: [tmp_path / "none", events])
    assert causes.memory_kills() == 0
    events.write_text("low 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert causes.memory_kills() == 2
    monkeypatch.undo()
    assert causes.memory_kills() >= 0


KILLED = """
import os, sys, tempfile
from pathlib import Path
from types import SimpleNamespace
from rl_engine.orchestrators import runs

def work(found, display, word, rescore):
    word.folder(Path(tempfile.mkdtemp()))
    os.kill(os.getpid(), 9)

runs._run_all = work
runs._lost = lambda local, why, json_output: print("lost:", why, flush=True)
runs.LocalRun = lambda plan, display, earlier: SimpleNamespace(plan=plan, started=False, finished=False)
sys.exit(runs.run([None], json_output=False))
"""


def test_a_killed_run_is_not_blamed_on_ray() -> None:
    """It was, three times of three: Ray's head dies with the process that started it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", KILLED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert (done.returncode, done.stdout) == (3, "lost: its process was killed (signal 9)\n"), done


def test_resume_is_a_property_of_the_failure() -> None:
    assert RunFailed("x").resume and not RunFailed("x", resume=False).resume
