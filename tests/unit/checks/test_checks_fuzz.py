"""Damaged and hostile run directories and plan files: a finding or one line, never a traceback, never a write.

Examples are derandomised, so a failure repeats. For a longer search ``RLK_FUZZ_EXAMPLES`` raises their number and
``RLK_FUZZ_SEED`` draws others.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from rl_engine.checks import compare, validate
from rl_engine.checks.seal import verify_seal
from rl_engine.records.codec import canonical_digest
from rl_engine.records.errors import UserError
from rl_engine.records.pair import pair_record
from rl_engine.records.reader import RunReader
from tests.helpers.synthetic_run import make_run

EXAMPLES = int(os.environ.get("RLK_FUZZ_EXAMPLES", "100"))
SEED = os.environ.get("RLK_FUZZ_SEED")
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=30_000,
    derandomize=SEED is None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
MEMORY_LIMIT_KB = 400_000

HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**300,
    1e308,
    -1e308,
    "nan",
    "inf",
    "",
    "\x00",
    "../../x",
    [],
    {},
]
HOSTILE += ["A" * 5000, [[[[]]]], {"step": 0}, "\ud800", "step-00000", 10**4000, "\x1b[2J\n\u202e"]


def seeded(test: Any) -> Any:
    return test if SEED is None else seed(int(SEED))(test)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    run = make_run(tmp_path_factory.mktemp("fuzz") / "run-1")
    assert silent(run) == 0
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@contextlib.contextmanager
def written(files: dict[str, bytes]) -> Any:
    """The files as a run directory; afterwards nothing may have changed but what validation appends."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run-1"
        for name, data in files.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_bytes(data)
        yield run
        for name, data in files.items():
            now = (run / name).read_bytes()
            if name.endswith("jsonl") and "/" not in name:
                assert now.startswith(data[: data.rfind(b"\n") + 1]), name
            else:
                assert now == data, name
        assert sorted(os.listdir(folder)) == ["run-1"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_LIMIT_KB


def silent(run: Path) -> int:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = validate.main(run)
    lines = out.getvalue().splitlines()
    assert all(line.isprintable() and len(line) < 4000 for line in lines), "a stranger's text must not steer or fill"
    return code


def exercise(run: Path, other: Path | None = None) -> None:
    """Everything that opens a stranger's directory. Only the user-error family may come out."""
    for act in (
        lambda: compare.compare_runs(run, other or run),
        lambda: pair_record("p", run, run),
        lambda: verify_seal(run),
        lambda: RunReader(run).log_tail(),
        lambda: silent(run),
    ):
        try:
            act()
        except UserError as error:
            assert len(str(error)) < 4000 and str(error).isprintable()


@st.composite
def mutated_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    kind = draw(st.sampled_from(("flip", "cut", "insert", "delete", "repeat", "replace", "empty")))
    where = draw(st.integers(0, max(len(data) - 1, 0)))
    length = draw(st.integers(1, 64))
    if kind == "flip" and data:
        return data[:where] + bytes([data[where] ^ (1 << draw(st.integers(0, 7)))]) + data[where + 1 :]
    if kind == "cut":
        return data[:where]
    if kind == "insert":
        return data[:where] + draw(st.binary(min_size=1, max_size=32)) + data[where:]
    if kind == "delete":
        return data[:where] + data[where + length :]
    if kind == "repeat":
        return data[:where] + data[where : where + length] * 20 + data[where + length :]
    if kind == "replace":
        return draw(st.binary(max_size=200))
    return b""


def mutate_json(draw: st.DrawFn, body: Any) -> Any:
    """Replace one value at a random depth by a hostile one, or add or remove a key."""
    if isinstance(body, dict) and body and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(body)))
        if draw(st.integers(0, 9)) == 0:
            return {name: value for name, value in body.items() if name != key}
        if draw(st.integers(0, 9)) == 0:
            return {**body, "extra\x1b[31m\n": 1}
        return {**body, key: mutate_json(draw, body[key])}
    if isinstance(body, list) and body and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(body) - 1))
        return [*body[:index], mutate_json(draw, body[index]), *body[index + 1 :]]
    return draw(st.sampled_from(HOSTILE))


@seeded
@FUZZ
@given(data=st.data())
def test_mutated_bytes(good: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(good)))
    files = {**good, name: data.draw(mutated_bytes(good[name]))}
    with written(files) as run:
        exercise(run)


@seeded
@FUZZ
@given(data=st.data())
def test_mutated_values(good: dict[str, bytes], data: st.DataObject) -> None:
    """Well-formed JSON with a hostile value somewhere: gets past the parser into the gates."""
    name = data.draw(st.sampled_from([name for name in sorted(good) if name.endswith(("json", "jsonl"))]))
    lines = name.endswith("jsonl")
    if lines and not good[name]:
        return
    draw = data.draw
    if lines:
        rows = good[name].decode().splitlines()
        index = draw(st.integers(0, len(rows) - 1))
        rows[index] = json.dumps(mutate_json(draw, json.loads(rows[index])))
        content = "".join(row + "\n" for row in rows)
    else:
        content = json.dumps(mutate_json(draw, json.loads(good[name])))
    with written({**good, name: content.encode()}) as run:
        exercise(run)


@seeded
@FUZZ
@given(data=st.data())
def test_forged_plans(good: dict[str, bytes], data: st.DataObject) -> None:
    """A hostile plan with its own correct digest, which every route file repeats."""
    body = mutate_json(data.draw, json.loads(good["plan.json"])["plan"])
    digest = canonical_digest(body)
    files = {**good, "plan.json": json.dumps({"digest": digest, "plan": body}).encode()}
    old = json.loads(good["plan.json"])["digest"].encode()
    for name in [name for name in files if name.startswith("routes/")]:
        files[name] = files[name].replace(old, digest.encode())
    with written(files) as run:
        exercise(run)


@pytest.mark.parametrize("text", ["[" * 50_000, '{"digest": "x", "plan": ' + '{"a":' * 900 + "1" + "}" * 901, "\xff"])
def test_plans_that_break_parsers(good: dict[str, bytes], text: str) -> None:
    with written({**good, "plan.json": text.encode("latin-1")}) as run:
        exercise(run)
