"""Shape of a decoder, read from a Hugging Face ``config.json``. What is not supported is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_engine.families import keys
from rl_engine.families.refusal import UnsupportedModel, shown

if TYPE_CHECKING:
    from torch import Tensor

REQUIRED = (
    "num_attention_heads",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
READ = frozenset(REQUIRED) | {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "layer_types",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    *keys.QUANTIZED,
}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SIDECARS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # of quantizers, beside config.json
LARGEST = 2**31 - 1
MOST_LAYERS = 4096
MOST_BYTES = 16 << 20


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

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases, as the architecture says: a field would change other families' digests."""
        return keys.FAMILIES[self.architecture].qkv_bias

    def inverse_frequencies(self) -> Tensor:
        """fp64 [head_dim / 2]."""
        import torch  # which a reader of the shape alone does not need

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
            if self.qkv_bias:
                shapes[prefix + "self_attn.q_proj.bias"] = (self.heads * d,)
                shapes[prefix + "self_attn.k_proj.bias"] = (self.kv_heads * d,)
                shapes[prefix + "self_attn.v_proj.bias"] = (self.kv_heads * d,)
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
    import torch

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
        raise UnsupportedModel(f"{name} {shown(value)} in config.json", f"a whole number from 1 to {most}")
    return value


def _real(data: dict[str, Any], name: str) -> float:
    """A finite number above 0."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < sys.float_info.max:
        raise UnsupportedModel(f"{name} {shown(value)} in config.json", "a finite number above 0")
    return float(value)


def _flag(data: dict[str, Any], name: str) -> bool:
    """False where the key is missing."""
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModel(f"{name} {shown(value)} in config.json", "true or false")
    return value is True


def _rope_of(parameters: object, name: str) -> tuple[float | None, RopeScaling | None]:
    """Base (None where it is not said) and scaling of one object of rope parameters."""
    if not isinstance(parameters, dict):
        raise UnsupportedModel(f"{name} {shown(parameters)}", "an object")
    kinds = {str(parameters[key]) for key in ("rope_type", "type") if parameters.get(key) is not None}
    if len(kinds) > 1:
        raise UnsupportedModel(f"{name} of two types, {shown(sorted(kinds))}", "one", keys.CHOOSE)
    kind = kinds.pop() if kinds else "default"
    if kind not in ("default", "llama3"):
        raise UnsupportedModel(f"rope type {shown(kind)}", "default or llama3", keys.CHOOSE)
    base = None if parameters.get("rope_theta") is None else _real(parameters, "rope_theta")
    known = {"rope_type", "type", "rope_theta", *(LLAMA3 if kind == "llama3" else ())}
    for key, value in parameters.items():
        if key in known or value is None or (key == "partial_rotary_factor" and keys.same(value, 1.0)):
            continue
        feature = keys.OFF[key][1] if key in keys.OFF else "another rotation"
        raise UnsupportedModel(
            f"{name} with {shown(key)} = {shown(value)} ({feature})", f"the parameters of rope type {kind}", keys.CHOOSE
        )
    if kind == "default":
        return base, None
    missing = [key for key in LLAMA3 if parameters.get(key) is None]
    if missing:
        raise UnsupportedModel(f"llama3 rope without {missing[0]}", "all of " + ", ".join(LLAMA3))
    factor, low, high = (_real(parameters, key) for key in LLAMA3[:3])
    if not low < high:
        raise UnsupportedModel(
            f"llama3 rope with low_freq_factor {low} and high_freq_factor {high}", "a lower first one"
        )
    return base, RopeScaling(factor, low, high, _whole(parameters, LLAMA3[3]))


def _rope(data: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; transformers 4 writes ``rope_theta`` and ``rope_scaling``, 5 writes ``rope_parameters``."""
    named = [name for name in ("rope_parameters", "rope_scaling") if data.get(name) not in (None, {})]
    found = [_rope_of(data[name], name) for name in named]
    if len({scaling for _, scaling in found}) > 1:
        raise UnsupportedModel("rope_parameters and rope_scaling that differ", "one of them, or both alike")
    bases = {base for base, _ in found if base is not None}
    if data.get("rope_theta") is not None:
        bases.add(_real(data, "rope_theta"))
    if len(bases) > 1:
        raise UnsupportedModel(f"rope_theta {' and '.join(map(str, sorted(bases)))}", "one value")
    return bases.pop() if bases else 10000.0, found[0][1] if found else None


def _refuse_layer_types(data: dict[str, Any], layers: int) -> None:
    kinds = data.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UnsupportedModel(f"layer_types {shown(kinds)}", f"a list of {layers}")
    other = next((kind for kind in kinds if kind != "full_attention"), None)
    if other is not None:
        feature = "sliding-window attention" if other == "sliding_attention" else "layers of another kind"
        raise UnsupportedModel(f"layer_types with {shown(other)} ({feature})", "'full_attention' alone", keys.CHOOSE)


def parse_config(data: dict[str, Any]) -> ModelConfig:
    """From the content of ``config.json``.

    Raises:
        UnsupportedModel: another architecture, quantized weights, a feature that the decoder does not compute, a key
            that nothing reads, or one that is missing or no sensible value.
    """
    keys.refuse_quantized(data)
    architecture, family = keys.family_of(data)
    keys.refuse_unread(data, READ)
    for name in REQUIRED:
        if name not in data:
            raise UnsupportedModel(f"config.json without {name}", "a complete config.json")
    heads, hidden = _whole(data, "num_attention_heads"), _whole(data, "hidden_size")
    layers = _whole(data, "num_hidden_layers", most=MOST_LAYERS)
    _refuse_layer_types(data, layers)
    base, scaling = _rope(data)
    config = ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=_whole(data, "intermediate_size"),
        heads=heads,
        kv_heads=_whole(data, "num_key_value_heads", heads),
        head_dim=_whole(data, "head_dim", max(1, hidden // heads)),
        vocabulary=_whole(data, "vocab_size"),
        tied=_flag(data, "tie_word_embeddings"),
        qk_norm=family.qk_norm,
        norm_eps=_real(data, "rms_norm_eps"),
        rope_base=base,
        rope_scaling=scaling,
        max_positions=_whole(data, "max_position_embeddings"),
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        found = f"{config.heads} query heads, {config.kv_heads} KV heads of {config.head_dim}"
        raise UnsupportedModel(found, "whole groups")
    return config


def read_config(folder: Path) -> ModelConfig:
    """From ``folder/config.json``.

    Raises:
        UnsupportedModel: see :func:`parse_config`; also a file that is no JSON object, or a quantizer's file beside it.
        OSError: no such file, or one that cannot be read.
    """
    file = folder / "config.json"
    with file.open("rb") as stream:
        body = stream.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise UnsupportedModel(f"{file} of more than {MOST_BYTES} bytes", "a Hugging Face config.json")
    try:
        data = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file} is no JSON: {error}", "a Hugging Face config.json") from error
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{file} holds no object", "a Hugging Face config.json")
    config = parse_config(data)
    for name in SIDECARS:
        if (folder / name).exists():
            raise keys.quantized(f"what {name} beside config.json says")
    return config
