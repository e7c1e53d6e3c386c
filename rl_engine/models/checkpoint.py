"""Weights in and out of Hugging Face safetensors checkpoints, one file or sharded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_engine.models.config import ModelConfig, read_config
from rl_engine.models.sharding import Sharding
from rl_engine.models.weights import ModelWeights, WeightMismatch
from rl_engine.ops.weight import CPU

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 4 << 30


def _files(folder: Path) -> dict[str, Path]:
    """HF tensor name -> file that holds it."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise WeightMismatch(f"{folder} holds neither {SINGLE} nor {INDEX}")
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightMismatch(f"{folder / INDEX} is no JSON: {error}") from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise WeightMismatch(f"{folder / INDEX} holds no weight_map of tensor names to files")
    for file in names.values():
        if Path(file).name != file or not file.isprintable():
            raise WeightMismatch(f"{folder / INDEX} names {ascii(file)[:100]}, expected a file beside it")
    return {name: folder / file for name, file in names.items()}


def load_weights(
    folder: Path, config: ModelConfig | None = None, sharding: Sharding | None = None, device: torch.device = CPU
) -> ModelWeights:
    """The checkpoint's weights in bf16 on ``device``; with ``sharding`` only that rank's rows are read.

    Raises:
        WeightMismatch: a tensor is missing or of another shape, or a file is damaged.
    """
    config = config or read_config(folder)
    handles = {}
    try:
        files = _files(folder)
        for path in sorted(set(files.values())):
            handles[path] = safe_open(path, framework="pt")

        shapes = config.tensor_shapes()

        def read(name: str, first: int, last: int) -> Tensor:
            if name not in files:
                raise WeightMismatch(f"{folder} holds no tensor {name}")
            rows = handles[files[name]].get_slice(name)
            if tuple(rows.get_shape()) != shapes[name]:
                raise WeightMismatch(f"{name} has shape {tuple(rows.get_shape())}, expected {shapes[name]}")
            return rows[first:last]

        return ModelWeights(config, read, sharding, device)
    except (SafetensorError, OSError) as error:
        raise WeightMismatch(f"{folder}: {error}") from error


def save_tensors(folder: Path, tensors: dict[str, Tensor], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes HF-named tensors as safetensors, with an index when they need more than one file."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and used + size > max_shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor.detach().contiguous().clone()
        used += size
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def config_json(config: ModelConfig) -> dict[str, object]:
    """A ``config.json`` that transformers reads back as the same model."""
    body: dict[str, object] = {
        "architectures": [config.architecture],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": config.tied,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        body["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    return body


def save_checkpoint(folder: Path, weights: ModelWeights, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes ``config.json`` and the weights of an unsharded model; the folder must exist."""
    assert weights.sharding.size == 1
    (folder / "config.json").write_text(json.dumps(config_json(weights.config), indent=1))
    with torch.no_grad():
        save_tensors(folder, weights.export(), max_shard_bytes)
