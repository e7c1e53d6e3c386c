"""Writing and reading of run directories."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rl_engine.records import paths
from rl_engine.records.codec import RecordError, canonical_digest, decode, encode, parse_json
from rl_engine.records.errors import UserError
from rl_engine.records.pair import pair_record, read_pair, write_pair
from rl_engine.records.reader import RunReader
from rl_engine.records.statistics import logprob_statistics
from rl_engine.records.types import RouteRecord, StepRecord
from rl_engine.records.writer import RunWriter
from tests.helpers.numeric import assert_bitwise
from tests.helpers.synthetic_run import make_batch, make_plan, make_run, make_step


def test_everything_comes_back(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1")
    reader = RunReader(run)
    assert [state.name for state in reader.states()] == ["planned", "running", "finished"]
    assert reader.plan().plan == encode(make_plan(run))
    assert [step.step for step in reader.steps()] == reader.sample_steps() == [0, 1]
    assert list(reader.weights()) == [0, 1, 2]
    assert {(route.engine, route.rank) for route in reader.routes()} == {("trainer", 0), ("engine0", 0)}
    assert len(reader.environments()) == 6
    for step in (0, 1):
        expected, actual = make_batch(step), reader.samples(step)
        for field in ("tokens", "offsets", "loss_mask", "rollout_logprob", "train_logprob"):
            assert_bitwise(getattr(actual, field), getattr(expected, field), field)
        assert expected.retained is not None and actual.retained is not None
        assert_bitwise(actual.retained.offsets, expected.retained.offsets, "retained offsets")
        assert_bitwise(actual.retained.ids, expected.retained.ids, "retained ids")
        assert actual.samples == expected.samples
        assert reader.steps()[step] == make_step(step, expected)


def test_retained_sets_use_the_smaller_form(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1")
    arrays = safetensors.numpy.load((run / "samples/step-00000.safetensors").read_bytes())
    assert {1, 2} <= set(arrays["retained_kind"].tolist())
    widths = np.diff(arrays["retained_offsets"])
    assert widths.max() <= (100 + 7) // 8


def test_create_is_exclusive(tmp_path: Path) -> None:
    make_run(tmp_path / "run-1")
    body = encode(make_plan(tmp_path / "run-1"))
    with pytest.raises(UserError, match="already there"):
        RunWriter.create(tmp_path / "run-1", body, canonical_digest(body))


@pytest.mark.parametrize("name", ["..", ".hidden", "a b", "a\nb", "x" * 200, "-flag"])
def test_run_id_is_one_plain_component(tmp_path: Path, name: str) -> None:
    body = encode(make_plan(tmp_path / "x"))
    with pytest.raises(UserError):
        RunWriter.create(tmp_path / "deep" / name, body, canonical_digest(body))


def test_wrong_plan_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="digest"):
        RunWriter.create(tmp_path / "run", {"mode": "native"}, "0" * 64)


def test_state_machine(tmp_path: Path) -> None:
    body = {"mode": "native"}
    writer = RunWriter.create(tmp_path / "run", body, canonical_digest(body))
    with pytest.raises(ValueError, match="cannot become"):
        writer.state("finished")
    writer.state("running")
    writer.state("interrupted", "SIGTERM")
    again = RunWriter.open(tmp_path / "run")
    assert again.current_state == "interrupted"
    again.state("running")
    again.state("finished")
    with pytest.raises(ValueError, match="cannot become"):
        again.state("sealed")
    assert RunReader(tmp_path / "run").states()[2].reason == "SIGTERM"


def test_steps_come_in_order_after_their_samples(tmp_path: Path) -> None:
    body = {"mode": "native"}
    writer = RunWriter.create(tmp_path / "run", body, canonical_digest(body))
    batch = make_batch(0)
    with pytest.raises(ValueError, match="no samples"):
        writer.step(make_step(0, batch))
    with pytest.raises(ValueError, match="is next"):
        writer.samples(1, batch)
    writer.samples(0, batch)
    writer.samples(0, batch)
    writer.step(make_step(0, batch))
    with pytest.raises(ValueError, match="is next"):
        writer.samples(0, batch)


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_only_a_repair_removes_a_torn_line(tmp_path: Path, cut: int) -> None:
    run = make_run(tmp_path / "run")
    path = run / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    before = path.read_bytes()
    assert [step.step for step in RunReader(run).steps()] == [0]
    assert list(RunReader(run).torn()) == ["steps.jsonl"]
    with pytest.raises(UserError, match=r"steps\.jsonl: [0-9]+ bytes after its last whole line"):
        RunWriter.open(run)
    assert path.read_bytes() == before
    writer = RunWriter.open(run, repair=True)
    assert writer.next_step == 1 and RunReader(run).torn() == {}
    assert RunReader(run).events()[-1].kind == "torn_line_removed"


def test_a_repair_removes_a_torn_line_of_a_log_of_passes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path, name = run / "passes/engine0.jsonl", (0, "engine0")
    whole = list(RunReader(run).passes()[name])
    path.write_bytes(path.read_bytes()[:-10])
    assert list(RunReader(run).passes()[name]) == whole[:-1]
    assert list(RunReader(run).torn()) == ["passes/engine0.jsonl"]
    RunWriter.open(run, repair=True)
    assert list(RunReader(run).passes()[name]) == whole[:-1] and RunReader(run).torn() == {}
    assert RunReader(run).events()[-1].fields["file"] == "passes/engine0.jsonl"


def test_passes_are_read_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    path = run / "passes/engine0.jsonl"
    monkeypatch.setattr(paths, "LINE_LIMIT", 100)
    with pytest.raises(RecordError, match="a line above 100 bytes"):
        next(RunReader(run).passes()[0, "engine0"])
    monkeypatch.setattr(paths, "TENSOR_LIMIT", path.stat().st_size - 1)
    with pytest.raises(RecordError, match="expected at most"):
        next(RunReader(run).passes()[0, "engine0"])
    path.rename(run / "elsewhere")
    path.symlink_to(run / "elsewhere")
    with pytest.raises(RecordError, match=r"passes/engine0\.jsonl"):
        next(RunReader(run).passes()[0, "engine0"])


def test_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"mode": "native"}
    writer = RunWriter.create(tmp_path / "run", body, canonical_digest(body))
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) <= 8:
            raise OSError(28, "No space left on device")
        return real(descriptor, bytes(data)[:8])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        writer.event("warning", text="some text")
    with pytest.raises(OSError, match="No space"):
        writer.samples(0, make_batch(0))
    monkeypatch.undo()
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before
    assert os.listdir(tmp_path / "run" / "samples") == []


def test_resumed_weights_must_repeat(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = RunWriter.open(run)
    same = RunReader(run).weights()[1]
    assert writer.weights(1, same.tensors) == same.digest
    with pytest.raises(RecordError, match="recorded earlier"):
        writer.weights(1, {"layer.weight": "0" * 64})


def test_each_attempt_has_its_own_route_file_which_grows(tmp_path: Path) -> None:
    body = {"mode": "native"}
    writer = RunWriter.create(tmp_path / "run", body, canonical_digest(body))
    for attempt in range(2):
        writer.state("running")
        for calls in (1, 2):
            writer.routes("trainer", 0, [RouteRecord("train", "linear", "cpu", "bf16", "eager", calls, {"T": calls})])
        writer.state("interrupted")
        found = RunReader(tmp_path / "run").attempt_routes()
        assert [(number, file.routes[0].calls) for number, file in found] == [(n, 2) for n in range(attempt + 1)][::-1]
        writer = RunWriter.take_over(tmp_path / "run")
    begun = [event.fields for event in RunReader(tmp_path / "run").events() if event.kind == "attempt"]
    assert [(fields["number"], fields["next_step"], fields["pid"]) for fields in begun] == [
        (0, 0, os.getpid()),
        (1, 0, os.getpid()),
    ]


def test_a_run_that_a_kill_left_is_taken_over(tmp_path: Path) -> None:
    body = {"mode": "native"}
    writer = RunWriter.create(tmp_path / "run", body, canonical_digest(body))
    writer.state("running")
    writer.close()  # as the end of its process does
    for name in (".steps.jsonl.partial", "samples/.step-00000.jsonl.partial", "weights/.0.json.partial"):
        (tmp_path / "run" / name).write_text("half")
    (tmp_path / "run" / "notes.partial").write_text("somebody's")
    again = RunWriter.take_over(tmp_path / "run")
    assert (again.current_state, again.attempts, again.next_step) == ("interrupted", 1, 0)
    assert "without a word" in str(RunReader(tmp_path / "run").states()[-1].reason)
    assert [path.name for path in (tmp_path / "run").rglob("*.partial")] == ["notes.partial"]
    with pytest.raises(UserError, match="another process"):
        RunWriter.take_over(tmp_path / "run")
    finished = make_run(tmp_path / "finished")
    with pytest.raises(UserError, match="finished"):
        RunWriter.take_over(finished)
    RunWriter.open(finished).close()  # the refusal gave the lock back


def test_a_step_computed_again_must_be_the_recorded_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer, batch = RunWriter.open(run), make_batch(1)
    seconds = dataclasses.replace(make_step(1, batch).seconds, rollout=99.0)
    writer.confirm(dataclasses.replace(make_step(1, batch), seconds=seconds, train_tokens_per_s=1.0), batch)
    with pytest.raises(RecordError, match="other loss"):
        writer.confirm(dataclasses.replace(make_step(1, batch), loss=0.1000001), batch)
    train = batch.train_logprob.copy()
    place = int(np.flatnonzero(batch.loss_mask)[2])
    train[place] = np.nextafter(train[place], np.float32(0))
    with pytest.raises(RecordError, match="other samples"):
        writer.confirm(make_step(1, batch), dataclasses.replace(batch, train_logprob=train))


def test_a_folder_that_was_never_finished_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """plan.json comes last: whoever finds it finds every other file of a new run."""
    body = {"mode": "native"}
    monkeypatch.setattr(
        "rl_engine.records.writer.write_exclusive", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(OSError, match="full"):
        RunWriter.create(tmp_path / "run", body, canonical_digest(body))
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"state.jsonl", "events.jsonl", "steps.jsonl"}
    with pytest.raises(UserError, match="no plan"):
        RunReader(tmp_path / "run")


def test_sealed_run_is_read_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = RunWriter.open(run)
    (run / "COMPLETE").write_text("{}")
    batch = make_batch(0)
    for act in (
        lambda: writer.event("x"),
        lambda: writer.state("valid"),
        lambda: writer.log("x"),
        lambda: writer.samples(2, batch),
        lambda: writer.weights(9, {}),
        lambda: writer.routes("e", 0, []),
        lambda: RunWriter.open(run),
    ):
        with pytest.raises(UserError, match="sealed"):
            act()


def test_step_keys_are_the_documented_ones(tmp_path: Path) -> None:
    line = json.loads((make_run(tmp_path / "run") / "steps.jsonl").read_text().splitlines()[0])
    expected = (
        "step weight_version samples tokens_compared mismatches max_abs_dlogp mean_abs_dlogp kl_k1 kl_k3 reward_mean",
        "response_len_mean truncated entropy_mean loss clip_fraction grad_norm grad_norm_hex seconds",
        "train_tokens_per_s rollout_tokens_per_gpu_s score_calls score_tokens ratio_mismatches",
    )
    assert sorted(line) == sorted(" ".join(expected).split())
    assert set(line["seconds"]) == {"rollout", "reward", "old_logp", "train", "optimizer", "weight_sync", "other"}
    assert float.fromhex(line["grad_norm_hex"]) == line["grad_norm"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"step": 1, "step": 2}', "twice"),
        ('{"a": NaN}', "not JSON"),
        ("[" * 100_000, "one JSON value"),
        ("{", "one JSON value"),
        ("1" * 5000, "one JSON value"),
    ],
)
def test_bad_json_is_a_record_error(text: str, match: str) -> None:
    with pytest.raises(RecordError, match=match):
        parse_json(text, "here")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"extra": 1}, "unknown key 'extra'"),
        ({"loss": "low"}, "loss"),
        ({"samples": True}, "samples"),
        ({"samples": 1.0}, "samples"),
        ({"seconds": []}, "seconds"),
    ],
)
def test_decode_is_strict(change: dict[str, object], match: str) -> None:
    good = encode(make_step(0, make_batch(0)))
    assert decode(StepRecord, good, "x") == make_step(0, make_batch(0))
    with pytest.raises(RecordError, match=match):
        decode(StepRecord, {**good, **change}, "x")
    good.pop("loss")
    with pytest.raises(RecordError, match="no key 'loss'"):
        decode(StepRecord, good, "x")


def test_non_finite_floats_round_trip() -> None:
    record = dataclasses.replace(make_step(0, make_batch(0)), loss=math.inf, kl_k1=-math.inf, kl_k3=math.nan)
    text = json.dumps(encode(record), allow_nan=False)
    back = decode(StepRecord, parse_json(text, "x"), "x")
    assert back.loss == math.inf and back.kl_k1 == -math.inf and math.isnan(back.kl_k3)


def test_statistics_count_bits() -> None:
    batch = make_batch(0)
    assert logprob_statistics(batch).mismatches == 0
    assert logprob_statistics(batch).tokens_compared == 13
    train = batch.train_logprob.copy()
    where = np.flatnonzero(batch.loss_mask)[:2]
    train[where[0]] = np.nextafter(train[where[0]], np.float32(0))
    train[where[1]] -= np.float32(0.25)
    result = logprob_statistics(dataclasses.replace(batch, train_logprob=train))
    difference = train.astype(np.float64) - batch.rollout_logprob.astype(np.float64)
    difference = difference[batch.loss_mask == 1]
    assert result.mismatches == 2
    assert result.max_abs_dlogp == np.abs(difference).max()
    assert result.mean_abs_dlogp == pytest.approx(np.abs(difference).mean(), rel=1e-14)
    assert result.kl_k1 == pytest.approx(-difference.mean(), rel=1e-14)
    assert result.kl_k3 == pytest.approx((np.exp(difference) - 1 - difference).mean(), rel=1e-9)


def test_signed_zero_is_a_mismatch_of_size_zero() -> None:
    batch = make_batch(0)
    where = np.flatnonzero(batch.loss_mask)[0]
    rollout, train = batch.rollout_logprob.copy(), batch.train_logprob.copy()
    rollout[where], train[where] = 0.0, -0.0
    result = logprob_statistics(dataclasses.replace(batch, rollout_logprob=rollout, train_logprob=train))
    assert (result.mismatches, result.max_abs_dlogp) == (1, 0.0)


def test_pair_is_computed_from_files(tmp_path: Path) -> None:
    native, consistency = make_run(tmp_path / "p-native", "native"), make_run(tmp_path / "p-consistency")
    record = pair_record("p", native, consistency)
    assert record.exact and record.control and record.same_start
    assert (record.native.tokens_compared, record.native.mismatches) == (26, 26)
    assert (record.consistency.tokens_compared, record.consistency.mismatches) == (26, 0)
    path = write_pair(tmp_path, record)
    assert path.name == "p-pair.json" and read_pair(path) == record
    with pytest.raises(RecordError, match="mode"):
        pair_record("p", consistency, native)


def test_a_mistake_never_steers_the_terminal() -> None:
    text = str(UserError("a\x1b[2Jb\nc", "\u202e" + "x" * 9000, "ü 文"))
    assert text.isprintable() and "a\\x1b[2Jb c" in text and "ü 文" in text and len(text) < 3000


def test_messages_stay_short_and_printable(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = (run / "weights/0.json").read_text()
    (run / "weights/0.json").write_text(text.replace('"version": 0', f'"version": {10**4000}'))
    with pytest.raises(RecordError) as caught:
        RunReader(run).weights()
    assert len(str(caught.value)) < 1000
    (run / "weights/0.json").write_text(text.replace('"version"', '"ver\\u001b[2Jsion"'))
    with pytest.raises(RecordError) as caught:
        RunReader(run).weights()
    assert str(caught.value).isprintable()
