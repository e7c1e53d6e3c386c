"""Writes a small Llama GGUF file built like the demo model's: Q8_0 embedding, Q4_1 projections, F32 norms."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 2, 1, 96, 2
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_ALPHABET = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
TOKENS = [*_SPECIAL, *_ALPHABET, "ab", "abc"]
MERGES = ["a b", "ab c"]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _pair(key: str, value: object) -> bytes:
    head = _string(key)
    match value:
        case str():
            return head + struct.pack("<I", 8) + _string(value)
        case float():
            return head + struct.pack("<If", 6, value)
        case int():
            return head + struct.pack("<II", 4, value)
        case [str(), *_]:
            return head + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case list():
            return head + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    raise AssertionError(key)


def metadata() -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 100000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3 if token in _SPECIAL else 1 for token in TOKENS],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def _tensors(seed: int) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Name to (type id, row-major shape, bytes)."""
    draw = np.random.default_rng(seed)

    def quantized(kind: int, rows: int, columns: int) -> tuple[int, tuple[int, ...], bytes]:
        blocks = rows * columns // 32
        scales = draw.normal(0, 0.02, (blocks, 2 if kind == 3 else 1)).astype("<f2").view(np.uint8)
        quants = draw.integers(0, 256, (blocks, 16 if kind == 3 else 32), dtype=np.uint8)
        return kind, (rows, columns), np.concatenate([scales, quants], axis=1).tobytes()

    def norm() -> tuple[int, tuple[int, ...], bytes]:
        return 0, (HIDDEN,), draw.normal(1, 0.1, HIDDEN).astype("<f4").tobytes()

    head = HIDDEN // HEADS
    tensors = {"token_embd.weight": quantized(8, len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        sizes = {"q": HEADS * head, "k": KV_HEADS * head, "v": KV_HEADS * head, "output": HIDDEN}
        for name, rows in sizes.items():
            tensors[f"blk.{layer}.attn_{name}.weight"] = quantized(3, rows, HIDDEN)
        tensors[f"blk.{layer}.ffn_gate.weight"] = quantized(3, FFN, HIDDEN)
        tensors[f"blk.{layer}.ffn_up.weight"] = quantized(3, FFN, HIDDEN)
        tensors[f"blk.{layer}.ffn_down.weight"] = quantized(3, HIDDEN, FFN)
        tensors[f"blk.{layer}.attn_norm.weight"] = norm()
        tensors[f"blk.{layer}.ffn_norm.weight"] = norm()
    tensors["output_norm.weight"] = norm()
    return tensors


def write_tiny_gguf(path: Path, seed: int = 0, changes: dict[str, object] | None = None) -> Path:
    """Writes the file; ``changes`` replace metadata values."""
    pairs = {**metadata(), **(changes or {})}
    tensors = _tensors(seed)
    front = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    front += b"".join(_pair(key, value) for key, value in pairs.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        axes = tuple(reversed(shape))
        front += _string(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(front + b"\0" * (-len(front) % 32) + data)
    return path
