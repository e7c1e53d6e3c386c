"""Gates of runs whose engines do not record everything: what was declared is asked for, the rest is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_engine.checks.gates.evidence import RunEvidence
from rl_engine.checks.validate import conclusions, run_validation
from rl_engine.records.reader import RunReader
from tests.helpers.synthetic_run import make_run

FOREIGN = {"stack": "custom", "train_engine": "builtin", "rollout_engine": "quick"}
EVERYTHING = ["contract", "threads", "routes", "draws", "passes", "graphs", "weights"]
Gone = Callable[[Path], None]


def declare(run: Path, *records: str, side: str = "rollout", name: str = "quick") -> None:
    fields = {"side": side, "name": name, "records": list(records), "package": "other", "version": "2.0"}
    line = json.dumps({"time": "2026-12-01T00:00:00.000000Z", "kind": "engine_declared", "fields": fields})
    with open(run / "events.jsonl", "a") as file:
        file.write(line + "\n")


def statuses(run: Path) -> dict[str, str]:
    return {finding.name: finding.status for finding in run_validation(run)}


def without_routes(run: Path) -> None:
    (run / "routes/engine0-0.json").unlink()


def without_passes(run: Path) -> None:
    shutil.rmtree(run / "passes")


def without_loads(run: Path) -> None:
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not ('"weights_loaded"' in line and '"engine0"' in line)]
    assert len(kept) < len(lines)
    (run / "events.jsonl").write_text("".join(kept))


GONE: list[tuple[Gone, str, str]] = [
    (without_routes, "routes", "workers"),
    (without_passes, "passes", "passes"),
    (without_loads, "weights", "replicas"),
]


@pytest.mark.parametrize(("gone", "kind", "gate"), GONE, ids=[kind for _, kind, _ in GONE])
def test_a_record_must_be_there_where_it_was_declared(tmp_path: Path, gone: Gone, kind: str, gate: str) -> None:
    run = make_run(tmp_path / "run-1", **FOREIGN)
    declare(run, *EVERYTHING)
    assert set(statuses(run).values()) == {"PASS"}
    gone(run)
    assert statuses(run)[gate] == "FAIL"
    other = make_run(tmp_path / "run-2", **FOREIGN)
    declare(other, *(record for record in EVERYTHING if record != kind))
    gone(other)
    found = statuses(other)
    assert found[gate] == "WARN" and "FAIL" not in found.values(), found
    evidence = RunEvidence(RunReader(other))
    certifies, does_not = conclusions(evidence, run_validation(other))
    assert f"what the rollout engine quick does not declare: {kind}" in does_not
    whole = conclusions(RunEvidence(RunReader(make_run(tmp_path / "run-3"))), [])[0]
    assert (set(whole) - set(certifies) != set()) == (kind != "passes")


@pytest.mark.parametrize(("gone", "kind", "gate"), GONE, ids=[kind for _, kind, _ in GONE])
def test_no_event_lets_a_built_in_engine_off(tmp_path: Path, gone: Gone, kind: str, gate: str) -> None:
    run = make_run(tmp_path / "run-1")
    for side in ("train", "rollout"):
        declare(run, side=side, name="builtin")
    assert set(statuses(run).values()) == {"PASS"}
    gone(run)
    assert statuses(run)[gate] == "FAIL"


def test_a_declaration_counts_for_its_own_engine_and_in_every_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1", **FOREIGN)
    declare(run, *EVERYTHING, name="other")
    declare(run, *EVERYTHING, side="train")
    assert statuses(run)["passes"] == "WARN"
    declare(run, *EVERYTHING)
    assert statuses(run)["passes"] == "PASS"
    declare(run, "routes")
    assert statuses(run)["passes"] == "WARN" and statuses(run)["workers"] == "PASS"
