"""Turns a Llama model in a GGUF file into the files of a Hugging Face checkpoint, without importing torch.

The bf16 weights are bit for bit those that transformers' own GGUF import gives (a nightly test compares every one).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rl_engine.data.gguf_file import GgufError, GgufFile, round_to_bf16

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# What ``tokenizer.ggml.token_type`` says of a token that is never part of text, such as ``<|im_end|>``.
_CONTROL_TOKEN = 3


def hugging_face_name(name: str) -> str:
    """A GGUF tensor's name (``blk.3.attn_q.weight``) in a Hugging Face checkpoint.

    Raises:
        GgufError: the name is no part of a Llama decoder.
    """
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _OUTER_NAMES:
        return f"{_OUTER_NAMES[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise GgufError(f"tensor {name} is no part of a Llama decoder")


def unpermute_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection back in Hugging Face's order.

    GGUF stores each head's rows as rotary pairs (0, d/2, 1, d/2 + 1, ...); Hugging Face keeps the two halves apart.

    Args:
        weight: [heads * d, hidden].
        heads: query heads for the query projection, KV heads for the key projection.

    Returns:
        [heads * d, hidden], same dtype.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def model_config(gguf: GgufFile) -> dict[str, Any]:
    """``config.json`` of the model.

    Both spellings of the rotary base are written: ``rope_theta`` is read by transformers 4, ``rope_parameters`` by 5.

    Raises:
        GgufError: another architecture than Llama, or a missing key.
    """
    metadata = gguf.metadata
    if metadata.get("general.architecture") != "llama":
        raise GgufError(f"the architecture is {metadata.get('general.architecture')!r}, not llama")
    try:
        hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
        rope_theta = float(metadata["llama.rope.freq_base"])
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
            "dtype": "bfloat16",
            "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
            "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": metadata["llama.feed_forward_length"],
            "max_position_embeddings": metadata["llama.context_length"],
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": heads,
            "num_hidden_layers": metadata["llama.block_count"],
            "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
            "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
            "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
            "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
            "rope_theta": rope_theta,
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "use_cache": True,
            "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        }
    except KeyError as error:
        raise GgufError(f"metadata key {error.args[0]} is missing") from error


def _shortest(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 1e-05, where the file's fp32 reads 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def generation_config(gguf: GgufFile) -> dict[str, Any]:
    """``generation_config.json``: the special tokens."""
    config = model_config(gguf)
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def tokenizer(gguf: GgufFile) -> dict[str, Any]:
    """``tokenizer.json``: byte-level BPE that splits numbers into digits, as the SmolLM vocabularies were made.

    Raises:
        GgufError: another kind of vocabulary.
    """
    metadata = gguf.metadata
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise GgufError(f"the tokenizer is {kind[0]}/{kind[1]}, not gpt2/smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **plain, "special": True}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """``tokenizer_config.json``: special tokens and the chat template; read alike by transformers 4 and 5."""
    metadata = gguf.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in special.items()}
    return {
        **named,
        "add_prefix_space": False,
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One JSON object as UTF-8 text, with a newline at its end."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write_weights(gguf: GgufFile, path: Path, progress: Callable[[str], None]) -> None:
    """All tensors as bf16 in one safetensors file, one tensor in memory at a time.

    Args:
        gguf: the source.
        path: the file to write.
        progress: called with a line of text at every tenth of the bytes.

    Raises:
        GgufError: a tensor that is no part of a Llama decoder, or a weight that is not finite.
    """
    config = model_config(gguf)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    order = sorted((hugging_face_name(name), name) for name in gguf.tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for target, name in order:
        shape = gguf.tensors[name].shape
        nbytes = 2 * int(np.prod(shape))
        header[target] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [total, total + nbytes]}
        total += nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    written, next_tenth = 0, 1
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for _, name in order:
            values = gguf.read_fp32(name)
            kind = name.split(".")[-2]
            if kind in heads:
                values = unpermute_heads(values, heads[kind])
            data = round_to_bf16(values).astype("<u2", copy=False)
            stream.write(data.tobytes())
            written += data.nbytes
            if written * 10 >= total * next_tenth:
                next_tenth = written * 10 // total + 1
                progress(f"demo model: weights {written * 100 // total} %")
