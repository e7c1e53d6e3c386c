"""Workers of a run compare once: who makes the proof, who waits, who must make one of its own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.models.config import ModelConfig
from rl_engine.numerics.contract import Contract
from rl_engine.ops import library, uniform
from rl_engine.ops.swiglu.reference import ReferenceSwiglu
from rl_engine.qualify import proof, shared

ROOT = Path(__file__).resolve().parents[3]
SMALL = ModelConfig("Qwen3ForCausalLM", 1, 96, 80, 4, 2, 32, 300, False, True, 1e-6, 1e4, None, 256)
SIDES = [uniform("torch")]
CONTRACT = Contract(gemm="chain256")

# What a maker does: says so, waits, and returns one case.
MAKER = """
import os, sys, time
from pathlib import Path
from rl_engine.qualify.shared import shared
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])

def make():
    with (folder / "makers").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(seconds)
    return [{"operator": "linear", "by": os.getpid()}]

print(shared(folder, {"model": 1}, make)[0]["by"])
"""


def maker(folder: Path, seconds: float, **env: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", MAKER, str(folder), str(seconds)]
    return subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": str(ROOT), **env}, stdout=subprocess.PIPE, text=True
    )


def makers(folder: Path) -> list[int]:
    path = folder / "makers"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def begun(folder: Path) -> int:
    end = time.monotonic() + 60
    while not makers(folder):
        assert time.monotonic() < end
        time.sleep(0.02)
    return makers(folder)[0]


def test_one_of_all_processes_makes_the_proof_and_the_others_wait_for_it(tmp_path: Path) -> None:
    processes = [maker(tmp_path, 1.0) for _ in range(3)]
    answers = {int(process.communicate(timeout=60)[0]) for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(makers(tmp_path)) == 1 and answers == set(makers(tmp_path))


def test_a_maker_that_is_killed_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    first = maker(tmp_path, 300.0)
    killed = begun(tmp_path)
    second = maker(tmp_path, 0.0)
    os.kill(killed, signal.SIGKILL)
    first.communicate(timeout=60)
    assert int(second.communicate(timeout=60)[0]) == makers(tmp_path)[1] != killed


def test_a_process_with_other_settings_proves_for_itself(tmp_path: Path) -> None:
    for env in ({}, {"OMP_NUM_THREADS": "1"}, {"MKL_CBWR": "COMPATIBLE"}, {"UNRELATED": "1"}):
        assert maker(tmp_path, 0.0, **{"OMP_NUM_THREADS": "2", **env}).communicate(timeout=60)[0]
    assert len(makers(tmp_path)) == 3


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every comparison that this process makes."""
    found: list[int] = []
    real = proof._Prover.cases

    def cases(self: Any) -> Any:
        found.append(1)
        return real(self)

    monkeypatch.setattr(proof._Prover, "cases", cases)
    return found


def prove(folder: Path | None, model: ModelConfig = SMALL) -> proof.Qualification:
    return proof.prove(model, SIDES, CONTRACT, rows=(1, 3), folder=folder)


def test_the_shared_proof_is_the_own_one(tmp_path: Path, compared: list[int]) -> None:
    own, first, second = prove(None), prove(tmp_path), prove(tmp_path)
    assert own.digest == first.digest == second.digest and own.cases == second.cases and not own.failed
    assert len(compared) == 2
    prove(tmp_path, ModelConfig("Qwen3ForCausalLM", 1, 64, 80, 4, 2, 32, 300, False, True, 1e-6, 1e4, None, 256))
    assert len(compared) == 3, "another model"


@pytest.mark.parametrize("fact", ["threads", "library", "sources", "subnormals"])
def test_whose_code_differs_compares_again(
    tmp_path: Path, compared: list[int], monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    prove(tmp_path)
    if fact == "library":
        monkeypatch.setattr(proof, "_library", lambda sides: "another file")
    elif fact == "sources":
        monkeypatch.setattr(proof, "_sources", lambda: "another file")
    else:
        real = shared.process_facts
        monkeypatch.setattr(shared, "process_facts", lambda: {**real(), fact: "other"})
    prove(tmp_path)
    assert len(compared) == 2


def test_a_spoilt_record_is_no_proof(tmp_path: Path, compared: list[int]) -> None:
    prove(tmp_path)
    (path,) = tmp_path.glob("proof-*.json")
    whole = path.read_text()
    altered = json.loads(whole)
    altered["cases"][0]["elements"] += 1
    for count, text in enumerate(("", whole[:-9], json.dumps(altered), "[]", '{"facts": 1, "cases": []}'), start=2):
        path.write_text(text)
        prove(tmp_path)
        assert len(compared) == count and path.read_text() == whole
    prove(tmp_path)
    assert len(compared) == 6


def test_a_failure_is_shared_too(tmp_path: Path, compared: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = ReferenceSwiglu.forward, []

    def wrong(self: ReferenceSwiglu, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        out = right(self, x)
        if len(calls) % 2:  # the provider comes first, then its judge, which is the same class here
            out.view(torch.int16)[0, 0] ^= 1
        return out

    monkeypatch.setattr(ReferenceSwiglu, "forward", wrong)
    assert {case.operator for case in prove(tmp_path).failed} == {"swiglu"}
    monkeypatch.undo()
    assert {case.operator for case in prove(tmp_path).failed} == {"swiglu"}


@pytest.mark.skipif(not library.available(), reason="no C compiler")
def test_a_library_that_was_replaced_after_loading_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "rlk.so", tmp_path / "other"
    for target in (file, other):
        shutil.copy(library.load()._name, target)
    loaded = ctypes.CDLL(str(file))
    expected = library.loaded_digest()
    monkeypatch.setattr(library, "load", lambda: loaded)
    assert library.loaded_digest() == expected
    other.replace(file)
    assert library.loaded_digest() == f"unknown, of process {os.getpid()}"
