"""Names of the log's fields, and how other stacks call them. The table is the documentation (`diagnose --fields`)."""

from __future__ import annotations

import dataclasses

# Token columns: a list per sample.
TOKEN_FIELDS = {
    "tokens": "token ids of prompt and response",
    "response_tokens": "token ids of the response alone (instead of tokens)",
    "prompt_tokens": "token ids of the prompt (beside response_tokens)",
    "train_tokens": "token ids that the trainer scored, aligned with tokens",
    "mask": "1 where the token is in the loss",
    "rollout_logprobs": "logprob the rollout reported, nats",
    "train_logprobs": "logprob the trainer computed (old logprobs), nats",
    "ref_logprobs": "logprob of the reference model, nats",
    "entropy": "entropy of the trainer's distribution, nats",
}
# Sample columns: one value per sample.
SAMPLE_FIELDS = {
    "prompt_length": "tokens before the response",
    "temperature": "sampling temperature",
    "top_p": "sampling top-p",
    "top_k": "sampling top-k, below 1 for none",
    "weight_version": "weight version that sampled",
    "train_version": "weight version that scored",
    "engine": "rollout engine (name or number)",
    "rank": "worker rank (name or number)",
    "time": "seconds",
    "cached_tokens": "prompt tokens served from the prefix cache",
    "batch_size": "sequences in flight",
    "step": "optimizer step",
    "advantage": "advantage of the sample",
    "loss": "recorded policy loss of the sample's step",
    "finish_reason": "stop or length",
    "length": "tokens of the row that are real, where rows are padded",
}
# Facts of the whole log: a header line {"log": {...}}, a constant column, or --set name=value.
LOG_FIELDS = {
    "vocab_size": "true vocabulary size",
    "padded_vocab_size": "columns of the output head",
    "chunk_size": "tokens of a prefill chunk",
    "page_size": "tokens of a KV page",
    "split_size": "tokens of a KV split",
    "eos_token_id": "end token",
    "loss_agg": "token-mean, seq-mean-token-mean or seq-mean-token-sum",
    "loss_denominator": "number that divides the summed loss",
    "dtype": "compute type: bf16, fp16 or fp32",
}


@dataclasses.dataclass(frozen=True)
class Format:
    """How one stack names the fields. ``names`` maps a field to the source keys that are tried in order."""

    name: str
    about: str
    names: dict[str, tuple[str, ...]]


_COMMON: dict[str, tuple[str, ...]] = {
    "tokens": ("tokens", "input_ids", "token_ids"),
    "response_tokens": ("response_tokens", "response_ids", "completion_ids", "responses"),
    "prompt_tokens": ("prompt_tokens", "prompt_ids", "prompts"),
    "train_tokens": ("train_tokens", "train_token_ids"),
    "mask": ("mask", "loss_mask", "response_mask", "completion_mask"),
    "rollout_logprobs": ("rollout_logprobs", "rollout_logprob"),
    "train_logprobs": ("train_logprobs", "train_logprob"),
    "ref_logprobs": ("ref_logprobs", "ref_logprob"),
    "entropy": ("entropy", "entropys", "entropies"),
    "prompt_length": ("prompt_length", "prompt_len"),
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "weight_version": ("weight_version", "rollout_version", "policy_version"),
    "train_version": ("train_version", "train_weight_version"),
    "engine": ("engine", "engine_id", "replica"),
    "rank": ("rank", "dp_rank", "worker"),
    "time": ("time", "timestamp"),
    "cached_tokens": ("cached_tokens", "num_cached_tokens"),
    "batch_size": ("batch_size",),
    "step": ("step", "global_step"),
    "advantage": ("advantage", "advantages"),
    "loss": ("loss", "pg_loss"),
    "finish_reason": ("finish_reason", "stop_reason"),
    "length": ("length",),
}


def _format(name: str, about: str, **names: tuple[str, ...]) -> Format:
    return Format(name, about, {**_COMMON, **names})


FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        _format("rlk", "this project's own names"),
        _format(
            "verl",
            "rows of the trainer's batch: responses, response_mask, rollout_log_probs, old_log_probs",
            rollout_logprobs=("rollout_log_probs",),
            train_logprobs=("old_log_probs", "old_log_prob"),
            ref_logprobs=("ref_log_prob", "ref_log_probs"),
            mask=("response_mask", "loss_mask"),
            tokens=("input_ids",),
            # input_ids are padded on both sides in these batches; prompts and responses are what aligns.
            step=("global_steps", "global_step", "step"),
            weight_version=("param_version", "weight_version"),
        ),
        _format(
            "slime",
            "rollout samples joined with train data (also VIME): tokens, response_length, rollout_log_probs, log_probs",
            rollout_logprobs=("rollout_log_probs",),
            train_logprobs=("log_probs", "old_log_probs"),
            ref_logprobs=("ref_log_probs",),
            weight_version=("weight_versions", "weight_version"),
            finish_reason=("status", "finish_reason"),
            step=("rollout_id", "step"),
        ),
        _format(
            "trl",
            "inputs of GRPOTrainer: completion_ids, completion_mask, sampling_per_token_logps, old_per_token_logps",
            rollout_logprobs=("sampling_per_token_logps",),
            train_logprobs=("old_per_token_logps", "per_token_logps"),
            ref_logprobs=("ref_per_token_logps",),
            mask=("completion_mask",),
        ),
        _format(
            "nemo-rl",
            "train data: token_ids or input_ids, token_mask, generation_logprobs, prev_logprobs, input_lengths",
            rollout_logprobs=("generation_logprobs",),
            train_logprobs=("prev_logprobs",),
            ref_logprobs=("reference_policy_logprobs", "reference_logprobs"),
            mask=("token_mask", "token_loss_mask"),
            length=("input_lengths", "input_length"),
        ),
        _format(
            "prime-rl",
            "micro-batches: input_ids, loss_mask, inference_logprobs, trainer_logprobs, temperature",
            rollout_logprobs=("inference_logprobs", "completion_logprobs"),
            train_logprobs=("trainer_logprobs", "train_logprobs"),
            ref_logprobs=("teacher_logprobs", "ref_logprobs"),
            mask=("loss_mask", "completion_mask"),
        ),
    )
}
ALIASES = {"vime": "slime", "nemo_rl": "nemo-rl", "prime_rl": "prime-rl", "ours": "rlk"}
# Extra source keys that a format understands but that map to no single field.
RESPONSE_LENGTH = ("response_length", "response_lengths", "completion_length")
