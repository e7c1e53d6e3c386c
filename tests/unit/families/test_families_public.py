"""Public model families: which are accepted, and which words refuse the others, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_engine.entrypoints.repro import main
from rl_engine.families.config import parse_config
from rl_engine.families.refusal import UnsupportedModel
from tests.unit.families.public import ACCEPTED, REFUSED

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    body = ACCEPTED[name]
    config = parse_config(body)
    assert (config.layers, config.hidden, config.vocabulary, config.tied) == tuple(
        body[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings")
    )
    assert config.rope_base == body.get("rope_theta", body.get("rope_parameters", {}).get("rope_theta", 10000.0))
    assert (config.rope_scaling is not None) == ((body.get("rope_scaling") or {}).get("rope_type") == "llama3")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, words = REFUSED[name]
    with pytest.raises(UnsupportedModel) as caught:
        parse_config(body)
    assert words in caught.value.found
    assert "Llama" in caught.value.hint or "dequantized" in caught.value.hint


@pytest.mark.parametrize("name", ["Gemma 2 2B", "Phi-3 mini", "Mixtral 8x7B", "Qwen3 30B-A3B", "Qwen3 8B with yarn"])
@pytest.mark.parametrize("verb", ["plan", "doctor", "run"])
def test_refused_in_one_line_before_the_start(
    verb: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each was planned as formal evidence, and only a run's workers refused it."""
    monkeypatch.chdir(tmp_path)
    body, words = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(body))
    assert main([verb, "--model-root", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("rlk-repro: found ") and said.err.count("\n") == 1
    assert words in said.err and "--model-root" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def check_defaults(defaults: dict[str, object]) -> None:
    for body in ACCEPTED.values():
        assert parse_config({**defaults, **body}) == parse_config(body)


def test_every_default_of_transformers_4_56_is_ignored() -> None:
    """The file is what ``PretrainedConfig().to_dict()`` of 4.56.0 gives."""
    defaults = json.loads((HERE / "transformers_4_56.json").read_text())
    assert len(defaults) == 56
    check_defaults(defaults)


def test_every_default_of_the_installed_transformers_is_ignored() -> None:
    transformers = pytest.importorskip("transformers")
    check_defaults(json.loads(json.dumps(transformers.PretrainedConfig().to_dict())))
    for name in ("Llama", "Qwen3"):
        for written in ("to_dict", "to_diff_dict"):
            config = getattr(transformers, f"{name}Config")(architectures=[f"{name}ForCausalLM"])
            parse_config(json.loads(json.dumps(getattr(config, written)())))
