"""The first divergence as the records show it; the computing part is tested on real runs (tests/e2e)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rl_engine.diagnose import locate, locate_cli
from rl_engine.records.reader import RunReader
from tests.helpers.synthetic_run import make_run


def test_first_token_of_a_run(tmp_path: Path) -> None:
    reader = RunReader(make_run(tmp_path / "n", "native"))
    found = locate.first_mismatch(reader)
    batch = reader.samples(0)
    assert found is not None and (found.step, found.sample, found.response) == (0, 0, 0)
    assert found.position == 4 and found.token == int(batch.tokens[4])  # after a prompt of 4 tokens
    assert int(found.a, 16) == int(batch.rollout_logprob[4].view(np.uint32))
    assert (found.differing, found.compared) == (13, 13)
    assert locate.first_mismatch(RunReader(make_run(tmp_path / "c"))) is None


def test_records_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native, equal = make_run(tmp_path / "n", "native"), make_run(tmp_path / "c")
    assert locate_cli.main([str(native), "--records-only", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["token"]["position"] == 4 and body["operator"] is None and body["repeats_recorded_bits"] is None
    assert locate_cli.main([str(equal)]) == 0
    assert "no divergence" in capsys.readouterr().out
    assert locate_cli.main([str(equal), str(native), "--records-only"]) == 1
    assert "A train" in capsys.readouterr().out  # equal tokens and rollout logprobs, other train logprobs


@pytest.mark.parametrize(
    "line", [[], ["no-such-run"], ["a", "b", "c"], ["a", "--json", "--what"]], ids=lambda line: " ".join(line) or "none"
)
def test_mistakes_are_one_line(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert locate_cli.main(line) == 2
    err = capsys.readouterr().err
    assert err.startswith("rlk-repro: found ") and err.count("\n") == 1


def test_a_run_without_its_checkpoint_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert locate_cli.main([str(make_run(tmp_path / "n", "native"))]) == 2
    err = capsys.readouterr().err
    assert "cannot be computed again" in err and "--records-only" in err and err.count("\n") == 1
