"""Readers: formats, alignment, bad input, size."""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest

from rl_engine.diagnose import cli
from rl_engine.diagnose.load import load
from rl_engine.diagnose.log import TokenLog
from rl_engine.records.errors import UserError
from tests.faults import make_log
from tests.faults.files import NAMES, RESPONSE_ONLY, rows, write_jsonl, write_parquet


@pytest.fixture(scope="module")
def log() -> TokenLog:
    return make_log(("temperature-twice",), 2, (0.2,))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", list(NAMES))
def test_every_format_gives_the_same_tokens(log: TokenLog, tmp_path: pathlib.Path, form: str, kind: str) -> None:
    path = tmp_path / f"log.{kind}"
    (write_jsonl if kind == "jsonl" else write_parquet)(log, path, form)
    read = load(path)
    for a, b in ((log.rollout, read.rollout), (log.train, read.train), (log.tokens, read.tokens)):
        assert np.array_equal(a[log.mask], b[read.mask])
    assert read.facts == log.facts
    assert read.samples.temperature is not None
    assert np.array_equal(read.samples.prompt_length, log.samples.prompt_length)
    # A response-only log keeps absolute positions through the prompt's length.
    assert (read.base_position > 0).all() == (form in RESPONSE_ONLY)
    assert np.array_equal(load(path, form).rollout, read.rollout)


def test_our_run_directory(tmp_path: pathlib.Path) -> None:
    from tests.helpers.synthetic_run import make_run

    run = make_run(tmp_path / "run")
    read = load(pathlib.Path(run if isinstance(run, str | pathlib.Path) else tmp_path / "run"))
    assert read.sample_count == 8 and read.mask.any()
    assert read.samples.step is not None and set(read.samples.step.tolist()) == {0, 1}
    assert np.array_equal(read.rollout.view(np.uint32)[read.mask], read.train.view(np.uint32)[read.mask])
    assert cli.main([str(tmp_path / "run"), "--json"]) == 0


def write(path: pathlib.Path, *lines: object) -> pathlib.Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


GOOD = {"tokens": [1, 2, 3, 4], "prompt_length": 2, "rollout_logprobs": [-1.0, -2.0], "train_logprobs": [-1.1, -2.0]}


def test_response_logprobs_are_placed_behind_the_prompt(tmp_path: pathlib.Path) -> None:
    read = load(write(tmp_path / "a.jsonl", GOOD))
    assert read.mask.tolist() == [False, False, True, True]
    assert read.rollout.tolist() == [0.0, 0.0, -1.0, -2.0]


def test_next_token_scores_are_one_short(tmp_path: pathlib.Path) -> None:
    row = {"tokens": [1, 2, 3], "mask": [0, 1, 1], "rollout_logprobs": [-1.0, -2.0], "train_logprobs": [-1.0, -2.0]}
    assert load(write(tmp_path / "a.jsonl", row)).rollout.tolist() == [0.0, -1.0, -2.0]


def test_null_and_nan_are_reported_not_hidden(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", {**GOOD, "rollout_logprobs": [None, -2.0], "train_logprobs": [float("nan"), -2]})
    assert cli.main([str(path), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["findings"][0]["cause"] == "non-finite"
    assert answer["metrics"]["compared"] == 1


def test_unknown_columns_are_named(tmp_path: pathlib.Path) -> None:
    read = load(write(tmp_path / "a.jsonl", {**GOOD, "colour": "blue"}))
    assert any("colour" in note for note in read.notes)


def test_a_column_that_some_rows_lack_is_not_used(tmp_path: pathlib.Path) -> None:
    read = load(write(tmp_path / "a.jsonl", {**GOOD, "temperature": 0.7}, GOOD))
    assert read.samples.temperature is None
    assert any("temperature is missing in 1 of 2" in note for note in read.notes)


def test_settings_win_over_the_file(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "a.jsonl", {**GOOD, "temperature": 0.7, "vocab_size": 10})
    read = load(path, settings={"temperature": "0.5", "vocab_size": "12"})
    assert read.samples.temperature is not None and read.samples.temperature.tolist() == [0.5]
    assert read.facts.vocab_size == 12


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty file"),
        ("\n\n\n\n\n", "empty file"),
        ("    \n   \n", "empty file"),
        ('{"log": {"vocab_size": 3}}', "no samples"),
        ("not json", "line 1"),
        ("[1, 2]", "element 0"),
        ('{"a": 1}', "the keys a"),
        (json.dumps({**GOOD, "train_logprobs": [-1.0, -2.0, -3.0]}), "3 train logprobs for 4 tokens"),
        (json.dumps({**GOOD, "rollout_logprobs": "high"}), "no flat list"),
        (json.dumps({**GOOD, "rollout_logprobs": [[-1.0], [-2.0]]}), "no flat list"),
        (json.dumps({**GOOD, "mask": [0, 0, 0, 0]}), "no token with mask 1"),
        (json.dumps({**GOOD, "temperature": "warm"}), "temperature"),
        (json.dumps({**GOOD, "vocab_size": -4}), "vocab_size"),
        (json.dumps(GOOD) + "\n" + json.dumps({"tokens": [1]}), "line 2"),
        (json.dumps({"log": {"dtype": "int3"}}) + "\n" + json.dumps(GOOD), "dtype"),
        ("[" * 100_000, "array"),
        ("PAR1 and no more", "Parquet"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    assert cli.main([str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1 and "expected" in said.err and "hint" in said.err
    assert words in said.err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["missing.jsonl"],
        ["--what"],
        ["x.jsonl", "--set", "temperature"],
        ["x.jsonl", "--set", "colour=blue"],
        ["x.jsonl", "--format", "unknown"],
        ["x.jsonl", "--clip", "0"],
        ["x.jsonl", "--clip", "much"],
    ],
)
def test_wrong_calls_exit_2(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.jsonl", GOOD)
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_mixed_formats_are_named_by_row(log: TokenLog, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(log, "verl")[0], rows(log, "trl")[0])
    with pytest.raises(UserError, match="line 2"):
        load(path)


def big_file(path: pathlib.Path, tokens: int) -> None:
    """A Parquet log of honest noise."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    each = 2000
    schema = pa.schema(
        [
            ("tokens", pa.list_(pa.int32())),
            ("rollout_logprobs", pa.list_(pa.float32())),
            ("train_logprobs", pa.list_(pa.float32())),
            ("engine", pa.int64()),
        ]
    )
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, tokens // each, 250):
            count = min(250, tokens // each - start)
            offsets = pa.array(np.arange(count + 1, dtype=np.int32) * each)
            rollout = -np.abs(rng.standard_normal(count * each, dtype=np.float32))
            train = np.minimum(rollout + 0.01 * rng.standard_normal(count * each, dtype=np.float32), 0)
            ids = rng.integers(0, 150_000, count * each, dtype=np.int32)
            columns = [pa.ListArray.from_arrays(offsets, pa.array(v)) for v in (ids, rollout, train)]
            writer.write_table(pa.table([*columns, pa.array(np.arange(count) % 8)], schema=schema))


MEASURED = """
import json, resource, sys
from rl_engine.diagnose import cli
code = cli.main([sys.argv[1], "--json"])
usage = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss: it survives exec, so it starts at the size of the process that forked this one.
status = open("/proc/self/status").read()
peak = int(status.split("VmHWM:")[1].split()[0])
print(json.dumps([code, usage.ru_utime + usage.ru_stime, peak]))
"""


def measured(path: pathlib.Path) -> dict[str, object]:
    """Diagnoses a log in a process of its own, within the guide's promise; the answer."""
    done = subprocess.run([sys.executable, "-c", MEASURED, str(path)], capture_output=True, text=True, check=True)
    answer, last = done.stdout.rstrip().rsplit("\n", 1)
    code, seconds, peak = json.loads(last)
    # Processor time, since a busy machine says nothing about the code.
    assert (code, seconds < 60, peak < 2 * 1024**2) == (0, True, True), last
    return json.loads(answer)


@pytest.mark.parametrize("tokens", [400_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_a_large_log_stays_small(tmp_path: pathlib.Path, tokens: int) -> None:
    big_file(tmp_path / "big.parquet", tokens)
    assert measured(tmp_path / "big.parquet")["metrics"]["compared"] == tokens


@pytest.mark.slow
def test_a_large_json_log_stays_small(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "big.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for _ in range(5000):
            rollout = -np.abs(rng.standard_normal(2000, dtype=np.float32))
            train = np.minimum(rollout + 0.01 * rng.standard_normal(2000, dtype=np.float32), 0)
            row = {"rollout_logprobs": rollout.tolist(), "train_logprobs": train.tolist()}
            out.write(json.dumps(row) + "\n")
    measured(path)


ODD = [None, 0, -1, 1e308, float("nan"), float("inf"), "x", [], [[]], {}, True, 2**40, 1e-300, "v3", [1, 2]]


def test_damaged_rows_never_end_in_a_traceback(
    log: TokenLog, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random damage gives an answer (valid JSON) or one line with exit 2, and no numerical warning."""
    rng = random.Random(3)
    base = json.dumps(rows(log)[:4])
    for _ in range(120):
        damaged = json.loads(base)
        for _ in range(rng.choice([1, 2, 4])):
            row = rng.choice(damaged)
            key = rng.choice([*row, "vocab_size", "train_tokens", "ref_logprobs", "length", "eos_token_id"])
            if isinstance(row.get(key), list) and row[key] and rng.random() < 0.5:
                row[key][rng.randrange(len(row[key]))] = rng.choice(ODD)
            else:
                row[key] = rng.choice(ODD)
        path = write(tmp_path / "odd.jsonl", *damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            code = cli.main([str(path), "--json"])
        said = capsys.readouterr()
        if code == 2:
            assert said.err.count("\n") == 1 and not said.out
        else:
            assert "findings" in json.loads(said.out)
