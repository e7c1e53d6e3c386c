"""What each key of a ``config.json`` means for the decoder: read, off, at its default, or of no meaning to the logits.

A key in none of these tables is refused: a meaning that nobody reads would change what the model computes in silence.
A new family is a row of ``FAMILIES``; a key that it reads becomes a field of ``ModelConfig``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rl_engine.families.refusal import UnsupportedModel, shown


@dataclasses.dataclass(frozen=True)
class Family:
    """One supported architecture: ``model_type`` is transformers' name of its config."""

    model_type: str
    qk_norm: bool = False  # an RMSNorm of every query and key head
    qkv_bias: bool = False  # biases of q, k and v


FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True),
}
SUPPORTED = " or ".join(FAMILIES)
CHOOSE = "choose a dense Llama (2, 3, 3.1, 3.2), Qwen2, Qwen2.5 or Qwen3 checkpoint as --model-root"

# What keeps a well-known architecture out.
_OTHER = {
    "Mistral": "sliding-window attention",
    "Ministral": "sliding-window attention",
    "Mixtral": "experts",
    "Qwen2Moe": "experts",
    "Qwen3Moe": "experts",
    "Qwen3Next": "experts and linear attention",
    "Olmoe": "experts",
    "PhiMoE": "experts",
    "Phimoe": "experts",
    "GptOss": "experts, biases, attention sinks and sliding layers",
    "GraniteMoe": "experts and multipliers",
    "Glm4Moe": "experts and rotation of a part of each head",
    "Deepseek": "experts",
    "DeepseekV2": "experts and latent attention",
    "DeepseekV3": "experts and latent attention",
    "Gemma": "norms that add 1 to their gain, scaled embeddings and GELU",
    "Gemma2": "softcaps, sliding layers and norms after each block",
    "Gemma3": "sliding layers, two rotary bases and norms after each block",
    "Phi": "biases, layer norms and rotation of a part of each head",
    "Phi3": "merged projections and rotation of a part of each head",
    "Olmo": "norms without gains",
    "Olmo2": "norms after each block, and of all heads together",
    "Olmo3": "sliding layers and norms after each block",
    "Glm": "rotation of a part of each head",
    "Glm4": "rotation of a part of each head and norms after each block",
    "SmolLM3": "layers without rotation",
    "Granite": "multipliers of embeddings, residuals and logits",
    "Cohere": "layer norms and parallel blocks",
    "Cohere2": "layer norms, parallel blocks and sliding layers",
    "Falcon": "layer norms and parallel blocks",
    "GPTNeoX": "layer norms, biases and parallel blocks",
    "GPT2": "learned positions, layer norms and biases",
    "OPT": "learned positions, layer norms and biases",
    "Starcoder2": "layer norms and biases",
    "InternLM2": "merged projections",
    "Mamba": "state-space layers",
    "Mamba2": "state-space layers",
}

# Token ids, printing, training of other tasks, ways to compute: nothing that a logit depends on.
_TOKENS = "the tokenizer and the stop tokens are read where text is made"
_SAMPLING = "tokens are drawn as the plan's sampling says"
_HEADS = "labels of other tasks' heads"
_RUNNING = "how transformers runs or reports, not what is computed"
_ORIGIN = "where the file came from"
IGNORED: dict[str, str] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"), _TOKENS),
    **dict.fromkeys(("tokenizer_class", "prefix", "decoder_start_token_id"), _TOKENS),
    **dict.fromkeys(
        ("temperature", "top_k", "top_p", "typical_p", "do_sample", "num_beams", "num_beam_groups"), _SAMPLING
    ),
    **dict.fromkeys(("max_length", "min_length", "max_new_tokens", "early_stopping", "length_penalty"), _SAMPLING),
    **dict.fromkeys(
        ("repetition_penalty", "diversity_penalty", "no_repeat_ngram_size", "num_return_sequences"), _SAMPLING
    ),
    **dict.fromkeys(
        ("encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), _SAMPLING
    ),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), _SAMPLING),
    **dict.fromkeys(("remove_invalid_values", "output_scores", "return_dict_in_generate"), _SAMPLING),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "finetuning_task", "problem_type"), _HEADS),
    "task_specific_params": _HEADS,
    **dict.fromkeys(("return_dict", "output_hidden_states", "output_attentions", "torchscript", "use_cache"), _RUNNING),
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"), _RUNNING),
    **dict.fromkeys(("_flash_attn_2_enabled", "gradient_checkpointing", "cache_implementation"), _RUNNING),
    **dict.fromkeys(("use_bfloat16", "tf_legacy_loss", "transformers.js_config"), _RUNNING),
    **dict.fromkeys(("transformers_version", "_name_or_path", "name_or_path", "_commit_hash"), _ORIGIN),
    **dict.fromkeys(("unsloth_version", "unsloth_fixed", "is_llama_config"), _ORIGIN),
    "initializer_range": "the weights are read, never drawn anew",
    "pretraining_tp": "cuts a product into slices; the contract fixes the order of every sum",
    "max_window_layers": "says which layers slide where use_sliding_window is on, which is refused",
}

# Keys of transformers' PretrainedConfig (4.56 to 5) that mean something at another value.
DEFAULTS: dict[str, object] = {
    "pruned_heads": {},
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "cross_attention_hidden_size": None,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
}

# Key -> the only value with which the decoder computes the model, and the feature that another value asks for.
OFF: dict[str, tuple[object, str]] = {
    "attention_bias": (False, "biases of the attention's projections"),
    "mlp_bias": (False, "biases of the MLP"),
    "use_sliding_window": (False, "sliding-window attention"),
    "rope_interleaved": (False, "rotation of neighbouring pairs"),
    "use_mrope": (False, "rotation by several positions"),
    "hidden_act": ("silu", "another activation"),
    "attention_dropout": (0.0, "dropout"),
    "hidden_dropout": (0.0, "dropout"),
    "resid_pdrop": (0.0, "dropout"),
    "embd_pdrop": (0.0, "dropout"),
    "partial_rotary_factor": (1.0, "rotation of a part of each head"),
    "embedding_multiplier": (1.0, "multipliers"),
    "residual_multiplier": (1.0, "multipliers"),
    "logits_scaling": (1.0, "multipliers"),
    "logit_scale": (1.0, "multipliers"),
}

# Keys that are known to ask for what the decoder does not compute, at any value.
FEATURES: dict[str, str] = {
    "sliding_window": "sliding-window attention",
    "attn_logit_softcapping": "softcaps",
    "final_logit_softcapping": "softcaps",
    "query_pre_attn_scalar": "another scale of the scores",
    "attention_multiplier": "multipliers",
    "no_rope_layers": "layers without rotation",
    "no_rope_layer_interval": "layers without rotation",
    "rope_local_base_freq": "two rotary bases",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "kv_lora_rank": "latent attention",
    "text_config": "a model of several parts",
    "vision_config": "a model of several parts",
    "auto_map": "code of the checkpoint's own",
}

QUANTIZED = ("quantization_config", "quantization", "compression_config", "quant_config", "quantize_config")
DTYPES = ("bfloat16", "float16", "float32")


def family_of(data: dict[str, Any]) -> tuple[str, Family]:
    """The architecture's name and its row.

    Raises:
        UnsupportedModel: another one, with what it needs where that is known.
    """
    named = data.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "none"
    if isinstance(named, list) and len(named) > 1:
        raise UnsupportedModel(f"{len(named)} architectures in config.json", "one", CHOOSE)
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        known = isinstance(architecture, str) and architecture.isidentifier() and len(architecture) <= 60
        stem = architecture.split("For")[0] if known else ""
        what = _OTHER.get(stem) or ("a model of several parts" if "Conditional" in str(architecture) else "")
        words = f"architecture {architecture if known else shown(architecture)}"
        raise UnsupportedModel(f"{words} ({what})" if what else words, SUPPORTED, CHOOSE)
    family = FAMILIES[architecture]
    if data.get("model_type") not in (None, "", family.model_type):
        raise UnsupportedModel(f"model_type {shown(data['model_type'])} of {architecture}", repr(family.model_type))
    return architecture, family


def refuse_quantized(data: dict[str, Any]) -> None:
    """Quantized weights mean nothing without their scales, which nothing reads.

    Raises:
        UnsupportedModel: with the method's name.
    """
    for key in QUANTIZED:
        value = data.get(key)
        if value is None or value == {}:
            continue
        body = value if isinstance(value, dict) else {}
        method = body.get("quant_method") or body.get("quant_algo") or body.get("format")
        bits = f"{body['bits']} bits" if isinstance(body.get("bits"), int) else "an unnamed method"
        name = method if isinstance(method, str) and method.isascii() and method.isprintable() else bits
        raise quantized(f"{name[:40]} ({key})")
    for key in ("dtype", "torch_dtype"):
        value = data.get(key)
        if value is not None and str(value).removeprefix("torch.") not in DTYPES:
            raise UnsupportedModel(f"{key} {shown(value)}", f"{', '.join(DTYPES[:2])} or {DTYPES[2]}", CHOOSE)


def quantized(what: str) -> UnsupportedModel:
    """The refusal of quantized weights."""
    return UnsupportedModel(
        f"weights quantized by {what}",
        "unquantized weights in bfloat16, float16 or float32",
        "take the checkpoint that it was made from, or one that was dequantized to bfloat16",
    )


def refuse_unread(data: dict[str, Any], read: frozenset[str]) -> None:
    """Refuses every key outside ``read`` that asks for something; null asks for nothing.

    Raises:
        UnsupportedModel: with the key, its value and, where it is known, the feature.
    """
    for key, value in data.items():
        if key in read or key in IGNORED or value is None:
            continue
        if key in OFF:
            wanted, feature = OFF[key]
            if not same(value, wanted):
                word = f"{shown(key)[1:-1]} {'is set' if value is True else shown(value)}"
                raise UnsupportedModel(
                    f"{word} ({feature})", "a decoder without it" if wanted is False else repr(wanted), CHOOSE
                )
        elif key in DEFAULTS:
            if not same(value, DEFAULTS[key]):
                raise UnsupportedModel(f"{key} {shown(value)}", f"its default {DEFAULTS[key]!r}", CHOOSE)
        elif key in FEATURES:
            if key == "sliding_window" and data.get("use_sliding_window") is False:
                continue
            raise UnsupportedModel(f"{key} {shown(value)} ({FEATURES[key]})", "a decoder without it", CHOOSE)
        else:
            hint = f"{CHOOSE}; where the key means nothing for the logits, take it out of config.json"
            raise UnsupportedModel(f"key {shown(key)} = {shown(value)} in config.json", "keys that are read", hint)


def same(value: object, wanted: object) -> bool:
    """Equal, where True is not 1 and an integer may stand for a whole float."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    return value == wanted
