"""Shape of a decoder, read from a Hugging Face ``config.json``. What is not supported is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
REQUIRED = ("num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
REQUIRED += ("rms_norm_eps", "max_position_embeddings")
LARGEST = 2**31 - 1
MOST_LAYERS = 4096


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that the decoder does not compute."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements; ``qk_norm`` is Qwen3's RMSNorm of every query and key head."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    qk_norm: bool
    norm_eps: float
    rope_base: float
    rope_scaling: RopeScaling | None
    max_positions: int

    def inverse_frequencies(self) -> Tensor:
        """fp64 [head_dim / 2]."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        frequencies = 1.0 / self.rope_base**exponents
        return frequencies if self.rope_scaling is None else _scale(frequencies, self.rope_scaling)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """HF tensor name -> shape, in canonical order."""
        h, d = self.hidden, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, h)}
        for i in range(self.layers):
            prefix = f"model.layers.{i}."
            shapes[prefix + "input_layernorm.weight"] = (h,)
            shapes[prefix + "self_attn.q_proj.weight"] = (self.heads * d, h)
            shapes[prefix + "self_attn.k_proj.weight"] = (self.kv_heads * d, h)
            shapes[prefix + "self_attn.v_proj.weight"] = (self.kv_heads * d, h)
            if self.qk_norm:
                shapes[prefix + "self_attn.q_norm.weight"] = (d,)
                shapes[prefix + "self_attn.k_norm.weight"] = (d,)
            shapes[prefix + "self_attn.o_proj.weight"] = (h, self.heads * d)
            shapes[prefix + "post_attention_layernorm.weight"] = (h,)
            shapes[prefix + "mlp.gate_proj.weight"] = (self.intermediate, h)
            shapes[prefix + "mlp.up_proj.weight"] = (self.intermediate, h)
            shapes[prefix + "mlp.down_proj.weight"] = (h, self.intermediate)
        shapes["model.norm.weight"] = (h,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, h)
        return shapes


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_positions / scaling.low_freq_factor
    high = scaling.original_positions / scaling.high_freq_factor
    smooth = (scaling.original_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths >= high) & (wavelengths <= low), blended, scaled)


def _whole(data: dict[str, Any], name: str, otherwise: int | None = None, most: int = LARGEST) -> int:
    """A whole number in [1, ``most``]; null and, with ``otherwise``, a missing key give ``otherwise``."""
    value = data.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedModel(f"{name} {_shown(value)} in config.json, expected a whole number from 1 to {most}")
    return value


def _real(data: dict[str, Any], name: str, otherwise: float | None = None) -> float:
    """A finite number above 0."""
    value = data.get(name)
    if value is None and otherwise is not None:
        return otherwise
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < sys.float_info.max:
        raise UnsupportedModel(f"{name} {_shown(value)} in config.json, expected a finite number above 0")
    return float(value)


def _shown(value: object) -> str:
    """At most 60 printable characters of a stranger's value."""
    if isinstance(value, int) and abs(value) >= 10**50:
        return "of more than 50 digits"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _rope(data: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    parameters = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise UnsupportedModel(f"rope parameters {_shown(parameters)}, expected an object")
    base = _real(parameters, "rope_theta", _real(data, "rope_theta", 10000.0))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise UnsupportedModel(f"rope type {_shown(kind)}, expected default or llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in parameters]
    if missing:
        raise UnsupportedModel(f"llama3 rope without {missing[0]}")
    factor, low, high = (_real(parameters, name) for name in names[:3])
    return base, RopeScaling(factor, low, high, _whole(parameters, names[3]))


def parse_config(data: dict[str, Any]) -> ModelConfig:
    """From the content of ``config.json``.

    Raises:
        UnsupportedModel: another architecture, biases, a sliding window, or a key that is missing or no sensible size.
    """
    named = data.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "none"
    if architecture not in ARCHITECTURES:
        shown = architecture if isinstance(architecture, str) and architecture.isidentifier() else _shown(architecture)
        raise UnsupportedModel(f"architecture {shown}, expected {' or '.join(ARCHITECTURES)}")
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if data.get(flag):
            raise UnsupportedModel(f"{flag} is set, expected a decoder without it")
    if data.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {_shown(data['hidden_act'])}, expected 'silu'")
    for name in REQUIRED:
        if name not in data:
            raise UnsupportedModel(f"config.json without {name}")
    heads, hidden = _whole(data, "num_attention_heads"), _whole(data, "hidden_size")
    base, scaling = _rope(data)
    config = ModelConfig(
        architecture=architecture,
        layers=_whole(data, "num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        intermediate=_whole(data, "intermediate_size"),
        heads=heads,
        kv_heads=_whole(data, "num_key_value_heads", heads),
        head_dim=_whole(data, "head_dim", max(1, hidden // heads)),
        vocabulary=_whole(data, "vocab_size"),
        tied=data.get("tie_word_embeddings") is True,
        qk_norm=architecture == "Qwen3ForCausalLM",
        norm_eps=_real(data, "rms_norm_eps"),
        rope_base=base,
        rope_scaling=scaling,
        max_positions=_whole(data, "max_position_embeddings"),
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise UnsupportedModel(
            f"{config.heads} query heads, {config.kv_heads} KV heads of {config.head_dim}, expected whole groups"
        )
    return config


def read_config(folder: Path) -> ModelConfig:
    """From ``folder/config.json``.

    Raises:
        UnsupportedModel: see :func:`parse_config`; also a file that is no JSON object.
        FileNotFoundError: no such file.
    """
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{folder / 'config.json'} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{folder / 'config.json'} holds no object")
    return parse_config(data)
