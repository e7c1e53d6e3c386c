"""A report judges the files itself: a recorded verdict, even another run's, stood green where validate fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rl_engine.checks import validate
from rl_engine.report.collect import RECORD, RunView, collect
from rl_engine.report.page import render
from rl_engine.report.tables import gates_table, verdict_word
from rl_engine.report.verdict import hero
from tests.helpers.synthetic_run import make_run

RECORDED = "validation-0000.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A validated pair: green."""
    for mode in ("native", "consistency"):
        assert validate.main(make_run(tmp_path / f"p-{mode}", mode, pair_id="p")) == 0
    collection = collect(tmp_path, True)
    assert [verdict_word(run) for run in collection.runs] == ["valid", "valid"]
    assert hero(collection)["state"] == "good"
    return tmp_path


def view(root: Path) -> RunView:
    return next(run for run in collect(root, True).runs if run.mode == "consistency")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def status(run: RunView, name: str) -> str:
    return next(finding.status for finding in run.findings if finding.name == name)


def test_a_run_that_validate_fails_is_red_whatever_is_recorded(root: Path) -> None:
    """A provider's calls are taken out after the validation; the recorded verdict still says valid."""
    run = root / "p-consistency"
    edit(run / "routes/engine0-0.json", routes=[])
    collection = collect(root, True)
    words = {item.mode: verdict_word(item) for item in collection.runs}
    assert words == {"native": "valid", "consistency": "invalid"}
    assert not validate.passed(validate.run_validation(run))
    assert status(view(root), RECORD) == "FAIL"
    assert hero(collection)["state"] != "good"
    assert view(root).certifies == ()
    page = render(collection)
    assert 'chip bad">invalid' in page and "did not pass every gate" in page


def test_another_run_s_validation_file_is_no_verdict(root: Path) -> None:
    shutil.copy(root / "p-native" / RECORDED, root / "p-consistency" / RECORDED)
    run = view(root)
    assert (verdict_word(run), status(run, RECORD)) == ("invalid", "FAIL")
    assert "p-native" in next(finding.found for finding in run.findings if finding.name == RECORD)


def test_a_forged_pass_of_a_run_that_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "p-consistency", "consistency")
    edit(run / "routes/engine0-0.json", routes=[])
    assert validate.main(run) == 1
    body = json.loads((run / RECORDED).read_text())
    edit(run / RECORDED, passed=True, findings=[{**item, "status": "PASS"} for item in body["findings"]])
    assert verdict_word(view(tmp_path)) == "invalid"


def test_what_cannot_be_judged_here_is_grey(root: Path) -> None:
    """A rescore needs a process with torch: it is shown as recorded, counts for nothing, and a failed one counts."""
    path = root / "p-consistency" / RECORDED
    findings = json.loads(path.read_text())["findings"]
    rescore = {"name": "rescore", "status": "PASS", "found": "0 of 9 differ", "expected": "0", "hint": ""}
    edit(path, findings=[*findings, rescore])
    run = view(root)
    assert verdict_word(run) == "valid"
    columns, *_ = [gates_table([run]).columns]
    rows = [dict(zip(columns, row, strict=True)) for row in gates_table([run]).rows]
    assert {row["gate"] for row in rows if row["judged"] == "as recorded"} == {"rescore"}
    assert any(line.startswith("as recorded and not judged again: rescore PASS") for line in run.does_not_certify)
    page = render(collect(root, True))
    assert "pass as recorded" in page
    assert '<td class="gate "><span class="mark-text">pass as recorded' in page
    edit(path, passed=False, findings=[*findings, {**rescore, "status": "FAIL"}])
    assert verdict_word(view(root)) == "invalid"


def test_a_failed_record_of_a_run_that_passes_is_said(root: Path) -> None:
    edit(root / "p-consistency" / RECORDED, passed=False)
    run = view(root)
    assert (verdict_word(run), status(run, RECORD)) == ("valid", "WARN")


def test_a_run_that_is_going_on_is_not_judged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "p-consistency", "consistency")
    states = (run / "state.jsonl").read_text().splitlines()
    (run / "state.jsonl").write_text("\n".join(states[:-1]) + "\n")
    collection = collect(tmp_path, True)
    assert [verdict_word(item) for item in collection.runs] == ["not finished"]
    assert hero(collection)["state"] == "warn"


def test_many_runs_are_judged_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run's gates read its files once in a command."""
    for number in range(3):
        make_run(tmp_path / f"r-{number}", "consistency")
    seen: list[str] = []
    real = validate.judge
    monkeypatch.setattr("rl_engine.report.collect.judge", lambda reader: seen.append(reader.run_id) or real(reader))
    render(collect(tmp_path, True))
    assert sorted(seen) == ["r-0", "r-1", "r-2"]
