"""Bad input is one line that names it and exit 2, before anything starts and without a run directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rl_engine.entrypoints.repro import main
from tests.e2e.harness import profile

Run = Callable[..., str]


@pytest.fixture
def refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process, which ends before Ray starts; returns its one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rl_engine.orchestrators.runs._run_all", lambda *_: pytest.fail("the run started"))
    file = profile(tmp_path)

    def run(*arguments: str, model_root: Path = model) -> str:
        code = main(["run", "--profile", str(file), "--model-root", str(model_root), *arguments])
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if not line.startswith("profile small ")]
        assert code == 2, captured.err
        assert captured.out == ""
        assert len(lines) == 1 and lines[0].startswith("rlk-repro: found "), captured.err
        assert "expected" in lines[0] and "hint:" in lines[0]
        runs = tmp_path / ".rlk-workspace" / "data" / "runs" / "convergence"
        assert not runs.exists() or [path.name for path in runs.iterdir()] == ["taken"]
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "0"], "--temperature 0"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--mode", "natve"], "did you mean native?"),
        (["--nonsense", "1"], "--nonsense"),
        (["--rollouts", "0"], "--rollouts 0"),
        (["--top-p", "0"], "--top-p 0"),
        (["--top-k", "264"], "--top-k 264"),
        (["--samples-per-prompt", "1"], "--samples-per-prompt 1"),
        (["--max-tokens-per-gpu", "40"], "--max-tokens-per-gpu"),
        (["--max-tokens-per-gpu", "90", "--fold-tokens", "64"], "--max-tokens-per-gpu 90"),
        (["--max-response-len", "2048"], "--max-response-len 2048"),
        (["--max-response-len", "2000"], "--max-response-len 2000"),
        (["--run-id", "a/b"], "--run-id"),
        (["--prompt-data", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_a_wrong_value_is_named(refused: Run, arguments: list[str], named: str) -> None:
    assert named in refused(*arguments)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"question": "1 + 1?", "answer": "2"}\n{"question": oops\n', "line 2"),
        (b'{"question": "1 + 1?"}\n', 'line 1: no key "answer"'),
        (b'{"question": "\xff", "answer": "2"}\n', "line 1: a byte that is not UTF-8"),
        (b"", "no rows"),
        (b'{"question": "%s", "answer": "2"}\n' % (b"long " * 1000), "a prompt of "),
    ],
)
def test_a_broken_prompt_file_is_named(refused: Run, tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(content)
    assert named in refused("--prompt-data", str(tmp_path / "prompts.jsonl"))


def test_a_long_prompt_of_a_later_step_is_found_before_the_start(refused: Run, tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": f"{n + 1}"} for n in range(39)]
    rows.append({"question": "long " * 1000, "answer": "1"})
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "a prompt of " in refused("--prompt-data", str(file), "--rollouts", "20")


def _without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _cut_vocabulary(folder: Path) -> None:
    """A whole model whose vocabulary is smaller than its tokenizer's."""
    _edit_config(folder, vocab_size=100)
    tensors = load_file(folder / "model.safetensors")
    cut = {name: rows[:100] if "embed" in name or "head" in name else rows for name, rows in tensors.items()}
    save_file({name: rows.contiguous() for name, rows in cut.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without_tokenizer, "no tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "a tokenizer in"),
        (lambda folder: (folder / "generation_config.json").write_text("[1]"), "generation_config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
        (lambda folder: _edit_config(folder, architectures=["MixtralForCausalLM"]), "MixtralForCausalLM"),
        (lambda folder: _edit_config(folder, vocab_size=100), "expected (100, "),
        (_cut_vocabulary, "vocabulary of 100"),
    ],
)
def test_a_model_that_cannot_be_used_is_named(
    refused: Run, model: Path, tmp_path: Path, damage: Callable[[Path], object], named: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    damage(folder)
    assert named in refused(model_root=folder)


def test_a_missing_model_is_named(refused: Run, tmp_path: Path) -> None:
    assert "nowhere" in refused(model_root=tmp_path / "nowhere")


def test_an_existing_run_directory_is_refused(refused: Run, tmp_path: Path) -> None:
    taken = tmp_path / ".rlk-workspace" / "data" / "runs" / "convergence" / "taken"
    taken.mkdir(parents=True)
    assert "already there" in refused("--run-id", "taken")
    assert list(taken.iterdir()) == []
