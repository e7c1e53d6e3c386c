"""A key with meaning that nothing reads was dropped in silence, and another model was trained. Each is refused now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_engine.families import keys
from rl_engine.families.config import READ, parse_config, read_config
from rl_engine.families.refusal import UnsupportedModel
from tests.helpers.checkpoints import LLAMA, write_config
from tests.unit.families.public import ACCEPTED, LLAMA3_ROPE

QWEN3 = ACCEPTED["Qwen3 0.6B"]
NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def refusal(body: dict[str, Any]) -> UnsupportedModel:
    parse_config(LLAMA)
    with pytest.raises(UnsupportedModel) as caught:
        parse_config(body)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of another kind"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"sliding_window": 4096}, "sliding-window attention"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding-window attention"),
        ({"use_sliding_window": 1}, "sliding-window attention"),
        ({"partial_rotary_factor": 0.5}, "rotation of a part of each head"),
        ({"rope_interleaved": True}, "neighbouring pairs"),
        ({"use_mrope": True}, "several positions"),
        ({"attn_logit_softcapping": 50.0}, "softcaps"),
        ({"final_logit_softcapping": 30.0}, "softcaps"),
        ({"embedding_multiplier": 12.0}, "multipliers"),
        ({"residual_multiplier": 0.22}, "multipliers"),
        ({"attention_multiplier": 0.0156}, "multipliers"),
        ({"logits_scaling": 8.0}, "multipliers"),
        ({"logit_scale": 0.0625}, "multipliers"),
        ({"query_pre_attn_scalar": 256}, "scale of the scores"),
        ({"no_rope_layers": [0, 1]}, "layers without rotation"),
        ({"num_experts": 8}, "experts"),
        ({"attention_dropout": 0.1}, "dropout"),
        ({"attention_bias": "yes"}, "biases"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings 1"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings 'true'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"chunk_size_feed_forward": 128}, "chunk_size_feed_forward"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "code of the checkpoint's own"),
        ({"text_config": {"hidden_size": 64}}, "several parts"),
        ({"use_rope": False}, "key 'use_rope' = False"),
        ({"clip_qkv": 8.0}, "key 'clip_qkv' = 8.0"),
        ({"\x1b[2J" * 50: 1}, r"key '\x1b[2J"),
        ({"model_type": "mistral"}, "model_type 'mistral' of LlamaForCausalLM"),
        ({"architectures": ["LlamaForCausalLM", "GemmaForCausalLM"]}, "2 architectures"),
        ({"rope_parameters": NESTED}, "full_attention"),
        ({"rope_scaling": NESTED}, "full_attention"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "a part of each",
        ),
        ({"rope_scaling": {"rope_type": "default", "factor": 8.0}}, "factor"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_scaling": {**LLAMA3_ROPE, "attention_factor": 1.2}}, "attention_factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "type": "linear"}}, "two types"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor 4.0"),
        ({"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default"}}, "that differ"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "10000.0 and 1000000.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized by fp8"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "quantized by bitsandbytes"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "quantized by NVFP4"),
        ({"quantization_config": "gptq"}, "an unnamed method (quantization_config)"),
        ({"compression_config": {"format": "int-quantized"}}, "quantized by int-quantized"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantized by 4 bits"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
    ids=lambda value: str(value)[:50].encode("unicode_escape").decode(),
)
def test_a_key_with_meaning_is_refused(changes: dict[str, Any], words: str) -> None:
    error = refusal({**LLAMA, **changes})
    assert words in error.found, error
    assert len(error.found) < 300
    assert error.found.isprintable()
    assert error.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"] * 2},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None},
        {"unheard_of": None},
        {"quantization_config": None},
        {"partial_rotary_factor": 1.0, "logits_scaling": 1, "embedding_multiplier": 1.0, "use_mrope": False},
        {"torch_dtype": "float32", "dtype": "torch.float16"},
        {"temperature": 0.6, "eos_token_id": [1, 2], "pretraining_tp": 2, "_name_or_path": "x", "use_cache": False},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"type": "default", "rope_theta": 1e4}},
        {"rope_scaling": {}, "rope_theta": None, "rope_parameters": None},
    ],
    ids=str,
)
def test_a_key_without_meaning_changes_nothing(changes: dict[str, Any]) -> None:
    assert parse_config({**LLAMA, **changes}) == parse_config(LLAMA)


def test_the_tables_do_not_overlap_and_give_reasons() -> None:
    tables = [set(keys.IGNORED), set(keys.DEFAULTS), set(keys.OFF), set(keys.FEATURES), set(READ)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert all(len(reason) > 5 for reason in keys.IGNORED.values())


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_a_quantizer_s_file_beside_the_config(name: str, tmp_path: Path) -> None:
    assert read_config(write_config(tmp_path)) == parse_config(LLAMA)
    (tmp_path / name).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(UnsupportedModel, match=name):
        read_config(tmp_path)


def test_the_family_says_its_norms() -> None:
    assert parse_config(QWEN3).qk_norm
    assert not parse_config(LLAMA).qk_norm
