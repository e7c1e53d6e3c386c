"""The report from records alone: numbers, files, refusals, and a run directory made by an enemy."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_engine.records.codec import canonical_digest
from rl_engine.records.errors import UserError
from rl_engine.records.reader import RunReader
from rl_engine.records.statistics import logprob_statistics
from rl_engine.report import cli
from rl_engine.report.charts import MOST_POINTS, moving_average, step_charts
from rl_engine.report.collect import collect
from rl_engine.report.page import render
from rl_engine.report.tables import providers_table
from tests.helpers.synthetic_run import make_run
from tests.report.conftest import STEPS

ROOT = Path(__file__).resolve().parents[2]
EVIL = '<script>document.title="owned"</script><img src=x onerror=alert(1)>"\'{{7*7}}|`=cmd()'


def write(root: Path, output: Path, *, pictures: bool = False, **flags: object) -> int:
    """The verb. PNGs take most of its time, so only the tests that look at them ask for them."""
    with pytest.MonkeyPatch.context() as patch:
        if not pictures:
            has = cli._has
            patch.setattr(cli, "_has", lambda package: package != "matplotlib" and has(package))
        return _main(root, output, **flags)


def _main(root: Path, output: Path, **flags: object) -> int:
    return cli.main(root, **{"include_unsealed": False, "output": output, "json_output": False, **flags})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def report(output_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "out"
    assert write(output_root, folder, pictures=True) == 0
    return folder


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "tables" / f"{name}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_fused_operator_is_as_planned_as_its_parts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1")
    path = run / "routes/engine0-0.json"
    body = json.loads(path.read_text())
    body["routes"].append({**body["routes"][0], "operator": "qk_norm_rope"})
    path.write_text(json.dumps(body))
    (view,) = collect(tmp_path, True).runs
    providers = view.plan.providers
    for rope, expected in (("cpu", "cpu"), ("triton", "cpu, triton")):
        planned = dataclasses.replace(providers, rollout=(*providers.rollout, ("rope", rope)))
        changed = dataclasses.replace(view, plan=dataclasses.replace(view.plan, providers=planned))
        table = providers_table([changed])
        found = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        assert [row["planned"] for row in found if row["operator"] == "qk_norm_rope"] == [expected]


def test_tables_hold_the_records(report: Path, output_root: Path) -> None:
    steps = rows(report, "steps")
    assert len(steps) == 2 * STEPS
    for mode in ("native", "consistency"):
        reader = RunReader(output_root / f"p-{mode}")
        mine = [row for row in steps if row["run"] == f"p-{mode}"]
        for record, row in zip(reader.steps(), mine, strict=True):
            found = logprob_statistics(reader.samples(record.step))
            assert (int(row["mismatches"]), int(row["tokens_compared"])) == (found.mismatches, found.tokens_compared)
            assert float(row["max_abs_dlogp"]) == found.max_abs_dlogp
            assert float(row["grad_norm"]) == record.grad_norm == float.fromhex(row["grad_norm_hex"])
            assert float(row["seconds_rollout"]) == record.seconds.rollout
    runs = {row["run"]: row for row in rows(report, "runs")}
    assert set(runs) == {"p-native", "p-consistency"}
    assert runs["p-consistency"]["mismatches"] == "0" and int(runs["p-native"]["mismatches"]) > 0
    assert runs["p-native"]["validation"] == "valid" and len(runs["p-native"]["seal_root"]) == 64
    assert all(row["provider"] == row["planned"] for row in rows(report, "providers"))
    assert {row["status"] for row in rows(report, "gates")} <= {"PASS", "WARN"}
    assert [row["run"] for row in rows(report, "matrix")] == ["m-1", "m-2", "m-3"]
    prices = {(row["benchmark"], row["case"], row["contestant"]): row["speed"] for row in rows(report, "prices")}
    assert prices == {
        ("ops", "linear 64 rows", "native"): "",
        ("ops", "linear 64 rows", "consistency"): "2.0",
        ("qualification", "L4 dX, 16 rows", "RL-Kernel"): "0.8",
        ("GPU gemm", "GEMM 1 rows", "RL-Kernel"): "1.5",
    }


def test_every_table_has_three_spellings(report: Path) -> None:
    names = {path.stem for path in (report / "tables").iterdir()}
    assert names >= {"runs", "steps", "gates", "providers", "environments", "matrix", "prices", "left-out"}
    for name in names:
        body = json.loads((report / "tables" / f"{name}.json").read_text())
        markdown = (report / "tables" / f"{name}.md").read_text().splitlines()
        assert len(body["rows"]) == len(rows(report, name)) == len(markdown) - 4
        assert len({line.count("|") - line.count("\\|") for line in markdown[2:]}) == 1


def test_page_is_self_contained_and_small(report: Path) -> None:
    page = (report / "report.html").read_text()
    assert len(page) < 6_000_000
    assert re.findall(r"(?:src|href)=\"(?!#|data:)", page) == []
    assert "url(" not in page and "@import" not in page and "fetch(" not in page
    assert 'data-mode="consistency" data-mismatches="0"' in page


def test_figures_are_pictures(report: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = sorted((report / "figures").iterdir())
    names = {path.name for path in pictures}
    assert {"p.mismatches.png", "p.reward.png", "p.seconds.png", "p.dlogp-histogram.png", "m.matrix.png"} <= names
    assert "price-ops.png" in names and len(names) >= 16
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 4000 for path in pictures)


def test_manifest_names_every_file(report: Path) -> None:
    body = json.loads((report / "report.json").read_text())
    there = {path.relative_to(report).as_posix() for path in report.rglob("*") if path.is_file()}
    assert set(body["files"]) | {"report.json"} == there
    assert [run["mismatches"] for run in body["runs"] if run["mode"] == "consistency"] == [0]


def test_unsealed_runs_are_left_out_or_marked(
    output_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(output_root, tmp_path / "a", json_output=True) == 0
    body = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in body["left_out"]] == ["open-run"]
    assert write(output_root, tmp_path / "b", include_unsealed=True) == 0
    sealed = {row["run"]: row["sealed"] for row in rows(tmp_path / "b", "runs")}
    assert sealed == {"p-native": "yes", "p-consistency": "yes", "open-run": "no"}
    assert "not sealed" in (tmp_path / "b/report.html").read_text()


def test_nothing_sealed_names_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (make_run(tmp_path / name) for name in ("one", "two"))
    assert write(tmp_path, tmp_path / "out") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("rlk-repro: found no sealed run in ") and "hint:" in lines[0]
    assert lines[1:] == [f"  rlk-repro validate --run-dir {path} --seal" for path in (first, second)]
    assert not (tmp_path / "out").exists()


def test_a_changed_sealed_run_is_not_shown(
    output_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(output_root / "p-native", tmp_path / "p-native")
    (tmp_path / "p-native/run.log").open("a").write("more\n")
    assert write(tmp_path, tmp_path / "out") == 2
    assert "its seal does not hold" in capsys.readouterr().err


def test_counts_that_the_samples_do_not_give_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", "native")
    lines = (run / "steps.jsonl").read_text().splitlines()
    body = json.loads(lines[0])
    body["mismatches"] = 0
    (run / "steps.jsonl").write_text("\n".join([json.dumps(body), *lines[1:]]) + "\n")
    found = collect(tmp_path, include_unsealed=True)
    assert found.runs == () and "0 of 13 recorded, 13 of 13 in the samples" in found.left_out[0].reason


def test_without_the_extra_there_are_tables_and_one_line(
    output_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_has", lambda package: False)
    assert write(output_root, tmp_path / "out") == 0
    done = capsys.readouterr()
    said = [line for line in done.err.splitlines() if "jinja2" in line]
    assert len(said) == 1 and "matplotlib" in said[0] and "rl-kernel[report]" in said[0]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tables", "report.json"}
    with pytest.raises(UserError, match="tensorboard"):
        write(output_root, tmp_path / "out", tensorboard=True)


def test_a_second_report_replaces_the_first_and_nothing_else(output_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert write(output_root, folder) == 0 and write(output_root, folder) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/report.html").write_text("mine")
    with pytest.raises(UserError, match="no report's"):
        write(output_root, tmp_path / "mine")
    with pytest.raises(UserError, match="inside a run directory"):
        write(output_root, output_root / "open-run" / "report")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="a link"):
        write(output_root, tmp_path / "link")
    assert (tmp_path / "mine/report.html").read_text() == "mine"


def test_nothing_is_written_through_links(output_root: Path, tmp_path: Path) -> None:
    folder, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("safe")
    assert write(output_root, folder) == 0
    (folder / "report.html").unlink()
    (folder / "report.html").symlink_to(victim)
    assert write(output_root, folder) == 0
    assert victim.read_text() == "safe" and not (folder / "report.html").is_symlink()
    shutil.rmtree(folder / "tables")
    (folder / "tables").symlink_to(tmp_path)
    with pytest.raises(UserError, match="no folder"):
        write(output_root, folder)


@pytest.fixture
def evil_root(tmp_path: Path) -> Path:
    """Every text that a stranger controls is hostile; so are names, links and files beside the runs."""
    root = tmp_path / "evil"
    run = make_run(root / "r-native", "native", profile=EVIL, contract_id=EVIL)
    for path in [*run.glob("environment-*.json")]:
        body = json.loads(path.read_text()) | {"device": EVIL, "host": EVIL, "driver": EVIL}
        path.write_text(json.dumps(body))
    finding = {"name": EVIL, "status": "FAIL", "found": EVIL, "expected": EVIL, "hint": EVIL}
    record = {"time": EVIL, "run_id": EVIL, "plan_digest": "x", "passed": False, "findings": [finding]}
    record |= {"certifies": [EVIL], "does_not_certify": [EVIL]}
    (run / "validation-0001.json").write_text(json.dumps(record))
    name = root / EVIL.replace("/", "_")
    name.mkdir()
    (name / "plan.json").write_text("{}")
    (root / "linked").symlink_to(run)
    deep = root / "deep"
    deep.mkdir()
    (deep / "plan.json").write_text("[" * 100_000)
    pipe = root / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "plan.json")
    bench = {"schema": "rlkernel.bench.v1", "benchmark": EVIL, "machine": {EVIL: EVIL}}
    times = {name: {"median": 1.0, "per_second": 1.0} for name in ("native", EVIL)}
    case = {"case": EVIL, "work": 1, "unit": EVIL, "times": times, "speed": {EVIL: 1e400}}
    (root / "bench.json").write_text(json.dumps({**bench, "cases": [case]}))
    (root / "x-matrix.json").write_text('{"cells": 1}')
    return root


def test_a_hostile_output_root_is_only_text(evil_root: Path, tmp_path: Path) -> None:
    before = {path: path.lstat().st_mtime_ns for path in evil_root.rglob("*") if path.is_file()}
    assert write(evil_root, tmp_path / "out", include_unsealed=True) == 0
    assert {path: path.lstat().st_mtime_ns for path in before} == before
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("<script") == 1 and "<img" not in page and "onerror" in page
    assert "{{7*7}}" in page and "49" not in re.findall(r"owned.{0,80}", page)[0].replace("&#34;", "")
    reasons = {row["name"]: row["reason"] for row in rows(tmp_path / "out", "left-out")}
    assert reasons["linked"].startswith("a link") and {"deep", "pipe", "x-matrix.json"} <= set(reasons)
    for path in (tmp_path / "out/tables").glob("*.csv"):
        for row in csv.reader(path.open(newline="")):
            assert not [cell for cell in row if cell.startswith(("=", "@", "+")) or re.match(r"-\D", cell)]


def test_a_huge_run_still_makes_a_small_page(output_root: Path) -> None:
    """5,000 steps in 12 experiments: ranges of steps keep the page small, and a single mismatch stays visible."""
    collection = collect(output_root, include_unsealed=False)
    many = []
    for run in collection.runs:
        steps = [dataclasses.replace(run.steps[0], step=index, mismatches=0) for index in range(5000)]
        steps[3333] = dataclasses.replace(steps[3333], mismatches=1, max_abs_dlogp=0.25)
        many.append(dataclasses.replace(run, steps=tuple(steps)))
    charts = {chart.key: chart for chart in step_charts(many)}
    assert len(charts["mismatches"].x) <= MOST_POINTS
    assert max(charts["mismatches"].series[0].values) == 1.0 and max(charts["max-dlogp"].series[1].values) == 0.25
    assert "sum of 21 steps" in charts["mismatches"].note
    copies = [
        dataclasses.replace(run, run_id=f"{run.run_id}-{n}", plan=dataclasses.replace(run.plan, pair_id=f"p{n}"))
        for n in range(12)
        for run in many
    ]
    page = render(dataclasses.replace(collection, runs=tuple(copies)))
    assert len(page.encode()) < 6_000_000 and "newest of 12 experiments" in page


def test_moving_average_starts_short() -> None:
    assert moving_average([1.0, 3.0, 5.0], window=2) == [1.0, 2.0, 4.0]


def test_report_needs_no_torch(output_root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rl_engine.report.cli import main;"
        f"root, out = Path({str(output_root)!r}), Path({str(tmp_path / 'o')!r});"
        "main(root, include_unsealed=True, output=out, json_output=False);"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tensorboard_events_hold_the_steps(output_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert write(output_root, tmp_path / "o", tensorboard=True) == 0
    events = EventAccumulator(str(tmp_path / "o/tensorboard/p-native"))
    events.Reload()
    found = [(item.step, item.value) for item in events.Scalars("mismatches")]
    assert found == [(step.step, step.mismatches) for step in RunReader(output_root / "p-native").steps()]


def test_sealed_roots_are_those_of_the_seals(report: Path, output_root: Path) -> None:
    for row in rows(report, "runs"):
        seal_file = json.loads((output_root / row["run"] / "COMPLETE").read_text())
        assert seal_file["root"] == row["seal_root"] == canonical_digest(seal_file["files"])
