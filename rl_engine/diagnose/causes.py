"""The catalogue of causes: what each is called, what it means and what to check next."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Cause:
    """``kind``: ``fact`` (seen directly in the log), ``form`` (the gap has the cause's formula), ``place`` (the gap
    sits where the cause acts), ``general`` (a shape that several causes share), ``fine``."""

    name: str
    title: str
    kind: str
    hint: str


_ALL = (
    Cause("temperature-twice", "temperature applied twice", "form", "look for two divisions by temperature on the side "
          "named; the engine's processed logprobs already contain it"),
    Cause("temperature-missing", "temperature missing on one side", "form", "divide the trainer's logits by the "
          "sampling temperature before the softmax"),
    Cause("temperature-rescored", "scored at another temperature", "form", "compare the sampling temperature with the "
          "one the trainer reads; the best-fit ratio is given"),
    Cause("support-not-replayed", "top-p / top-k support not replayed", "form", "hand the retained sets to the trainer "
          "and normalise over them, or sample with top_p 1 and top_k -1"),
    Cause("raw-logprobs", "raw against processed logprobs", "form", "ask the engine for processed logprobs (vLLM: "
          "logprobs_mode=processed_logprobs); its default is before temperature and filters"),
    Cause("division-after-softmax", "divided by temperature after the softmax", "form", "divide logits, not logprobs: "
          "the result is not a distribution"),
    Cause("log-base", "another base or sign of the logarithm", "form", "check for log2 / log10 and for negative "
          "log-likelihoods stored as logprobs"),
    Cause("shift", "logprobs shifted against tokens", "fact", "logits at position t score token t+1; check the slice "
          "on the side named, and the first and last response token"),
    Cause("sample-order", "logprobs belong to other samples", "fact", "follow the sample ids through sorting, "
          "packing and sequence balancing, and undo the permutation"),
    Cause("mask-prompt", "prompt tokens in the loss", "fact", "start the loss mask at the prompt length"),
    Cause("mask-tool", "tool or injected tokens in the loss", "fact", "mask tokens that the policy did not sample; "
          "their rollout logprob is a filler"),
    Cause("mask-eos", "end token missing from the loss", "fact", "let the mask include the end token that was "
          "sampled, or the policy never learns to stop"),
    Cause("padded-vocab", "padded vocabulary columns counted", "form", "set padded columns to -inf before the "
          "softmax; compare padded and true vocabulary size on both sides"),
    Cause("penalty", "repetition, presence or frequency penalty on one side", "form", "set the penalties to neutral "
          "in the sampling parameters (check the model's generation_config.json)"),
    Cause("logits-dtype", "logits rounded to a narrow type on one side", "form", "keep logits and softmax in fp32 on "
          "the side named (fp32 head, or cast before rounding)"),
    Cause("logprob-dtype", "logprobs stored rounded on one side", "fact", "keep logprobs in fp32 from the softmax to "
          "the log"),
    Cause("rope-dtype", "gap grows with position (rotary angles in a narrow type)", "place", "compute rotary tables "
          "in fp32 on both sides and compare inv_freq, base and scaling"),
    Cause("router-dtype", "rare large gaps (expert routing flips)", "general", "run the router in fp32 on both sides, "
          "or replay the routed experts; look at the worst tokens listed"),
    Cause("stale-weights", "weights older than the log says, or old by design", "place", "compare weight digests "
          "after each sync; drop or correct samples of old versions"),
    Cause("stale-prefix-cache", "prefix cache kept from older weights", "place", "reset the prefix cache after each "
          "weight update"),
    Cause("block-edges", "gap at chunk, page or split edges", "place", "compare with chunked prefill off, another "
          "page size or one split; the edge's code path differs"),
    Cause("batch-dependence", "gap depends on the batch size", "place", "use batch-invariant kernels, or score with "
          "the batch size that sampled"),
    Cause("bad-worker", "one engine or rank is off", "place", "compare this worker's weights digest, driver, library "
          "versions and dtype with its neighbours'"),
    Cause("retokenised", "text was tokenised again", "fact", "pass the sampled token ids to the trainer; never decode "
          "and encode in between"),
    Cause("template-drift", "gap is largest right behind the prompt (chat template or prompt differs)", "place",
          "compare the prompt's token ids on both sides, byte for byte"),
    Cause("lora-scale", "adapter (LoRA) scale differs or adapter missing", "form", "compare alpha / r, merged "
          "adapters and the adapter's version on both sides"),
    Cause("tied-head", "output head differs (tied / untied, or not loaded)", "general", "compare the digests of "
          "lm_head and embedding on both sides, and tie_word_embeddings"),
    Cause("loss-denominator", "loss does not match its stated denominator", "fact", "recompute the loss from the "
          "logged tokens; the mode that fits is given"),
    Cause("non-finite", "NaN or infinite logprobs", "fact", "find the first such token with the worst-token list; "
          "check masks with no allowed column and overflow"),
    Cause("signed-zero", "+0 on one side, -0 on the other", "fact", "harmless in value, but bits differ: compute the "
          "logprob of a certain token with the same expression"),
    Cause("quantised-rollout", "noise larger than the dtype explains (quantised weights, cache or activations)",
          "general", "check fp8 / int8 / int4 settings of the rollout, its KV cache dtype, and whether both sides "
          "load the same checkpoint"),
    Cause("unexplained", "larger than rounding, and no fingerprint fits", "general", "log more: prompt length, "
          "sampling settings, weight versions, workers, token ids; or more tokens"),
    Cause("rounding", "honest rounding noise", "fine", "nothing to repair; batch-invariant operators remove it"),
    Cause("exact", "bits are equal", "fine", "nothing to repair"),
)  # fmt: skip

CAUSES: dict[str, Cause] = {cause.name: cause for cause in _ALL}


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What one detector saw.

    Attributes:
        cause: id in :data:`CAUSES`. ``detail``: one sentence with the finding.
        strength: how far from chance, in standard errors (facts: a large constant).
        fit: share of the gap that the cause explains or how well its form fits, 0 to 1.
        numbers: the measured values behind the sentence.
        touched: bool [S], the samples that the cause acts on, where it spares others; those are looked at again alone.
    """

    cause: str
    strength: float
    fit: float
    detail: str
    numbers: dict[str, float | str]
    touched: npt.NDArray[np.bool_] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            raise ValueError(f"unknown cause {self.cause}")
