"""What a checkpoint's ``config.json`` may ask for, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_engine.models.checkpoint import config_json
from rl_engine.models.config import ModelConfig, UnsupportedModel, parse_config, read_config
from tests.helpers.models import LLAMA3_SCALING, llama, qwen3
from tests.helpers.numeric import assert_close

CONFIGS = {
    "llama": llama(),
    "llama tied": llama(tied=True, norm_eps=1e-5),
    "llama 3": llama(rope_scaling=LLAMA3_SCALING, rope_base=5e5),
    "qwen3": qwen3(head_dim=128),
}


def body(**changes: Any) -> dict[str, Any]:
    """A valid Qwen3 ``config.json``; a value of None takes the key out."""
    data = {**config_json(qwen3()), **changes}
    return {key: value for key, value in data.items() if value is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_written_config_is_read_back(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(CONFIGS[name])))
    assert read_config(tmp_path) == CONFIGS[name]


def test_demo_model(smollm2: Path) -> None:
    config = read_config(smollm2)
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert config.tied
    assert not config.qk_norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, r"Mistral.* \(sliding.*\), expected LlamaForCausalLM or Qwen2"),
        ({"architectures": None}, "architecture none"),
        ({"architectures": []}, "architecture none"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"mlp_bias": True}, "mlp_bias is set"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is set"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn', expected default or llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 rope without low_freq_factor"),
        ({"num_key_value_heads": 3}, "16 query heads, 3 KV heads"),
        ({"head_dim": 63}, "expected whole groups"),
        ({"vocab_size": []}, "vocab_size"),
        ({"hidden_size": "cpu"}, "hidden_size 'cpu'"),
        ({"intermediate_size": 10**4000}, "of more than 50 digits"),
        ({"num_hidden_layers": 2**31 - 1}, "from 1 to 4096"),
        ({"num_attention_heads": True}, "num_attention_heads True"),
        ({"rms_norm_eps": float("inf")}, "a finite number"),
        ({"rope_theta": -1}, "rope_theta -1"),
        ({"rope_scaling": [1]}, "expected an object"),
        ({"architectures": ["\x1b[2J"]}, r"\\x1b"),
        *(
            ({key: None}, f"without {key}")
            for key in (
                "num_hidden_layers",
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "vocab_size",
                "rms_norm_eps",
                "max_position_embeddings",
            )
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    assert isinstance(parse_config(body()), ModelConfig)
    with pytest.raises(UnsupportedModel, match=message):
        parse_config(body(**changes))


def test_defaults_of_older_files() -> None:
    """KV heads default to the query heads, the head's width to hidden / heads, the rope base to 10,000."""
    config = parse_config(
        body(num_key_value_heads=None, head_dim=None, rope_theta=None, tie_word_embeddings=None, hidden_act=None)
    )
    assert (config.kv_heads, config.head_dim, config.rope_base, config.tied) == (16, 64, 1e4, False)
    assert parse_config(body(sliding_window=4096, use_sliding_window=False)) == parse_config(body())


@pytest.mark.parametrize("text", ["{", "[]", "3", "", pytest.param("[" * 100_000, id="deep")])
def test_damaged_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_config(tmp_path)


def test_frequencies_without_scaling() -> None:
    frequencies = llama(rope_base=1e4, head_dim=8).inverse_frequencies()
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    assert_close(frequencies, expected, rtol=1e-15, atol=0.0, why="fp64")


def test_llama3_scaling_keeps_fast_and_divides_slow_frequencies() -> None:
    plain = llama(rope_base=5e5).inverse_frequencies()
    scaled = llama(rope_base=5e5, rope_scaling=LLAMA3_SCALING).inverse_frequencies()
    ratio = plain / scaled
    assert ratio[0] == 1.0
    assert_close(ratio[-1:], torch.tensor([8.0]), rtol=1e-15, atol=0.0, why="fp64")
    assert (ratio.diff() >= 0).all()
    assert ((ratio > 1.0) & (ratio < 8.0)).any()
