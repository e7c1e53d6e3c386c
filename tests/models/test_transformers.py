"""The decoder against Hugging Face's implementation of the same checkpoints.

Logits are compared with transformers in fp32, whose rounding is negligible beside bf16's; transformers' own bf16 error
on the same model is the yardstick. transformers takes seconds to import, so all of its tests are here.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.models.checkpoint import config_json, load_weights, save_checkpoint
from rl_engine.models.config import ModelConfig
from rl_engine.models.decoder import Decoder
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.ops.layout import PackedLayout
from tests.helpers.models import (
    LLAMA3_SCALING,
    llama,
    operators,
    qwen2,
    qwen2_weights,
    qwen3,
    requests,
    rollout_engine,
    sampling,
)
from tests.helpers.numeric import assert_bitwise, assert_close

SMALL = {"hidden": 256, "intermediate": 320, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocabulary": 700}
CASES = {
    "llama untied": (llama(norm_eps=1e-5, **SMALL), 1 << 30),
    "llama tied, sharded, llama3 rope": (
        llama(tied=True, rope_scaling=LLAMA3_SCALING, rope_base=5e5, **SMALL),
        300_000,
    ),
    "qwen2 untied, sharded": (qwen2(**SMALL), 300_000),
    "qwen2 tied": (qwen2(tied=True, rope_base=1e6, **SMALL), 1 << 30),
    "qwen3 untied, sharded": (qwen3(**SMALL), 300_000),
    "qwen3 tied, heads wider than hidden / heads": (qwen3(tied=True, **{**SMALL, "head_dim": 96}), 1 << 30),
}
PROMPTS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "What is 3 + 4? Answer with a number.",
)


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    import transformers

    return transformers


def our_logits(weights: ModelWeights, ids: Tensor) -> Tensor:
    """fp32 [samples, L, vocabulary] of ids [samples, L], as the trainer computes them."""
    ops = operators()
    count, length = ids.shape
    with torch.no_grad():
        hidden = Decoder(weights, ops, length).hidden_packed(ids.flatten(), PackedLayout((length,) * count, (count,)))
        return ops.logits(hidden, weights.head).unflatten(0, (count, length))


def their_logits(transformers: ModuleType, folder: Path, ids: Tensor, dtype: torch.dtype) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(ids).logits.float()


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("case", CASES)
def test_logits(transformers: ModuleType, case: str, tmp_path: Path) -> None:
    """transformers reads the checkpoint we wrote; our error is at most 1.2 times its own bf16 error."""
    config, max_shard_bytes = CASES[case]
    weights = qwen2_weights(config, 8) if config.qkv_bias else random_weights(config, 8)
    save_checkpoint(tmp_path, weights, max_shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) > (max_shard_bytes < 1 << 30)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, config.vocabulary, (3, 150)))
    exact = their_logits(transformers, tmp_path, ids, torch.float32)
    yardstick = root_mean_square(their_logits(transformers, tmp_path, ids, torch.bfloat16) - exact)
    assert yardstick < 0.05 * root_mean_square(exact), "bf16 itself is too far off to be a yardstick"
    assert root_mean_square(our_logits(weights, ids) - exact) <= 1.2 * yardstick
    shifted = torch.roll(ids, 1, dims=1)
    assert root_mean_square(our_logits(weights, shifted) - exact) > 10 * yardstick, "other tokens went unseen"


def test_names_of_a_qwen2(transformers: ModuleType, tmp_path: Path) -> None:
    """Written, read by transformers and by us: the same names and bits; a bias that was left out is seen."""
    config = qwen2(**SMALL)
    weights = qwen2_weights(config, 8)
    save_checkpoint(tmp_path, weights)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(theirs).__name__ == config.architecture
    ours, again = weights.export(), load_weights(tmp_path).export()
    assert set(theirs.state_dict()) == set(ours) == set(again) == set(config.tensor_shapes())
    for name, values in theirs.state_dict().items():
        assert_bitwise(values, ours[name].detach(), name)
        assert_bitwise(again[name].detach(), ours[name].detach(), name)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, config.vocabulary, (2, 60)))
    exact = our_logits(weights, ids)
    weights["model.layers.0.self_attn.qkv_proj.bias"].value.zero_()
    assert root_mean_square(our_logits(weights, ids) - exact) > 0.05 * root_mean_square(exact)


@pytest.mark.parametrize(
    "config", [llama(rope_scaling=LLAMA3_SCALING, rope_base=5e5), llama(rope_base=1e5), qwen3(head_dim=128)], ids=str
)
def test_rope_frequencies(transformers: ModuleType, config: ModelConfig, tmp_path: Path) -> None:
    family = transformers.models.qwen3 if config.qk_norm else transformers.models.llama
    kind = "Qwen3" if config.qk_norm else "Llama"
    theirs = getattr(transformers, f"{kind}Config")(**config_json(config))
    rotary = getattr(getattr(family, f"modeling_{kind.lower()}"), f"{kind}RotaryEmbedding")(theirs)
    assert rotary.attention_scaling == 1.0
    assert_close(
        config.inverse_frequencies(), rotary.inv_freq, rtol=1e-6, atol=0.0, why="transformers computes in fp32"
    )


def test_greedy_text_of_the_demo_model(transformers: ModuleType, smollm2: Path) -> None:
    """top-k 1 in the rollout engine against transformers' greedy search in fp32: the same text on three prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompts = [
        tuple(
            tokenizer(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                ),
                add_special_tokens=False,
            )["input_ids"]
        )
        for text in PROMPTS
    ]
    settings = sampling(top_k=1, max_response_len=24, stop_tokens=(tokenizer.eos_token_id,))
    samples = rollout_engine(load_weights(smollm2)).generate(requests(prompts, 1), 0, settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for text, prompt, sample in zip(PROMPTS, prompts, samples, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=settings.max_response_len,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.eos_token_id,
            )
        expected = output[0, len(prompt) :].numpy().astype(np.int32)
        ours, theirs = tokenizer.decode(sample.response_tokens), tokenizer.decode(expected)
        assert ours == theirs, f"{text!r}: {ours!r}, transformers has {theirs!r}"
        assert_bitwise(sample.response_tokens, expected, f"greedy tokens of {text!r}")
        assert not sample.logprobs.any(), "with one column left its probability is 1"
