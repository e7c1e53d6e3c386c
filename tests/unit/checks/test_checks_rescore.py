"""--rescore compares what a child process computed, as bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rl_engine.checks import validate
from rl_engine.checks.validate import rescore_finding
from rl_engine.records.reader import RunReader
from tests.helpers.synthetic_run import make_run


def child(logprob: np.ndarray) -> object:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        assert command[1:4] == ["-P", "-m", "rl_engine.engines.train.rescore"]
        out = Path(command[command.index("--out") + 1])
        out.write_bytes(safetensors.numpy.save({"train_logprob": logprob}))
        return subprocess.CompletedProcess(command, 0, b"", b"")

    return run


def test_equal_bits_pass_and_certify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run-1")
    monkeypatch.setattr(subprocess, "run", child(RunReader(run).samples(0).train_logprob))
    assert validate.main(run, rescore=True) == 0
    record = RunReader(run).validations()[0]
    assert {finding.name: finding.status for finding in record.findings}["rescore"] == "PASS"
    assert any("fresh process" in line for line in record.certifies)


def test_one_bit_fails_and_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run-1")
    batch = RunReader(run).samples(1)
    changed = batch.train_logprob.copy()
    position = int(np.flatnonzero(batch.loss_mask)[-1])
    changed[position] = np.nextafter(changed[position], np.float32(0))
    monkeypatch.setattr(subprocess, "run", child(changed))
    finding = rescore_finding(run, 1)
    assert finding.status == "FAIL" and "1 of" in finding.found and "sample 3" in finding.found
    assert validate.main(run, rescore=1, seal=True) == 1


@pytest.mark.parametrize("logprob", [np.zeros(3, np.float32), np.zeros(25, np.float64)])
def test_other_shapes_and_types_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logprob: np.ndarray) -> None:
    monkeypatch.setattr(subprocess, "run", child(logprob))
    assert rescore_finding(make_run(tmp_path / "run-1"), 0).status == "FAIL"


def test_a_step_that_is_not_there_fails(tmp_path: Path) -> None:
    assert rescore_finding(make_run(tmp_path / "run-1"), 7).status == "FAIL"
