"""GRPO over a Llama or Qwen3 in fp64, with torch's autograd: no code shared with the engines, written for clarity.

Weights are leaves by Hugging Face name; every sample is computed alone, without packing, caches or units.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_engine.engines.types import Sample
from rl_engine.models.config import ModelConfig

F64 = npt.NDArray[np.float64]


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """x [L, heads, D]: the two halves of a head are the two coordinates."""
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Model:
    """A decoder of fp64 leaves, made from bf16 tensors by HF name."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self.config = config
        self.leaves = {name: t.detach().double().requires_grad_(True) for name, t in tensors.items()}

    def logits(self, ids: Tensor) -> Tensor:
        """[L, vocabulary] of one sample's ids [L]."""
        w, config = self.leaves, self.config
        d, length = config.head_dim, len(ids)
        frequencies = config.rope_base ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = w["model.embed_tokens.weight"][ids]
        for layer in range(config.layers):
            p = f"model.layers.{layer}."
            h = norm(x, w[p + "input_layernorm.weight"], config.norm_eps)
            q, k, v = (
                (h @ w[p + f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, d)) for name in ("q", "k", "v")
            )
            if config.qk_norm:
                q = norm(q, w[p + "self_attn.q_norm.weight"], config.norm_eps)
                k = norm(k, w[p + "self_attn.k_norm.weight"], config.norm_eps)
            q, k = rotate(q, frequencies), rotate(k, frequencies)
            k, v = (t.repeat_interleave(config.heads // config.kv_heads, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
            seen = scores.masked_fill(future, -torch.inf).softmax(-1)
            x = x + torch.einsum("hqk,khd->qhd", seen, v).flatten(1) @ w[p + "self_attn.o_proj.weight"].T
            h = norm(x, w[p + "post_attention_layernorm.weight"], config.norm_eps)
            gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].T
        head = w["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
        return norm(x, w["model.norm.weight"], config.norm_eps) @ head.T

    def logprobs(self, sample: Sample, temperature: float) -> Tensor:
        """[R] of the response, over the retained columns alone."""
        prompt, response = (torch.tensor(t.astype(np.int64)) for t in (sample.prompt_tokens, sample.response_tokens))
        z = self.logits(torch.cat([prompt, response]))[len(prompt) - 1 : -1] / temperature
        if sample.retained is not None:
            exists = torch.zeros(z.shape, dtype=torch.bool)
            for row, kept in enumerate(sample.retained):
                ids = kept if kept.dtype == np.int32 else np.flatnonzero(np.unpackbits(kept, bitorder="little"))
                exists[row, torch.from_numpy(ids.astype(np.int64))] = True
            z = z.masked_fill(~exists, -torch.inf)
        return z.log_softmax(-1).gather(1, response[:, None])[:, 0]


@dataclasses.dataclass(frozen=True)
class Truth:
    """Loss of the update, gradient by HF name, logprobs and loss of every token [R]."""

    loss: float
    gradients: dict[str, Tensor]
    logprobs: F64
    token_losses: F64
    clipped: int
    kl_mean: float


def advantages(rewards: list[float], groups: list[int], eps: float) -> list[float]:
    """Rewards normalised within their group by mean and unbiased deviation."""
    values, names = np.array(rewards), np.array(groups)
    result = np.zeros(len(rewards))
    for group in set(groups):
        members = names == group
        result[members] = (values[members] - values[members].mean()) / (values[members].std(ddof=1) + eps)
    return result.tolist()


def token_losses(logp: Tensor, old: Tensor, reference: Tensor, advantage: Tensor, clip: float, kl: float) -> Tensor:
    """PPO's clipped objective and the k3 estimate, per token, not yet divided by their number."""
    ratio = (logp - old).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return kl * ((reference - logp).exp() - (reference - logp) - 1) - objective


def update(
    model: Model,
    reference: Model,
    samples: list[Sample],
    sample_advantages: list[float],
    old: list[F64],
    temperature: float,
    clip: float,
    kl: float,
) -> Truth:
    """The token-mean GRPO loss of all samples and its gradients."""
    logps, losses, clipped, kls = [], [], 0, 0.0
    for sample, advantage, old_logp in zip(samples, sample_advantages, old, strict=True):
        logp = model.logprobs(sample, temperature)
        with torch.no_grad():
            frozen = reference.logprobs(sample, temperature)
        losses.append(token_losses(logp, torch.tensor(old_logp), frozen, torch.tensor(advantage), clip, kl))
        ratio = (logp.detach() - torch.tensor(old_logp)).exp()
        clipped += int((ratio > 1 + clip).sum() if advantage > 0 else (ratio < 1 - clip).sum() if advantage < 0 else 0)
        kls += float(token_losses(logp.detach(), logp.detach(), frozen, torch.tensor(0.0), clip, 1.0).sum())
        logps.append(logp.detach())
    tokens = torch.cat(losses)
    loss = tokens.sum() / len(tokens)
    loss.backward()
    gradients = {}
    for name, leaf in model.leaves.items():
        assert leaf.grad is not None
        gradients[name] = leaf.grad
    everything = torch.cat(logps).cpu().numpy()
    return Truth(float(loss.detach()), gradients, everything, tokens.detach().cpu().numpy(), clipped, kls / len(tokens))
