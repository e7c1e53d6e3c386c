"""Memory a rank is expected to need, from the plan's arithmetic alone (bytes)."""

from __future__ import annotations

import dataclasses

from rl_engine.config.engines import BUILTIN
from rl_engine.config.plan import ModelFacts, Plan
from rl_engine.numerics.contract import Contract

BF16, FP32 = 2, 4
PROCESS = 360 * 2**20  # interpreter, torch and Ray's worker with the libraries that they map, measured
PROMPT_TOKENS = 128  # what a prompt is taken to need in the KV pool, beside the longest response
DEVICE_BYTES = {"H100 80GB": 80 * 10**9, "gfx942": 192 * 10**9}


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes per rank. ``process`` is the interpreter with its libraries, ``passing`` what weights take on their way to
    the rollout engines through the object store (both host memory, on a CPU only)."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    kv_pool: int
    process: int
    passing: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))


def parameter_count(model: ModelFacts, tp: int) -> int:
    """Parameters that one of ``tp`` tensor parallel ranks holds; norm gains are whole on every rank."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * heads + model.num_heads * model.head_dim * model.hidden_size
    layer += 3 * model.hidden_size * model.intermediate_size
    vocabulary = model.padded_vocab_size * model.hidden_size * (1 if model.tied else 2)
    gains = (2 * model.num_layers + 1) * model.hidden_size
    return -(-(layer * model.num_layers + vocabulary) // tp) + gains


def train_memory(plan: Plan) -> RankMemory:
    """One training rank: bf16 weights, fp32 gradients, AdamW's master weights and moments, and a micro-batch.

    Per-layer recomputation keeps the input of every layer and the whole of one; the logits of a micro-batch are fp32
    and exist twice (values and gradient), in consistency mode those of one vocabulary group at a time.
    """
    assert plan.model is not None
    model, shape = plan.model, plan.topology
    count = parameter_count(model, shape.train_tp)
    tokens = plan.max_tokens_per_gpu
    kept = model.num_layers * tokens * model.hidden_size * BF16
    width = 4 * model.hidden_size + 3 * model.intermediate_size // shape.train_tp
    one_layer = 2 * tokens * width * BF16
    at_once = 1 if plan.mode == "native" else Contract().logp_groups
    logits = 2 * tokens * (model.padded_vocab_size // shape.train_tp) * FP32 // at_once
    optimizer = 3 * FP32 * count // (shape.train_cp if plan.engines.train != BUILTIN else 1)
    reference = BF16 * count if plan.loss.kl_coef > 0 else 0
    return RankMemory(
        weights=BF16 * count + reference,
        gradients=FP32 * count,
        optimizer=optimizer,
        activations=kept + one_layer + logits,
        kv_pool=0,
        process=_process(plan),
        passing=BF16 * count if plan.backend == "cpu" else 0,
    )


def rollout_memory(plan: Plan, gpu_model: str | None) -> RankMemory:
    """One rollout rank: bf16 weights, the KV pool and the logits of one decoding step.

    On a GPU the pool fills the plan's share of device memory; on a CPU it holds the samples in flight.
    """
    assert plan.model is not None
    model, shape = plan.model, plan.topology
    weights = BF16 * parameter_count(model, shape.rollout_tp)
    in_flight = -(-plan.global_batch_size // shape.rollout_engines)
    logits = in_flight * model.padded_vocab_size * FP32
    heads = max(1, model.num_kv_heads // shape.rollout_tp)
    token = 2 * model.num_layers * heads * model.head_dim * BF16
    pool = in_flight * (PROMPT_TOKENS + plan.sampling.max_response_len) * token // shape.rollout_cp
    device = DEVICE_BYTES.get(gpu_model or "")
    if plan.backend != "cpu" and device is not None:
        pool = max(0, int(plan.engine.gpu_memory_utilization * device) - weights)
    # New weights arrive beside the packed old ones, from a snapshot that is mapped.
    passing = 2 * weights if plan.backend == "cpu" else 0
    return RankMemory(weights, 0, 0, logits, pool, _process(plan), passing)


def _process(plan: Plan) -> int:
    return PROCESS if plan.backend == "cpu" else 0
