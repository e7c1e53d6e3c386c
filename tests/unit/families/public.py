"""``config.json`` of public model families as they are published: shapes and switches, no weights."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: object) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 4096,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "vocab_size": 32000,
        **more,
    }


def _qwen(name: str, hidden: int, intermediate: int, layers: int, heads: int, kv: int, **more: object) -> Config:
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": {"Qwen2": "qwen2", "Qwen3": "qwen3"}[name],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768 if name == "Qwen2" else None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        **more,
    }


def _other(architecture: str, model_type: str, sizes: tuple[int, int, int, int, int, int], **more: object) -> Config:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = sizes
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 8192,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
        **more,
    }


LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn"}
_LONG = {"max_position_embeddings": 131072, "rope_theta": 500000.0, "vocab_size": 128256, "mlp_bias": False}
_QWEN3 = {"attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960}
_SMOL = {"max_position_embeddings": 8192, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152}
_SMOL |= {"is_llama_config": True, "rope_interleaved": False, "mlp_bias": False, "head_dim": 64, "pad_token_id": 2}
_FP8 = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]}
_INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}

ACCEPTED: dict[str, Config] = {
    "Llama 2 7B": _llama(4096, 11008, 32, 32, 32, torch_dtype="float16"),
    "Llama 3 8B": _llama(4096, 14336, 32, 32, 8, **{**_LONG, "max_position_embeddings": 8192}, eos_token_id=128009),
    "Llama 3.1 8B": _llama(4096, 14336, 32, 32, 8, **_LONG, rope_scaling=LLAMA3_ROPE, eos_token_id=[128001, 128009]),
    "Llama 3.2 1B": _llama(
        *(2048, 8192, 16, 32, 8),
        **{**_LONG, "tie_word_embeddings": True},
        head_dim=64,
        rope_scaling={**LLAMA3_ROPE, "factor": 32.0},
    ),
    "TinyLlama 1.1B": _llama(2048, 5632, 22, 32, 4, max_position_embeddings=2048, rope_theta=10000.0),
    "SmolLM2 135M": _llama(
        576, 1536, 30, 9, 3, **_SMOL, **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}
    ),
    "DeepSeek-R1-Distill-Llama 8B": _llama(4096, 14336, 32, 32, 8, **_LONG, rope_scaling=LLAMA3_ROPE),
    "Qwen2 7B": _qwen("Qwen2", 3584, 18944, 28, 28, 4, tie_word_embeddings=False),
    "Qwen2.5 0.5B": _qwen("Qwen2", 896, 4864, 24, 14, 2),
    "Qwen3 0.6B": _qwen("Qwen3", 1024, 3072, 28, 16, 8, **_QWEN3, rope_scaling=None),
    "Qwen3 8B": _qwen("Qwen3", 4096, 12288, 36, 32, 8, **_QWEN3, tie_word_embeddings=False),
    "Qwen3 0.6B as transformers 5 writes it": {
        **{key: value for key, value in _qwen("Qwen3", 1024, 3072, 28, 16, 8, **_QWEN3).items() if key != "rope_theta"},
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 28,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "pad_token_id": None,
    },
}

# name -> (config, words that the refusal must hold)
REFUSED: dict[str, tuple[Config, str]] = {
    "Qwen2.5 7B with yarn": (_qwen("Qwen2", 3584, 18944, 28, 28, 4, rope_scaling=YARN), "rope type 'yarn'"),
    "Qwen2.5 7B with a window": (_qwen("Qwen2", 3584, 18944, 28, 28, 4, use_sliding_window=True), "sliding-window"),
    "Qwen3 8B with yarn": (_qwen("Qwen3", 4096, 12288, 36, 32, 8, **_QWEN3, rope_scaling=YARN), "rope type 'yarn'"),
    "Qwen3 8B FP8": (
        _qwen("Qwen3", 4096, 12288, 36, 32, 8, **_QWEN3, quantization_config=_FP8),
        "weights quantized by fp8",
    ),
    "Qwen3 30B-A3B": (
        _other(
            *("Qwen3MoeForCausalLM", "qwen3_moe", (2048, 6144, 48, 32, 4, 151936)),
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        "Qwen3MoeForCausalLM (experts)",
    ),
    "Llama 3.1 8B INT8": (
        _llama(4096, 14336, 32, 32, 8, **_LONG, rope_scaling=LLAMA3_ROPE, quantization_config=_INT8),
        "weights quantized by compressed-tensors",
    ),
    "DeepSeek-Coder 6.7B": (
        _llama(4096, 11008, 32, 32, 32, rope_scaling={"type": "linear", "factor": 4.0}),
        "rope type 'linear'",
    ),
    "Mistral 7B v0.1": (
        _other("MistralForCausalLM", "mistral", (4096, 14336, 32, 32, 8, 32000), sliding_window=4096),
        "sliding-window attention",
    ),
    "Mixtral 8x7B": (
        _other("MixtralForCausalLM", "mixtral", (4096, 14336, 32, 32, 8, 32000), num_local_experts=8),
        "MixtralForCausalLM (experts)",
    ),
    "Gemma 2B": (_other("GemmaForCausalLM", "gemma", (2048, 16384, 18, 8, 1, 256000), head_dim=256), "GELU"),
    "Gemma 2 2B": (
        _other("Gemma2ForCausalLM", "gemma2", (2304, 9216, 26, 8, 4, 256000), **_SOFTCAPS, sliding_window=4096),
        "softcaps",
    ),
    "Gemma 3 1B": (
        _other(
            *("Gemma3ForCausalLM", "gemma3_text", (1152, 6912, 26, 4, 1, 262144)),
            sliding_window_pattern=6,
            rope_local_base_freq=10000,
        ),
        "sliding layers",
    ),
    "Gemma 3 4B": ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}, "Gemma3"),
    "Phi-3 mini": (
        _other("Phi3ForCausalLM", "phi3", (3072, 8192, 32, 32, 32, 32064), sliding_window=2047),
        "merged projections",
    ),
    "OLMo 2 7B": (_other("Olmo2ForCausalLM", "olmo2", (4096, 11008, 32, 32, 32, 100352)), "norms after each block"),
    "DeepSeek V3": (
        _other(
            *("DeepseekV3ForCausalLM", "deepseek_v3", (7168, 18432, 61, 128, 128, 129280)),
            n_routed_experts=256,
            kv_lora_rank=512,
            quantization_config=_FP8,
        ),
        "weights quantized by fp8",
    ),
    "DeepSeek V2 Lite": (
        _other("DeepseekV2ForCausalLM", "deepseek_v2", (2048, 10944, 27, 16, 16, 102400), kv_lora_rank=512),
        "experts and latent attention",
    ),
    "GLM-4 9B": (
        _other("Glm4ForCausalLM", "glm4", (4096, 13696, 40, 32, 2, 151552), partial_rotary_factor=0.5),
        "rotation of a part of each head",
    ),
    "SmolLM3 3B": (
        _other("SmolLM3ForCausalLM", "smollm3", (2048, 11008, 36, 16, 4, 128256), no_rope_layer_interval=4),
        "layers without rotation",
    ),
    "Granite 3 2B": (
        _other(
            *("GraniteForCausalLM", "granite", (2048, 8192, 40, 32, 8, 49155)),
            attention_multiplier=0.015625,
            logits_scaling=8.0,
        ),
        "multipliers",
    ),
    "gpt-oss 20B": (
        _other("GptOssForCausalLM", "gpt_oss", (2880, 2880, 24, 64, 8, 201088), num_local_experts=32),
        "experts",
    ),
}
