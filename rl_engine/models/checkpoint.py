"""Weights in and out of Hugging Face safetensors checkpoints, one file or sharded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_engine.families.keys import FAMILIES
from rl_engine.families.tensors import HEAD, INDEX, SINGLE, check_headers, read_headers
from rl_engine.models.config import ModelConfig, read_config
from rl_engine.models.sharding import Sharding
from rl_engine.models.weights import ModelWeights, WeightMismatch
from rl_engine.ops.weight import CPU

EMBEDDING = "model.embed_tokens.weight"
MAX_SHARD_BYTES = 4 << 30


def load_weights(
    folder: Path, config: ModelConfig | None = None, sharding: Sharding | None = None, device: torch.device = CPU
) -> ModelWeights:
    """The checkpoint's weights in bf16 on ``device``; with ``sharding`` only that rank's rows are read.

    Raises:
        WeightMismatch: a tensor is missing, unread, of another shape or of a type that is no plain float; a tied head
            beside an embedding that differs; or a file is damaged.
    """
    config = config or read_config(folder)
    headers = read_headers(folder)
    check_headers(config, headers, folder)
    try:
        handles = {path: safe_open(path, framework="pt") for path in {header.file for header in headers.values()}}

        def read(name: str, first: int, last: int) -> Tensor:
            rows: Tensor = handles[headers[name].file].get_slice(name)[first:last]
            if config.tied and name == EMBEDDING and HEAD in headers:
                _same_head(rows, handles[headers[HEAD].file].get_slice(HEAD)[first:last])
            return rows

        return ModelWeights(config, read, sharding, device)
    except (SafetensorError, OSError) as error:
        raise WeightMismatch(f"{folder}: {error}") from error


def _same_head(embedding: Tensor, head: Tensor) -> None:
    """A checkpoint that says its head is the embedding and holds another one means one of the two."""
    if not torch.equal(embedding.bfloat16().view(torch.int16), head.bfloat16().view(torch.int16)):
        raise WeightMismatch(
            f"a {HEAD} that is not {EMBEDDING}, with tie_word_embeddings true",
            "the same values, or none of it",
            "set tie_word_embeddings to false in config.json if the model has a head of its own",
        )


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
        "model_type": FAMILIES[config.architecture].model_type,
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
