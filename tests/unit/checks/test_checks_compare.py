"""compare A B: equal and different, first place, both values in hex."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from rl_engine.checks.compare import compare_runs, main
from rl_engine.records.samples import encode_samples
from rl_engine.records.types import SampleBatch
from tests.helpers.synthetic_run import make_batch, make_run


def rewrite(run: Path, batch: SampleBatch) -> None:
    tensors, lines = encode_samples(1, batch)
    (run / "samples/step-00001.safetensors").write_bytes(tensors)
    (run / "samples/step-00001.jsonl").write_bytes(lines)


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    result = compare_runs(a, b)
    assert result.results == () and result.setting == ()
    assert main(a, b) == 0
    assert "results: equal" in capsys.readouterr().out


def test_modes_differ_in_plan_and_logprobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "native")
    result = compare_runs(a, b)
    assert {"plan.mode", "plan.providers.train.linear"} <= {difference.quantity for difference in result.setting}
    (difference,) = result.results
    batch_a, batch_b = make_batch(0), make_batch(0, "native")
    first = int(np.flatnonzero(batch_a.loss_mask)[0])
    assert difference.quantity == "train_logprob"
    assert difference.where == f"step 0 sample 0 (prompt 0, sample 0) token {first}"
    assert difference.a == f"0x{batch_a.train_logprob.view(np.uint32)[first]:08x}"
    assert difference.b == f"0x{batch_b.train_logprob.view(np.uint32)[first]:08x}"
    assert main(a, b, json_output=True) == 1
    assert json.loads(capsys.readouterr().out)["results"]


def test_first_token(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    batch = make_batch(1)
    tokens = batch.tokens.copy()
    tokens[9] = 77 if tokens[9] != 77 else 78
    rewrite(b, dataclasses.replace(batch, tokens=tokens))
    (difference,) = compare_runs(a, b).results
    assert difference.quantity == "tokens" and difference.count == 1
    assert difference.where.startswith("step 1 sample 1 ") and difference.where.endswith("token 2")
    assert difference.b == str(tokens[9])


def test_other_lengths_give_the_first_token(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    batch = make_batch(1)
    keep = np.ones(batch.tokens.size, dtype=bool)
    keep[-1] = False
    fields = {name: getattr(batch, name)[keep] for name in ("tokens", "loss_mask", "rollout_logprob", "train_logprob")}
    offsets = batch.offsets.copy()
    offsets[-1] -= 1
    rewrite(b, dataclasses.replace(batch, **fields, offsets=offsets, retained=None))
    result = compare_runs(a, b)
    # What cannot be lined up is not said to be equal.
    assert "samples of 2 steps: identities, rewards" in result.equal
    difference = result.results[0]
    assert (difference.quantity, difference.b) == ("tokens", "the end")
    assert difference.where == "step 1 sample 3 (prompt 3, sample 1) token 5"


def test_retained_sets_identities_and_weights(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    batch = make_batch(1)
    assert batch.retained is not None
    rewrite(b, dataclasses.replace(batch, retained=None))
    assert {d.quantity for d in compare_runs(a, b).results} == {"retained sets"}
    first = dataclasses.replace(batch.samples[0], seed=5)
    rewrite(b, dataclasses.replace(batch, samples=(first, *batch.samples[1:])))
    assert {d.quantity for d in compare_runs(a, b).results} == {"identities"}
    rewrite(b, batch)
    (b / "weights/2.json").write_bytes((a / "weights/1.json").read_bytes().replace(b'"version": 1', b'"version": 2'))
    (difference,) = compare_runs(a, b).results
    assert difference.quantity == "weights" and difference.where == "version 2 tensor layer.weight"
