"""Small checkpoints on disk, written without torch, for tests of what reads no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rl_engine.families.config import parse_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def write_config(folder: Path, **changes: object) -> Path:
    """``config.json`` of a tiny Llama; a value of None takes the key out."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(body))
    return folder


def write_model(folder: Path, **changes: object) -> Path:
    """The same with its tensors, fp32 zeros."""
    config = parse_config(json.loads((write_config(folder, **changes) / "config.json").read_text()))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in config.tensor_shapes().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
