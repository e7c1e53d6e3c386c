"""Weights in and out of safetensors checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_engine.models.checkpoint import INDEX, SINGLE, load_weights, save_checkpoint
from rl_engine.models.weights import ModelWeights, WeightMismatch, random_weights
from tests.helpers.models import llama, qwen3
from tests.helpers.numeric import assert_bitwise

SMALL = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocabulary": 75, "layers": 2}
CONFIGS = {"qwen3": qwen3(**SMALL), "qwen3 tied": qwen3(tied=True, **SMALL), "llama": llama(**SMALL)}


def check_equal(actual: ModelWeights, expected: ModelWeights) -> None:
    """The same config, names, order and bits."""
    assert actual.config == expected.config
    a, e = actual.export(), expected.export()
    assert list(a) == list(e) == list(expected.config.tensor_shapes())
    for name, values in e.items():
        assert_bitwise(a[name], values, name)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000, 1])
def test_round_trip(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    weights = random_weights(CONFIGS[name], 3)
    save_checkpoint(tmp_path, weights, max_shard_bytes)
    check_equal(load_weights(tmp_path), weights)
    files = sorted(tmp_path.glob("*.safetensors"))
    if max_shard_bytes == 1 << 30:
        assert [file.name for file in files] == [SINGLE]
        return
    names = [set(load_file(file)) for file in files]
    index = json.loads((tmp_path / INDEX).read_text())
    assert len(files) > 2
    assert set().union(*names) == set(weights.export()) == set(index["weight_map"])
    assert sum(map(len, names)) == len(index["weight_map"]), "a tensor was written twice"
    assert index["metadata"]["total_size"] == sum(2 * values.numel() for values in weights.export().values())
    if max_shard_bytes == 1:
        assert len(files) == len(index["weight_map"])
        return
    for file, held in zip(files, names, strict=True):
        assert len(held) == 1 or file.stat().st_size < max_shard_bytes + 4096


def test_other_dtypes_are_rounded_to_bf16(tmp_path: Path) -> None:
    weights = random_weights(CONFIGS["qwen3"], 3)
    save_checkpoint(tmp_path, weights)
    wide = {name: values.float() * (1.0 + 2.0**-12) for name, values in load_file(tmp_path / SINGLE).items()}
    save_file(wide, tmp_path / SINGLE)
    loaded = load_weights(tmp_path).export()
    for name, values in wide.items():
        assert_bitwise(loaded[name], values.bfloat16(), name)


def test_demo_model_round_trip(smollm2: Path, tmp_path: Path) -> None:
    weights = load_weights(smollm2)
    save_checkpoint(tmp_path, weights, 100 << 20)
    assert (tmp_path / INDEX).is_file()
    check_equal(load_weights(tmp_path), weights)


def saved(folder: Path, max_shard_bytes: int = 1 << 30) -> Path:
    save_checkpoint(folder, random_weights(CONFIGS["qwen3"], 3), max_shard_bytes)
    return folder


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = load_file(saved(tmp_path) / SINGLE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(WeightMismatch, match=r"holds no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_weights(tmp_path)


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = load_file(saved(tmp_path) / SINGLE)
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight .*65.*expected .*64"):
        load_weights(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    (saved(tmp_path) / SINGLE).unlink()
    with pytest.raises(WeightMismatch, match="holds neither"):
        load_weights(tmp_path)


def test_damaged_file(tmp_path: Path) -> None:
    path = saved(tmp_path) / SINGLE
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(WeightMismatch):
        load_weights(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    saved(tmp_path, 20_000)
    next(iter(tmp_path.glob("model-00002-*"))).unlink()
    with pytest.raises(WeightMismatch, match="model-00002-of-"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../model.safetensors"}}'],
)
def test_damaged_index(tmp_path: Path, index: str) -> None:
    (saved(tmp_path) / INDEX).write_text(index)
    with pytest.raises(WeightMismatch, match=r"index\.json"):
        load_weights(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_quantized_weights_are_no_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    """They were read without their scales, and the run trained garbage with formal evidence."""
    tensors = load_file(saved(tmp_path) / SINGLE)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(dtype)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(WeightMismatch, match=r"up_proj\.weight holds [FIU]8.*expected BF16 or F16 or F32"):
        load_weights(tmp_path)


def test_a_tensor_that_nothing_reads(tmp_path: Path) -> None:
    tensors = load_file(saved(tmp_path) / SINGLE)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, tmp_path / SINGLE)
    with pytest.raises(WeightMismatch, match=r"a bias, model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_weights(tmp_path)
    save_file({**tensors, "model.rotary_emb.inv_freq": torch.ones(8)}, tmp_path / SINGLE)
    check_equal(load_weights(tmp_path), random_weights(CONFIGS["qwen3"], 3))


def test_the_second_copy_of_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    weights = random_weights(CONFIGS["qwen3 tied"], 3)
    save_checkpoint(tmp_path, weights)
    tensors = load_file(tmp_path / SINGLE)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / SINGLE)
    check_equal(load_weights(tmp_path), weights)
    head[74, 63] *= 2
    save_file({**tensors, "lm_head.weight": head}, tmp_path / SINGLE)
    with pytest.raises(WeightMismatch, match="tie_word_embeddings"):
        load_weights(tmp_path)
