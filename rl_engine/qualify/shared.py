"""One proof for all workers of a run on a machine: the first makes it, the others wait and check that it is theirs.

What is shared are the cases, under a key of everything in a process that they depend on. A worker whose library,
sources, versions, thread counts or settings are others has another key and proves for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_engine.records.files import write_atomic
from rl_engine.records.private import open_own

# Environment variables by which a user steers the arithmetic of torch and its libraries.
STEERING = ("ATEN_", "CUBLAS", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_")

Cases = list[dict[str, Any]]


def shared(folder: Path, facts: Mapping[str, Any], make: Callable[[], Cases]) -> Cases:
    """The cases of ``make()``, called by one of all processes that ask in ``folder`` with the same facts.

    The others wait for it. A maker that dies leaves no record, and the next process is the maker; so it is where a
    record does not carry the facts and the digest that it should.

    Args:
        folder: private to the run.
        facts: what the proof is about (model, contract, operators); :func:`process_facts` are added.
    """
    asked = json.loads(json.dumps({**facts, **process_facts()}))
    path = folder / f"proof-{_digest(asked)[:32]}.json"
    with open(path.with_suffix(".lock"), "a", opener=open_own) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _read(path, asked)
        if found is None:
            found = make()
            body = {"facts": asked, "cases": found}
            write_atomic(path, json.dumps({**body, "digest": _digest(body)}).encode())
        return found


def process_facts() -> dict[str, Any]:
    """What can differ between two processes of one machine and change what a proof finds."""
    return {
        "python": sys.version,
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "subnormals": float(torch.tensor(1e-40) * 1.0) != 0.0,
        "precision": torch.get_float32_matmul_precision(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(STEERING)},
    }


def _read(path: Path, asked: dict[str, Any]) -> Cases | None:
    """The record's cases, None where it is no sound record of these facts."""
    try:
        record = json.loads(path.read_text())
        body = {"facts": record["facts"], "cases": record["cases"]}
        cases: Cases = record["cases"]
        return cases if record["digest"] == _digest(body) and record["facts"] == asked else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
