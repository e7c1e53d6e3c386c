"""Each gate: one thing broken on a copy of a good run gives exactly that finding."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_engine.checks.finding import Finding
from rl_engine.checks.gates import GATES
from rl_engine.checks.validate import run_validation
from rl_engine.records.codec import canonical_digest, canonical_json, encode
from rl_engine.records.reader import RunReader
from rl_engine.records.samples import encode_samples
from rl_engine.records.types import SampleBatch, SampleRecord
from tests.helpers.synthetic_run import make_batch, make_run, make_step

Break = Callable[[Path], None]
TRAINER, ENGINE, PASSES = "routes/trainer-0.json", "routes/engine0-0.json", "passes/engine0.jsonl"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("good") / "run-1")


def failures(run: Path) -> list[Finding]:
    return [finding for finding in run_validation(run) if finding.status == "FAIL"]


def edit_lines(name: str, change: Callable[[list[dict[str, Any]]], None]) -> Break:
    def apply(run: Path) -> None:
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        change(rows)
        (run / name).write_text("".join(canonical_json(row) + "\n" for row in rows))

    return apply


def edit_json(name: str, change: Callable[[dict[str, Any]], None]) -> Break:
    def apply(run: Path) -> None:
        body = json.loads((run / name).read_text())
        change(body)
        (run / name).write_text(json.dumps(body))

    return apply


def edit_plan(change: Callable[[dict[str, Any]], None]) -> Break:
    """Change the plan as a consistent forger would: digest and route files follow."""

    def apply(run: Path) -> None:
        body = json.loads((run / "plan.json").read_text())["plan"]
        change(body)
        digest = canonical_digest(body)
        (run / "plan.json").write_text(json.dumps({"digest": digest, "plan": body}))
        for path in (run / "routes").iterdir():
            edit_json(f"routes/{path.name}", lambda route: route.update(plan_digest=digest))(run)

    return apply


def edit_batch(change: Callable[[SampleBatch], SampleBatch], *, follow: bool) -> Break:
    """Change step 1's samples; ``follow`` rewrites its line in steps.jsonl to match, so that only the samples judge."""

    def apply(run: Path) -> None:
        batch = change(make_batch(1))
        tensors, lines = encode_samples(1, batch)
        (run / "samples/step-00001.safetensors").write_bytes(tensors)
        (run / "samples/step-00001.jsonl").write_bytes(lines)
        if follow:
            edit_lines("steps.jsonl", lambda rows: rows[1].update(encode(make_step(1, batch))))(run)

    return apply


def with_value(field: str, where: str, value: float) -> Callable[[SampleBatch], SampleBatch]:
    """Set the first element of ``field`` on the response (or the prompt)."""

    def change(batch: SampleBatch) -> SampleBatch:
        array = getattr(batch, field).copy()
        array[np.flatnonzero(batch.loss_mask == (1 if where == "response" else 0))[0]] = value
        return dataclasses.replace(batch, **{field: array})

    return change


def with_sample(**changes: object) -> Callable[[SampleBatch], SampleBatch]:
    def change(batch: SampleBatch) -> SampleBatch:
        first: SampleRecord = dataclasses.replace(batch.samples[0], **changes)  # type: ignore[arg-type]
        return dataclasses.replace(batch, samples=(first, *batch.samples[1:]))

    return change


def one_ulp(batch: SampleBatch) -> SampleBatch:
    first = np.flatnonzero(batch.loss_mask)[0]
    train = batch.train_logprob.copy()
    train[first] = np.nextafter(train[first], np.float32(0))
    return dataclasses.replace(batch, train_logprob=train)


def outside_set(batch: SampleBatch) -> SampleBatch:
    assert batch.retained is not None
    position = int(np.flatnonzero(batch.loss_mask)[0])
    row = batch.retained.ids[batch.retained.offsets[position] : batch.retained.offsets[position + 1]]
    tokens = batch.tokens.copy()
    tokens[position] = next(token for token in range(100) if token not in row)
    return dataclasses.replace(batch, tokens=tokens)


def other_prompt(batch: SampleBatch) -> SampleBatch:
    tokens = batch.tokens.copy()
    tokens[0] = (tokens[0] + 1) % 100
    return dataclasses.replace(batch, tokens=tokens)


def mask_with_a_hole(batch: SampleBatch) -> SampleBatch:
    """The last token of a response leaves the mask, and its logprobs with it."""
    last = int(batch.offsets[1]) - 1
    arrays = {name: getattr(batch, name).copy() for name in ("loss_mask", "rollout_logprob", "train_logprob")}
    for array in arrays.values():
        array[last] = 0
    return dataclasses.replace(batch, **arrays)


def set_environment(role: str, change: Callable[[dict[str, Any]], None], phase: str = "") -> Break:
    def apply(run: Path) -> None:
        for path in run.glob("environment-*.json"):
            body = json.loads(path.read_text())
            if body["role"] == role and phase in ("", body["phase"]):
                change(body)
                path.write_text(json.dumps(body))

    return apply


def add_refusal(run: Path) -> None:
    line = {"time": "2026-01-01T00:00:00Z", "kind": "refusal", "fields": {"operator": "linear", "reason": "shape"}}
    edit_lines("events.jsonl", lambda rows: rows.append(line))(run)


def same_weights(run: Path) -> None:
    """Every version has version 0's bits, in files and in the engines' own word."""
    first = json.loads((run / "weights/0.json").read_text())
    for version in (1, 2):
        (run / f"weights/{version}.json").write_text(json.dumps({**first, "version": version}))

    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows[1:]:
            row["fields"]["digest"] = first["digest"]

    edit_lines("events.jsonl", change)(run)


def no_step(run: Path) -> None:
    edit_lines("steps.jsonl", lambda rows: rows.pop())(run)


def qk_norm(body: dict[str, Any]) -> dict[str, Any]:
    return {**body["routes"][0], "operator": "qk_norm"}


def line_of(number: int, **changes: object) -> Break:
    """Another line in the scheduler's log."""
    return edit_lines(PASSES, lambda rows: rows[number].update(changes))


def copied(name: str) -> Break:
    return lambda run: shutil.copy(run / PASSES, run / "passes" / name) and None


def with_tokens(rows: list[dict[str, Any]], number: int, more: int) -> None:
    """More tokens in every pass of a line, and as many less in the one before it: the sums stay."""
    rows[number]["tokens"] += more
    rows[number - 1]["tokens"] -= more * rows[number]["passes"]


def with_order(rows: list[dict[str, Any]], order: list[int]) -> None:
    """Other lines first, with the numbers that they would have there."""
    rows[:] = [rows[number] for number in order]
    first = 0
    for row in rows:
        row["first"], first = first, first + row["passes"]


def rotates(provider: str, files: tuple[str, ...] = (TRAINER, ENGINE)) -> Break:
    """A run whose plan has RoPE by ``cpu`` too, and in ``files`` QK norm and RoPE called as one, by ``provider``."""

    def apply(run: Path) -> None:
        edit_plan(lambda body: [body["providers"][side].append(["rope", "cpu"]) for side in ("train", "rollout")])(run)
        for file in files:

            def change(body: dict[str, Any]) -> None:
                route = body["routes"][0]
                body["routes"].append({**route, "operator": "qk_norm_rope", "provider": provider})

            edit_json(file, change)(run)

    return apply


def first_route(change: Callable[[dict[str, Any]], None]) -> Break:
    return edit_json("routes/trainer-0.json", lambda body: change(body["routes"][0]))


BREAKS: list[tuple[str, str, Break]] = [
    ("records", "damaged tensors", lambda run: (run / "samples/step-00000.safetensors").write_bytes(b"\xff" * 64)),
    ("records", "missing identities", lambda run: (run / "samples/step-00000.jsonl").unlink()),
    ("records", "plan edited", edit_json("plan.json", lambda body: body["plan"].update(seed=9))),
    ("records", "weights digest", edit_json("weights/1.json", lambda body: body["tensors"].update(x="0"))),
    ("records", "a link", lambda run: (run / "extra").symlink_to("/etc/passwd")),
    ("records", "torn line", lambda run: (run / "steps.jsonl").write_text((run / "steps.jsonl").read_text()[:-9])),
    ("records", "torn passes", lambda run: (run / PASSES).write_text((run / PASSES).read_text()[:-9])),
    ("records", "passes of nobody", copied("engine0.json")),
    ("plan", "worker of another plan", edit_json(TRAINER, lambda body: body.update(plan_digest="0" * 64))),
    ("state", "still running", edit_lines("state.jsonl", lambda rows: rows.pop())),
    ("state", "failed", edit_lines("state.jsonl", lambda rows: rows[2].update(name="failed"))),
    ("state", "impossible order", edit_lines("state.jsonl", lambda rows: rows.pop(1))),
    ("steps", "a step missing", no_step),
    ("steps", "swapped", edit_lines("steps.jsonl", lambda rows: rows.reverse())),
    ("steps", "twice", edit_lines("steps.jsonl", lambda rows: rows.append(rows[-1]))),
    ("sources", "changed", set_environment("driver", lambda b: b["sources"][0].update(revision="b" * 40), "end")),
    ("sources", "none", lambda run: [set_environment(r, lambda b: b.update(sources=[]))(run) for r in ROLES] and None),
    ("sample_count", "recorded", edit_lines("steps.jsonl", lambda rows: rows[0].update(samples=3))),
    ("sample_count", "planned", edit_plan(lambda body: body.update(global_batch_size=8))),
    ("identities", "twice", edit_batch(with_sample(sample_index=1), follow=True)),
    ("identities", "finish reason", edit_batch(with_sample(finish_reason="gone"), follow=True)),
    ("identities", "prompts", edit_plan(lambda body: body["data"].update(prompts_per_step=3))),
    ("masks", "value", edit_batch(with_value("loss_mask", "response", 2), follow=True)),
    ("masks", "hole", edit_batch(mask_with_a_hole, follow=True)),
    ("masks", "logprob outside", edit_batch(with_value("rollout_logprob", "prompt", -0.0), follow=True)),
    ("finite", "NaN", edit_batch(with_value("train_logprob", "response", float("nan")), follow=True)),
    ("finite", "inf", edit_batch(with_value("rollout_logprob", "response", float("-inf")), follow=True)),
    ("retained_sets", "token outside", edit_batch(outside_set, follow=True)),
    ("retained_sets", "none", edit_batch(lambda batch: dataclasses.replace(batch, retained=None), follow=True)),
    ("step_samples", "reward", edit_lines("steps.jsonl", lambda rows: rows[0].update(reward_mean=0.75))),
    ("step_samples", "truncated", edit_lines("steps.jsonl", lambda rows: rows[0].update(truncated=0))),
    ("step_logprobs", "mismatches", edit_lines("steps.jsonl", lambda rows: rows[1].update(mismatches=1))),
    ("step_logprobs", "k3", edit_lines("steps.jsonl", lambda rows: rows[1].update(kl_k3=0.1))),
    ("step_logprobs", "tokens", edit_lines("steps.jsonl", lambda rows: rows[1].update(tokens_compared=12))),
    ("mismatches", "one ulp", edit_batch(one_ulp, follow=True)),
    (
        "not_reused",
        "fewer calls than steps",
        edit_json(TRAINER, lambda body: body["routes"][3].update(calls=1, shapes={"T<=64": 1})),
    ),
    (
        "not_reused",
        "nothing scored",
        edit_lines("steps.jsonl", lambda rows: rows[0].update(score_calls=0, score_tokens=0)),
    ),
    ("not_reused", "a token fewer", edit_lines("steps.jsonl", lambda rows: rows[1].update(score_tokens=12))),
    ("not_reused", "a step without word", edit_lines("steps.jsonl", lambda rows: rows[1].pop("score_calls") and None)),
    ("ratios", "another logprob", edit_lines("steps.jsonl", lambda rows: rows[1].update(ratio_mismatches=1))),
    ("ratios", "below nothing", edit_lines("steps.jsonl", lambda rows: rows[1].update(ratio_mismatches=-1))),
    ("ratios", "a step without word", edit_lines("steps.jsonl", lambda rows: rows[0].pop("ratio_mismatches"))),
    ("not_reused", "no time", edit_lines("steps.jsonl", lambda rows: rows[0]["seconds"].update(old_logp=0.0))),
    ("grpo", "prompt tokens", edit_batch(other_prompt, follow=True)),
    ("grpo", "clip", edit_lines("steps.jsonl", lambda rows: rows[0].update(clip_fraction=1.5))),
    ("grpo", "loss", edit_lines("steps.jsonl", lambda rows: rows[0].update(loss="nan"))),
    ("topology", "trainer rank", edit_plan(lambda body: body["topology"].update(train_tp=2))),
    ("topology", "engines", edit_plan(lambda body: body["topology"].update(rollout_engines=2))),
    ("topology", "engine rank", edit_plan(lambda body: body["topology"].update(rollout_cp=2))),
    ("topology", "stranger", edit_batch(with_sample(engine="engine7"), follow=True)),
    ("workers", "route file missing", lambda run: (run / ENGINE).unlink()),
    (
        "workers",
        "of no attempt",
        lambda run: shutil.copy(run / ENGINE, run / "routes/engine0-0.attempt-1.json") and None,
    ),
    ("workers", "attempt without word", edit_lines("events.jsonl", lambda rows: rows.pop(0))),
    ("workers", "attempt from nowhere", edit_lines("events.jsonl", lambda rows: rows[0]["fields"].update(next_step=1))),
    ("routes", "other provider", first_route(lambda route: route.update(provider="stock"))),
    ("routes", "other side", first_route(lambda route: route.update(side="rollout"))),
    ("routes", "unknown operator", first_route(lambda route: route.update(operator="conv"))),
    ("routes", "count", first_route(lambda route: route.update(calls=8))),
    ("routes", "zero", first_route(lambda route: route.update(calls=0, shapes={}))),
    ("routes", "never called", edit_json(ENGINE, lambda body: body["routes"].pop())),
    ("routes", "one side's model differs", edit_json(ENGINE, lambda body: body["routes"].append(qk_norm(body)))),
    ("routes", "fused by another provider", rotates("triton")),
    ("routes", "fused on one side", rotates("cpu", (ENGINE,))),
    ("routes", "fused nowhere", rotates("cpu", ())),
    (
        "routes",
        "fused with an operator that is not planned",
        edit_json(ENGINE, lambda body: body["routes"].append({**body["routes"][0], "operator": "qk_norm_rope"})),
    ),
    ("refusals", "declined", add_refusal),
    ("execution", "graph on a CPU", first_route(lambda route: route.update(execution="graph"))),
    ("contract", "other digest", set_environment("rollout", lambda b: b.update(contract_digest="e" * 64))),
    ("contract", "other id", set_environment("train", lambda b: b.update(contract_id="rlk.v0/cpu"))),
    ("qualification", "two", set_environment("rollout", lambda b: b.update(qualification_digest="e" * 64))),
    ("qualification", "none", lambda run: [set_environment(r, no_qualification)(run) for r in ROLES] and None),
    ("threads", "unequal", set_environment("rollout", lambda b: b["threads"].update(intra_op=2))),
    ("threads", "planned", edit_plan(lambda body: body.update(threads=2))),
    ("passes", "none", lambda run: (run / PASSES).unlink()),
    ("passes", "a pass fewer", line_of(3, passes=1)),
    ("passes", "a pass twice", edit_lines(PASSES, lambda rows: rows.insert(1, rows[1]))),
    ("passes", "a pass missing", edit_lines(PASSES, lambda rows: rows.pop())),
    ("passes", "more shared", line_of(0, shared=3)),
    ("passes", "nothing discarded", line_of(1, discarded=0)),
    ("passes", "of another step", line_of(3, step=1)),
    ("passes", "another sample finished", line_of(0, finished=[[1, 1]])),
    ("passes", "finished twice", line_of(2, finished=[[0, 0], [1, 0]])),
    ("passes", "below nothing", line_of(0, waiting=-1)),
    ("passes", "more pages than there are", line_of(0, pages_held=9)),
    ("passes", "from a graph", line_of(3, execution="graph")),
    ("passes", "of a stranger", copied("engine7.jsonl")),
    ("passes", "of no attempt", copied("engine0.attempt-1.jsonl")),
    ("passes", "no folder", lambda run: shutil.rmtree(run / "passes")),
    ("passes", "with old weights", line_of(5, weight_version=0)),
    (
        "passes",
        "behind the last step",
        edit_lines(PASSES, lambda rows: rows.append(rows[-1] | {"first": 10, "step": 2})),
    ),
    ("passes", "many of prompts", line_of(3, prefill=1)),
    ("passes", "many of more tokens", edit_lines(PASSES, lambda rows: with_tokens(rows, 3, 1))),
    ("passes", "steps that go back", edit_lines(PASSES, lambda rows: with_order(rows, [4, 5, 6, 7, 0, 1, 2, 3]))),
    ("weight_versions", "sample", edit_batch(with_sample(weight_version=0), follow=True)),
    ("weight_versions", "step", edit_lines("steps.jsonl", lambda rows: rows[1].update(weight_version=0))),
    ("replicas", "other bits", edit_lines("events.jsonl", lambda rows: rows[1]["fields"].update(digest="0" * 64))),
    ("replicas", "no word", edit_lines("events.jsonl", lambda rows: rows.pop(2))),
    ("gradients", "hex", edit_lines("steps.jsonl", lambda rows: rows[0].update(grad_norm_hex="0x1.0p+0"))),
    ("gradients", "NaN", edit_lines("steps.jsonl", lambda rows: rows[0].update(grad_norm="nan", grad_norm_hex="nan"))),
    ("updates", "no update", same_weights),
]
ROLES = ("driver", "train", "rollout")


def no_qualification(body: dict[str, Any]) -> None:
    body["qualification_digest"] = None


def captured(*sizes: int) -> Break:
    """A run that plans graphs of 1, 2 and 4 samples, with words about those that were captured."""

    def apply(run: Path) -> None:
        edit_plan(lambda body: body.update(engine={**body.get("engine", {}), "graph_capture_sizes": [1, 2, 4]}))(run)
        word = {"time": "2026-01-01T00:00:00Z", "kind": "graph_capture"}
        lines = [{**word, "fields": {"engine": "engine0", "rank": 0, "size": size}} for size in sizes]
        edit_lines("events.jsonl", lambda rows: rows.extend(lines))(run)

    return apply


@pytest.mark.parametrize(
    ("sizes", "graph", "passes"),
    [
        *(((1, 4), True, True), ((1, 1, 2), True, True), ((), False, True)),
        *(((), True, False), ((1, 3), True, False), ((1, 4), False, False)),
    ],
)
def test_graphs_are_of_planned_sizes_and_replayed(
    good: Path, tmp_path: Path, sizes: tuple[int, ...], graph: bool, passes: bool
) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(good, run)
    captured(*sizes)(run)
    if graph:
        edit_json(ENGINE, lambda body: body["routes"][0].update(execution="graph"))(run)
    found = next(finding for finding in run_validation(run) if finding.name == "execution")
    assert (found.status == "PASS") == passes, found


def test_a_good_run_passes(good: Path) -> None:
    findings = run_validation(good)
    assert [finding.name for finding in findings] == [gate.name for gate in GATES]
    assert [finding for finding in findings if finding.status != "PASS"] == []


@pytest.mark.parametrize(("gate", "what", "break_run"), BREAKS, ids=[f"{gate}: {what}" for gate, what, _ in BREAKS])
def test_one_break_one_finding(good: Path, tmp_path: Path, gate: str, what: str, break_run: Break) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(good, run)
    break_run(run)
    found = failures(run)
    assert [finding.name for finding in found] == [gate], found
    assert found[0].found and found[0].expected


def test_a_fused_operator_stands_for_its_parts(good: Path, tmp_path: Path) -> None:
    """Called on both sides, by the provider that the plan has for both parts."""
    run = tmp_path / "run-1"
    shutil.copytree(good, run)
    rotates("cpu")(run)
    assert failures(run) == []


def test_every_gate_is_broken_somewhere() -> None:
    assert {gate for gate, _, _ in BREAKS} | {"evidence"} == {gate.name for gate in GATES}


def test_a_run_of_earlier_code_has_no_passes(good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(good, run)
    shutil.rmtree(run / "passes")
    edit_lines("events.jsonl", lambda rows: [row["fields"].pop("passes", None) for row in rows] and None)(run)
    findings = {finding.name: finding for finding in run_validation(run)}
    assert findings["passes"].status == "PASS" and "none logged" in findings["passes"].found
    assert failures(run) == []


SCORING = ("score_calls", "score_tokens", "ratio_mismatches")


def without_scoring(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for name in SCORING:
            del row[name]


def test_a_run_of_earlier_code_counts_scoring_and_updates_together(good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(good, run)
    edit_lines("steps.jsonl", without_scoring)(run)
    # Such steps alone are no earlier code's: the run said that it records them.
    assert {finding.name for finding in failures(run)} == {"not_reused", "ratios"}
    edit_lines("events.jsonl", lambda rows: [row["fields"].pop("scoring", None) for row in rows] and None)(run)
    findings = {finding.name: finding for finding in run_validation(run)}
    assert all("earlier version" in findings[name].found for name in ("not_reused", "ratios"))
    assert failures(run) == []


def test_ratios_are_reported_in_native_mode(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1", "native")
    edit_lines("steps.jsonl", lambda rows: rows[1].update(ratio_mismatches=3))(run)
    found = next(finding for finding in run_validation(run) if finding.name == "ratios")
    assert found.status == "PASS" and found.found.startswith("3 of 26 logprobs")


def test_dirty_sources_downgrade_without_failing(good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(good, run)
    for role in ROLES:
        set_environment(role, lambda body: body["sources"][0].update(dirty=True, diff_hash="f" * 64))(run)
    findings = {finding.name: finding for finding in run_validation(run)}
    assert findings["evidence"].status == "WARN" and "development" in findings["evidence"].found
    assert [f.name for f in findings.values() if f.status == "FAIL"] == []


def test_native_mismatches_are_reported_not_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1", "native")
    findings = {finding.name: finding for finding in run_validation(run)}
    assert findings["mismatches"].status == "PASS"
    assert findings["mismatches"].found.startswith("26 of 26 logprobs differ")
    # The control: the same records under a consistency plan fail.
    edit_plan(lambda body: body.update(mode="consistency"))(run)
    assert [finding.name for finding in failures(run)] == ["mismatches"]


def test_the_first_mismatch_is_located_in_hex(good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(good, run)
    edit_batch(one_ulp, follow=True)(run)
    found = failures(run)[0].found
    batch = RunReader(run).samples(1)
    position = int(np.flatnonzero(batch.loss_mask)[0])
    assert f"step 1 sample 0 (prompt 2, sample 0) token {position}" in found
    assert f"rollout 0x{batch.rollout_logprob.view(np.uint32)[position]:08x}" in found


def test_a_resumed_run_passes_and_needs_the_counts_of_every_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1", killed_after=1)
    assert sorted(path.name for path in (run / "routes").iterdir()) == [
        "engine0-0.attempt-1.json",
        "engine0-0.json",
        "trainer-0.attempt-1.json",
        "trainer-0.json",
    ]
    assert failures(run) == []
    for name in (TRAINER, "routes/engine0-0.attempt-1.json"):
        broken = tmp_path / name.replace("/", "-") / "run-1"
        shutil.copytree(run, broken)
        (broken / name).unlink()
        (finding,) = failures(broken)
        assert finding.name == "workers" and "which finished 1 steps" in finding.found
    (run / "passes/engine0.attempt-1.jsonl").unlink()
    (finding,) = failures(run)
    assert finding.name == "passes" and "step 1 of engine engine0: 0 samples finished" in finding.found


@pytest.mark.parametrize("step", [1, 2])
def test_an_attempt_logs_passes_of_one_step_more_than_it_finished(tmp_path: Path, step: int) -> None:
    run = make_run(tmp_path / "run-1", killed_after=1, rollouts=3)
    begun = {"first": 5, "step": step, "weight_version": step}
    edit_lines(PASSES, lambda rows: rows.append(rows[0] | begun))(run)
    found = [finding.found for finding in failures(run)]
    assert found == ([] if step == 1 else ["engine engine0, attempt 0: never reached step 2"])


def test_an_attempt_without_a_step_needs_no_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1", killed_after=2)
    for path in (run / "routes").glob("*attempt-1*"):
        path.unlink()
    assert failures(run) == []


def test_another_number_of_steps_passes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run-1", rollouts=3)
    assert failures(run) == []


def test_a_hostile_number_does_not_fill_the_terminal(good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    shutil.copytree(good, run)
    edit_plan(lambda body: body.update(threads=10**4000))(run)
    (finding,) = failures(run)
    assert finding.name == "threads" and len(finding.found + finding.hint) < 1500
