"""One decoder for training, scoring and generation: Llama, Qwen2 and Qwen3, built from the operators alone.

Shape letters: T tokens (samples joined without padding), H hidden, N heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.models.exchange import exchange_of
from rl_engine.models.weights import ModelWeights
from rl_engine.ops import Operators
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.sample import DrawKey, refuse_nan
from rl_engine.ops.sample.retained import retained_mask
from rl_engine.ops.selected_logp import inverse_temperature
from rl_engine.ops.weight import Weight
from rl_engine.parallel import Mesh


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Next tokens of R samples.

    Attributes:
        tokens: int64 [R].
        logprobs: fp32 [R], at the temperature and over the retained set: what the trainer must reproduce.
        mask: packed bits uint8 [R, ceil(V / 8)] of the retained set, or None where every column existed.
    """

    tokens: Tensor
    logprobs: Tensor
    mask: Tensor | None


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q_TND, k_TND, v_TND) -> out_TND


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    input_norm: Weight
    qkv: Weight
    qkv_bias: Weight | None
    q_norm: Weight | None
    k_norm: Weight | None
    o: Weight
    post_norm: Weight
    gate_up: Weight
    down: Weight


def _layer_weights(weights: ModelWeights, index: int, config: ModelConfig) -> LayerWeights:
    prefix, qk_norm = f"model.layers.{index}.", config.qk_norm
    return LayerWeights(
        input_norm=weights[prefix + "input_layernorm.weight"],
        qkv=weights[prefix + "self_attn.qkv_proj.weight"],
        qkv_bias=weights[prefix + "self_attn.qkv_proj.bias"] if config.qkv_bias else None,
        q_norm=weights[prefix + "self_attn.q_norm.weight"] if qk_norm else None,
        k_norm=weights[prefix + "self_attn.k_norm.weight"] if qk_norm else None,
        o=weights[prefix + "self_attn.o_proj.weight"],
        post_norm=weights[prefix + "post_attention_layernorm.weight"],
        gate_up=weights[prefix + "mlp.gate_up_proj.weight"],
        down=weights[prefix + "mlp.down_proj.weight"],
    )


class _Recomputed(torch.autograd.Function):
    """One layer that keeps only its input; the backward pass computes it again, to the same bits."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        decoder: Decoder,
        index: int,
        positions: Tensor,
        attend: Attend,
        layout: PackedLayout | None,
    ) -> Tensor:
        ctx.save_for_backward(stream)
        ctx.run = lambda x: decoder._layer(index, x, positions, attend, layout)
        return ctx.run(stream)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (stream,) = ctx.saved_tensors
        stream = stream.detach().requires_grad_(True)
        with torch.enable_grad():
            out = ctx.run(stream)
        torch.autograd.backward(out, gradient)
        return stream.grad, None, None, None, None, None


class Decoder:
    """Hidden states of tokens; what attention sees is the caller's (packed samples, or a KV cache).

    Args:
        weights: the model's weights, or one TP rank's rows of them; where they lie is where everything is computed.
        operators: providers to compute with.
        positions: longest sample that will be seen (rows of the rotary table).
        mesh: the ranks that compute together; one by default.
        local_sums: under CP, gradients are summed per rank and folded once a step (``Exchange.fold_gradients``).
        waits: the host may wait for the device. Without it a forward pass and what refuses a drawn token can be
            captured by an engine that replays them: the device asserts what is a Python error otherwise.

    Ids, positions and layouts may be made on a CPU; they are sent to the weights' device.

    Raises:
        WrongDevice: a provider does not compute where the weights lie.
        WrongShape: the attention provider has no kernel for the model's heads.
    """

    def __init__(
        self,
        weights: ModelWeights,
        operators: Operators,
        positions: int,
        mesh: Mesh | None = None,
        local_sums: bool = False,
        waits: bool = True,
    ) -> None:
        self.config: ModelConfig = weights.config
        self.weights = weights
        self.ops = operators
        self.device = weights.device
        operators.check_device(self.device)
        operators.check_head(self.config.head_dim)
        self.exchange = exchange_of(mesh, weights.sharding, local_sums, waits)
        self.table = RopeTable.build(self.config.inverse_frequencies(), positions).to(self.device)
        self.layers = [_layer_weights(weights, i, self.config) for i in range(self.config.layers)]

    @property
    def cache_heads(self) -> int:
        """KV heads of this rank's cache."""
        return self.weights.sharding.kv_heads

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        layout: PackedLayout | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """bf16 [T, H] after the final norm, of ids int64 [T] at positions int64 [T].

        ``layout`` is needed where gradients are; ``recompute`` keeps only each layer's input for the backward pass.
        """
        ids, positions = ids.to(self.device), positions.to(self.device)
        stream = self.ops.embedding(ids, self.weights.embedding, layout, self.exchange)
        for index in range(self.config.layers):
            if recompute and torch.is_grad_enabled():
                stream = _Recomputed.apply(stream, self, index, positions, attend, layout)
            else:
                stream = self._layer(index, stream, positions, attend, layout)
        norm = self.weights["model.norm.weight"]
        return self.ops.rms_norm(stream, norm, self.config.norm_eps, layout, self.exchange)

    def _layer(
        self, index: int, stream: Tensor, positions: Tensor, attend: Attend, layout: PackedLayout | None
    ) -> Tensor:
        ops, layer, eps, exchange = self.ops, self.layers[index], self.config.norm_eps, self.exchange
        normed = ops.rms_norm(stream, layer.input_norm, eps, layout, exchange)
        q, k, v = self._heads(ops.linear(normed, layer.qkv, None, layout, exchange, layer.qkv_bias))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.qk_norm_rope(q, k, layer.q_norm, layer.k_norm, eps, positions, self.table, layout, exchange)
        else:
            q, k = ops.rope(q, positions, self.table), ops.rope(k, positions, self.table)
        attended = attend(index, q, k, v).flatten(1)
        stream = ops.linear(attended, layer.o, stream, layout, exchange)
        normed = ops.rms_norm(stream, layer.post_norm, eps, layout, exchange)
        activated = ops.swiglu(ops.linear(normed, layer.gate_up, None, layout, exchange))
        return ops.linear(activated, layer.down, stream, layout, exchange)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [T, N, D] of this rank's q, k, v in the joined projection."""
        d, sharding = self.config.head_dim, self.weights.sharding
        sizes = [sharding.heads * d, sharding.kv_heads * d, sharding.kv_heads * d]
        q, k, v = (part.unflatten(1, (-1, d)) for part in qkv.split(sizes, dim=1))
        return q, k, v

    def draw(self, hidden: Tensor, temperature: float, top_k: int, top_p: float, keys: list[DrawKey]) -> Drawn:
        """Draws the token after each row of hidden bf16 [R, H]; one key a row, all of one seed and step.

        Raises:
            NonFiniteLogits: a logit is NaN.
        """
        z = self.ops.logits(hidden, self.weights.head)
        inv_t, mask = inverse_temperature(temperature), None
        if top_k >= 0 or top_p < 1.0:  # the set depends on every column
            mask = retained_mask(self.exchange.join_logits(z), inv_t, top_k, top_p)
        tokens = refuse_nan(self.ops.draw(z, inv_t, mask, keys, self.exchange), self.exchange.waits)
        logprobs, _ = self.ops.logp_from_logits(z, tokens, temperature, mask, self.exchange)
        return Drawn(tokens, logprobs, mask)

    def draw_words(self, hidden: Tensor, temperature: float, words: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens int64 [R], logprobs fp32 [R]) as :meth:`draw` without filters, on one rank alone, without a word to
        the host: identities ``words`` int32 [R, 5] lie on the device (seed, step, position, sample, prompt), and a NaN
        among a row's logits is token -1. What captured passes draw with."""
        assert self.exchange.alone
        return self.ops.draw_and_score(self.ops.logits(hidden, self.weights.head), temperature, words)

    def raw_logprobs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """fp32 [R]: log-probability of tokens int64 [R] at temperature 1 over the whole vocabulary."""
        z = self.ops.logits(hidden, self.weights.head)
        return self.ops.logp_from_logits(z, tokens, 1.0, None, self.exchange)[0]

    def hidden_packed(self, ids: Tensor, layout: PackedLayout, recompute: bool = False) -> Tensor:
        """bf16 [own tokens, H] of whole samples, ids int64 [T]: the training and scoring form."""
        own = self.exchange.own_tokens(layout)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.ops.attention_packed(q, k, v, layout, self.exchange)

        return self.hidden(ids[own], layout.positions[own], attend, layout, recompute)

    def score(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        mask: Tensor | None,
        layout: PackedLayout,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(logp, entropy) fp32 of this rank's share of ``rows``, places in the joined row on any device; targets and
        mask cover all of them."""
        targets, mask = targets.to(self.device), None if mask is None else mask.to(self.device)
        return self.ops.score(hidden, self.weights.head, targets, temperature, mask, layout, rows, self.exchange)
