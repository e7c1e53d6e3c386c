"""Runs with other settings, prompts and surroundings; each ends with 0 mismatches or says what is the matter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rl_engine.orchestrators.tokens import Tokenizer
from rl_engine.records.reader import RunReader
from tests.e2e.harness import Cli, Done, profile, save_model

pytestmark = pytest.mark.slow


def check_exact(cli: Cli, done: Done, steps: int = 2, run_dir: Path | None = None) -> RunReader:
    assert done.code == 0, done.err
    assert done.strays == ()
    reader = RunReader(run_dir or cli.run_dir("r"))
    assert [record.name for record in reader.states()] == ["planned", "running", "finished", "valid"]
    assert [record.mismatches for record in reader.steps()] == [0] * steps
    return reader


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kl-coef", "0.01"],
        ["--temperature", "0.7", "--top-p", "0.95", "--top-k", "20"],
        ["--grpo-std-normalization", "disabled", "--temperature", "1.3", "--top-p", "0.8"],
        ["--data-source", "arithmetic"],
        # One fold unit a micro-batch; then batches of no round size, on another number of threads.
        ["--max-tokens-per-gpu", "130", "--fold-tokens", "1"],
        ["--rollout-batch-size", "3", "--samples-per-prompt", "5", "--max-response-len", "1", "--threads", "2"],
        ["--rollout-batch-size", "1", "--samples-per-prompt", "67", "--max-response-len", "3"],
    ],
    ids=["kl", "filters", "plain-advantages", "arithmetic", "small-batches", "odd-sizes", "more-than-a-batch"],
)
def test_settings_stay_exact(cli: Cli, arguments: list[str]) -> None:
    check_exact(cli, cli("run", "--run-id", "r", *arguments))


def test_a_stop_text_ends_its_responses(cli: Cli, model: Path) -> None:
    stops = [chr(letter) for letter in range(97, 123)]
    check_exact(cli, cli("run", "--run-id", "r", "--stop", json.dumps(stops)))
    decode = Tokenizer(model).decode
    batch, ended = RunReader(cli.run_dir("r")).samples(0), 0
    for index, sample in enumerate(batch.samples):
        rows = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
        response = batch.tokens[rows][batch.loss_mask[rows] == 1].tolist()
        assert not any(stop in decode(response[:-1]) for stop in stops), "it went on"
        ended += sample.finish_reason == "stop" and decode(response)[-1:] in stops
    assert ended > 0


def test_native_alone_reports_its_mismatches_as_json(cli: Cli) -> None:
    done = cli("run", "--run-id", "r", "--mode", "native", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found == {"status": "succeeded", "submission_id": "r", "run_dir": str(cli.run_dir("r"))}
    assert sum(record.mismatches for record in RunReader(cli.run_dir("r")).steps()) > 0


def test_a_pair_without_a_control_warns_and_fails_where_one_is_required(cli: Cli, sources: Path) -> None:
    """Native with our own operators, by the profile's table, has no mismatch to show."""
    path = cli.folder / "profile.json"
    body = json.loads(path.read_text())
    operators = [
        "embedding",
        "linear",
        "rms_norm",
        "qk_norm",
        "rope",
        "attention",
        "swiglu",
        "lm_head",
        "selected_logp",
    ]
    ours = dict.fromkeys(operators, "cpu")
    body["modes"] = {"native": {"providers": {"train": ours, "rollout": ours}}, "consistency": {}}
    path.write_text(json.dumps(body))
    done = cli("run", "--run-id", "r", "--mode", "paired", "--json")
    assert done.code == 0, done.err
    assert "proves nothing" in done.err
    found = json.loads(done.out)
    assert found["submission_id"] == "r" and found["run_dir"] == str(cli.run_dir("r-consistency"))
    assert found["pair"] == str(cli.run_dir("r-pair.json"))
    assert [run["submission_id"] for run in found["runs"]] == ["r-native", "r-consistency"]
    assert cli("run", "--run-id", "s", "--mode", "paired", "--require-control").code == 1


def test_empty_responses_and_equal_rewards_are_said(cli: Cli, model: Path, tmp_path: Path) -> None:
    """Every token ends a response: each is empty, every reward 0."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(300))}))
    (tmp_path / "hard.jsonl").write_text('{"question": "2 x 2?", "answer": "4"}\n')
    done = cli("run", "--run-id", "r", "--model-root", str(folder), "--prompt-data", str(tmp_path / "hard.jsonl"))
    reader = check_exact(cli, done)
    assert "step 1: 24 responses end at once" in done.err
    assert "all advantages are 0" in done.err
    kinds = [event.kind for event in reader.events()]
    assert kinds.count("empty_responses") == kinds.count("zero_advantages") == 2
    assert [record.tokens_compared for record in reader.steps()] == [24, 24]


def test_prompts_in_every_script_and_longer_than_a_prefill_chunk(cli: Cli, tmp_path: Path) -> None:
    rows = [
        {"question": "½ + ½ = ? 你好 😀 \u2028 \u202e שלום", "answer": "1"},
        {"question": "1 + 1 = ? " * 90, "answer": "2"},
        {"prompt": [{"role": "user", "content": "2 + 2?"}], "label": "4", "more": "x" * 1_000_000},
    ]
    file = tmp_path / "prompts ü.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    arguments = ["--prompt-data", str(file), "--rollout-batch-size", "3", "--samples-per-prompt", "2"]
    reader = check_exact(cli, cli("run", "--run-id", "r", *arguments, "--max-tokens-per-gpu", "2000"))
    batch = reader.samples(0)
    assert max(batch.offsets[1:] - batch.offsets[:-1]) > 900


def test_folders_with_spaces_and_other_scripts(sources: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my möbius 文件夹"
    folder.mkdir()
    shutil.copytree(sources, folder / "the sources")
    shutil.copytree(model, folder / "the model é")
    base = ["--profile", str(profile(folder)), "--model-root", str(folder / "the model é")]
    cli = Cli(folder / "the sources", folder, base)
    done = cli("run", "--run-id", "r", "--workspace", str(folder / "work space"))
    check_exact(cli, done, run_dir=folder / "work space" / "data" / "runs" / "convergence" / "r")


def test_a_long_temporary_folder(cli: Cli, tmp_path: Path) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    check_exact(cli, cli("run", "--run-id", "r", env={"TMPDIR": str(long)}))
    assert list(long.glob("rlk-*")) == []


def test_two_runs_at_once_in_one_workspace(cli: Cli) -> None:
    both = [cli.start("run", "--run-id", name) for name in ("r", "s")]
    for command, name in zip(both, ("r", "s"), strict=True):
        check_exact(cli, command.finish(), run_dir=cli.run_dir(name))


def test_llama_with_an_untied_head_in_shards(cli: Cli, tmp_path: Path) -> None:
    from rl_engine.models.checkpoint import load_weights, save_checkpoint

    folder = save_model(tmp_path / "llama", family="llama", layers=3)
    weights = load_weights(folder)
    (folder / "model.safetensors").unlink()
    save_checkpoint(folder, weights, max_shard_bytes=2_000_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    check_exact(cli, cli("run", "--run-id", "r", "--model-root", str(folder)))
