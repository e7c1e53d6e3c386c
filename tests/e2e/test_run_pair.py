"""The main job on a small model: one paired run, looked at from every side, and a rescore that sees a changed bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from rl_engine.records.pair import read_pair
from rl_engine.records.reader import RunReader
from rl_engine.records.statistics import logprob_statistics
from tests.e2e.harness import Cli, Done, profile


@pytest.fixture(scope="module")
def pair_cli(sources: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    folder = tmp_path_factory.mktemp("pair")
    return Cli(sources, folder, ["--profile", str(profile(folder)), "--model-root", str(model)])


@pytest.fixture(scope="module")
def done(pair_cli: Cli) -> Done:
    return pair_cli("run", "--mode", "paired", "--run-id", "p", "--require-updates", "--require-control")


def test_pair_ends_well_and_leaves_nothing_behind(done: Done, pair_cli: Cli) -> None:
    assert done.code == 0, done.err
    assert done.strays == ()
    # Data on stdout, and nothing else.
    assert done.out == "".join(f"run_dir: {pair_cli.run_dir(name)}\n" for name in ("p-native", "p-consistency"))
    assert "exactly on-policy" in done.err and "the control holds" in done.err
    assert "Traceback" not in done.err
    assert max(map(len, _table(done.err))) <= 80


def _table(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("mode "))
    return lines[start : start + 4]


def test_native_differs_and_consistency_does_not(done: Done, pair_cli: Cli) -> None:
    totals = {}
    for mode in ("native", "consistency"):
        reader = RunReader(pair_cli.run_dir(f"p-{mode}"))
        found = [logprob_statistics(reader.samples(step)) for step in reader.sample_steps()]
        totals[mode] = (sum(f.mismatches for f in found), sum(f.tokens_compared for f in found))
        assert [step.mismatches for step in reader.steps()] == [f.mismatches for f in found]
    assert totals["consistency"][0] == 0
    assert totals["native"][0] >= 0.05 * totals["native"][1]
    assert min(tokens for _, tokens in totals.values()) >= 500


def test_pair_file_says_what_the_runs_hold(done: Done, pair_cli: Cli) -> None:
    pair = read_pair(pair_cli.run_dir("p-pair.json"))
    assert pair.exact and pair.control and pair.same_start
    assert (pair.native.steps, pair.consistency.steps) == (2, 2)
    assert pair.consistency.mismatches == 0 < pair.native.mismatches


def test_both_runs_start_from_the_checkpoint_and_move(done: Done, pair_cli: Cli) -> None:
    first = {}
    for mode in ("native", "consistency"):
        reader = RunReader(pair_cli.run_dir(f"p-{mode}"))
        weights = reader.weights()
        first[mode] = weights[0]
        assert len({record.digest for record in weights.values()}) == 3
        updates = [event.fields for event in reader.events() if event.kind == "update"]
        assert [int(u["changed_elements"]) > 0.5 * int(u["elements"]) for u in updates] == [True, True]
        assert reader.samples(0).samples[0].weight_version == 0
    assert first["native"] == first["consistency"]


def test_prompts_and_first_noise_are_the_same_in_both_runs(done: Done, pair_cli: Cli) -> None:
    batches = [RunReader(pair_cli.run_dir(f"p-{mode}")).samples(0) for mode in ("native", "consistency")]
    prompts = [batch.tokens[batch.loss_mask == 0].tolist() for batch in batches]
    assert prompts[0] == prompts[1]


def test_evidence_is_complete(done: Done, pair_cli: Cli) -> None:
    for mode in ("native", "consistency"):
        reader = RunReader(pair_cli.run_dir(f"p-{mode}"))
        assert [state.name for state in reader.states()] == ["planned", "running", "finished", "valid"]
        assert [finding.status for finding in reader.validations()[0].findings if finding.status == "FAIL"] == []
        assert len(reader.environments()) == 6
        ((place, lines),) = reader.passes().items()
        logged = list(lines)
        assert place == (0, "rollout-0") and {line.step for line in logged} == {0, 1}
        assert (sum(line.pages for line in logged) == 0) == (mode == "native")
        kinds = [event.kind for event in reader.events()]
        assert kinds.count("worker_started") == 2 and kinds.count("weights_loaded") == 3
        memory = next(event for event in reader.events() if event.kind == "memory")
        assert 0 < int(memory.fields["peak_pss_bytes"]) < 6e9
        assert f"{mode:11} step 2/2" in reader.log_tail()


def test_rescore_in_a_fresh_process_gives_the_recorded_bits(done: Done, pair_cli: Cli) -> None:
    again = pair_cli("validate", "--rescore", str(pair_cli.run_dir("p-consistency")))
    assert again.code == 0, again.out + again.err
    assert "[PASS] rescore" in again.out and "[PASS] redraw" in again.out


def test_every_step_whose_weights_are_kept_gives_the_recorded_bits(done: Done, pair_cli: Cli) -> None:
    """Of two steps the first has the checkpoint, and the weights of the second are the only ones to keep."""
    for mode in ("native", "consistency"):
        again = pair_cli("validate", "--rescore", "all", str(pair_cli.run_dir(f"p-{mode}")), "--json")
        assert again.code == 0, again.out + again.err
        found = {finding["name"]: finding["found"] for finding in json.loads(again.out)["findings"]}
        assert found["rescore"].endswith("logprobs of steps 0, 1 equal")
        assert ("redraw" in found) == (mode == "consistency")
    refused = pair_cli("validate", "--rescore", "7", str(pair_cli.run_dir("p-consistency")))
    assert refused.code == 2 and "one of the steps 0, 1" in refused.err


def test_the_run_itself_computed_a_step_again(done: Done, pair_cli: Cli) -> None:
    for mode in ("native", "consistency"):
        findings = RunReader(pair_cli.run_dir(f"p-{mode}")).validations()[0].findings
        status = {finding.name: finding.status for finding in findings}
        assert status["rescore"] == "PASS" and status.get("redraw") == ("PASS" if mode == "consistency" else None)
        assert f"{mode}: fresh process: " in done.err


def test_rescore_sees_a_bit_that_was_flipped_on_both_sides(done: Done, pair_cli: Cli) -> None:
    """The two recorded sides still agree, so only the fresh computation can tell."""
    copy = pair_cli.folder / "flipped"
    shutil.copytree(pair_cli.run_dir("p-consistency"), copy)
    path = copy / "samples" / "step-00000.safetensors"
    tensors = load_file(path)
    place = int(tensors["loss_mask"].nonzero()[0][3])
    for side in ("rollout_logprob", "train_logprob"):
        tensors[side].view("int32")[place] ^= 1
    save_file(tensors, path)
    again = pair_cli("validate", "--rescore", "0", str(copy), "--json")
    assert again.code == 1
    found = {finding["name"]: finding["status"] for finding in json.loads(again.out)["findings"]}
    assert found["rescore"] == "FAIL"


def test_locate_names_the_operator(done: Done, pair_cli: Cli) -> None:
    """The recomputation gives the recorded bits, so the operator that it names is the one that parted then."""
    native, exact = (pair_cli.run_dir(f"p-{mode}") for mode in ("native", "consistency"))
    found = pair_cli("locate", str(native), "--json")
    assert found.code == 1, found.err
    body = json.loads(found.out)
    assert body["repeats_recorded_bits"] is True
    assert body["operator"]["provider_a"] == body["operator"]["provider_b"] == "stock"
    assert body["operator"]["a"] != body["operator"]["b"] and body["operator"]["layer"] in (0, 1)
    assert pair_cli("locate", str(exact)).code == 0
    crossed = json.loads(pair_cli("locate", str(native), str(exact), "--json").out)
    assert crossed["operator"]["provider_a"] == "stock" != crossed["operator"]["provider_b"]
    assert crossed["operator"]["number"] < body["operator"]["number"]


def test_locate_sees_a_changed_record(done: Done, pair_cli: Cli, tmp_path: Path) -> None:
    """Both engines agree when computed again: only the file was changed, and that is what it says."""
    folder = tmp_path / "p-consistency"
    shutil.copytree(pair_cli.run_dir("p-consistency"), folder)
    path = folder / "samples/step-00000.safetensors"
    tensors = load_file(path)
    place = int(tensors["loss_mask"].argmax())
    tensors["train_logprob"].view("uint32")[place] ^= 1
    save_file(tensors, path)
    found = pair_cli("locate", str(folder))
    assert found.code == 1, found.err
    assert "did not give the recorded bits" in found.out and "agree in every bit" in found.out


def test_report_shows_the_pair(done: Done, pair_cli: Cli) -> None:
    assert pair_cli("report", "--json").code == 2  # nothing is sealed, and the commands are printed
    found = pair_cli("report", "--include-unsealed", "--json", "--output", "report")
    assert found.code == 0, found.err
    body = json.loads(found.out)
    pair = read_pair(pair_cli.run_dir("p-pair.json"))
    shown = {run["run_id"]: (run["mismatches"], run["tokens"]) for run in body["runs"]}
    for side in (pair.native, pair.consistency):
        assert shown[side.run_id] == (side.mismatches, side.tokens_compared)
    page = Path(body["report"]).read_text()
    assert f"Exact: 0 of {pair.consistency.tokens_compared:,} logprobs differ" in page
    assert "stock" in page and "cpu" in page and page.count('<svg class="chart"') >= 14


def test_a_pair_on_many_ranks_has_its_control(cli: Cli) -> None:
    layout = ("--tp", "3", "--rollout-tp", "3", "--rollouts", "1", "--max-response-len", "12")
    done = cli("run", "--mode", "paired", "--run-id", "q", "--require-updates", "--require-control", *layout)
    assert done.code == 0, done.err
    assert done.strays == ()
    pair = read_pair(cli.run_dir("q-pair.json"))
    assert pair.exact and pair.consistency.mismatches == 0 < pair.native.mismatches
