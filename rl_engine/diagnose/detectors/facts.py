"""What the log shows directly: values that are no logprobs, masks that count the wrong tokens, other token ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_engine.diagnose.causes import Evidence
from rl_engine.diagnose.log import Bools, TokenLog

SURE = 60.0


def non_finite(log: TokenLog) -> list[Evidence]:
    """NaN and infinities among loss tokens; -inf on the train side of a filtered run is a lost support."""
    out = []
    rollout, train = log.rollout[log.mask], log.train[log.mask]
    if log.ref_logprob is not None and (bad_ref := int((~np.isfinite(log.ref_logprob[log.mask])).sum())):
        detail = f"{bad_ref} reference logprobs of loss tokens are NaN or infinite"
        out.append(Evidence("non-finite", SURE, 0.9, detail, {"reference": bad_ref}))
    minus = int(np.isneginf(train).sum())
    filtered = is_filtered(log)
    if minus and filtered is not False:
        share = minus / max(1, len(train))
        detail = f"{minus} sampled tokens have train logprob -inf: they are outside the trainer's own set"
        out.append(Evidence("support-not-replayed", SURE, 0.96, detail, {"minus_inf": minus, "share": share}))
        minus = 0
    bad_train = int((~np.isfinite(train)).sum()) - int(np.isneginf(train).sum()) + minus
    bad_rollout = int((~np.isfinite(rollout)).sum())
    if bad_train + bad_rollout:
        detail = f"{bad_train} train and {bad_rollout} rollout logprobs of loss tokens are NaN or infinite"
        numbers: dict[str, float | str] = {"train": bad_train, "rollout": bad_rollout}
        out.append(Evidence("non-finite", SURE, 0.98, detail, numbers))
    return out


def is_filtered(log: TokenLog) -> bool | None:
    """Whether top-p or top-k was active; None where the log does not say."""
    samples = log.samples
    if samples.top_p is None and samples.top_k is None:
        return None
    by_p = samples.top_p is not None and bool((samples.top_p < 1).any())
    by_k = samples.top_k is not None and bool((samples.top_k > 0).any())
    if not by_p and not by_k and (samples.top_p is None or samples.top_k is None):
        return None
    return by_p or by_k


def signed_zero(log: TokenLog) -> list[Evidence]:
    """Loss tokens where both logprobs are zero and only the sign bit differs."""
    a, b = log.rollout[log.mask], log.train[log.mask]
    zero = (a == 0) & (b == 0)
    count = int((np.signbit(a[zero]) != np.signbit(b[zero])).sum())
    if not count:
        return []
    detail = f"{count} of {int(zero.sum())} zero logprobs differ in sign only"
    return [Evidence("signed-zero", SURE, 0.6, detail, {"tokens": count})]


def token_ids(log: TokenLog) -> list[Evidence]:
    """Other ids on the train side, and ids beyond the true vocabulary."""
    out = []
    if log.tokens is not None and log.train_tokens is not None:
        differ = (log.tokens != log.train_tokens) & log.mask
        if differ.any():
            sample = np.searchsorted(log.offsets, np.flatnonzero(differ), side="right") - 1
            detail = f"{int(differ.sum())} loss tokens of {len(np.unique(sample))} samples have another id in training"
            out.append(Evidence("retokenised", SURE, 0.97, detail, {"tokens": int(differ.sum())}))
    vocab = log.facts.vocab_size
    if log.tokens is not None and vocab is not None:
        beyond = int(((log.tokens >= vocab) & log.mask).sum())
        if beyond:
            detail = f"{beyond} sampled ids are at or above the vocabulary size {vocab}"
            out.append(Evidence("padded-vocab", SURE, 0.97, detail, {"tokens": beyond}))
    return out


def prompt_in_mask(log: TokenLog) -> tuple[list[Evidence], Bools]:
    """Loss tokens before the prompt's end; also returns them as bool [N]."""
    none = np.zeros(log.token_count, bool)
    prompt = log.samples.prompt_length
    if prompt is None:
        return [], none
    ends = log.offsets[:-1] + np.clip(prompt - log.base_position, 0, np.diff(log.offsets))
    edge = np.zeros(log.token_count + 1, np.int32)
    np.add.at(edge, log.offsets[:-1], 1)
    np.add.at(edge, ends, -1)
    inside = (np.cumsum(edge[:-1]) > 0) & log.mask
    if not inside.any():
        return [], none
    samples = len(np.unique(np.searchsorted(log.offsets, np.flatnonzero(inside), side="right")))
    detail = f"{int(inside.sum())} prompt tokens of {samples} samples are in the loss mask"
    numbers: dict[str, float | str] = {"tokens": int(inside.sum()), "samples": samples}
    return [Evidence("mask-prompt", SURE, 0.97, detail, numbers)], inside


def constant_runs(values: npt.NDArray[np.float32], offsets: npt.NDArray[np.int64], least: int) -> Bools:
    """bool [N]: tokens in a run of at least ``least`` equal values inside one sample."""
    count = len(values)
    if count == 0:
        return np.zeros(0, bool)
    starts = np.ones(count, bool)
    starts[1:] = values[1:] != values[:-1]
    starts[offsets[:-1][offsets[:-1] < count]] = True
    begin = np.flatnonzero(starts)
    length = np.diff(np.append(begin, count))
    return np.repeat(length >= least, length)


def filler_in_mask(log: TokenLog) -> tuple[list[Evidence], Bools]:
    """Runs of one repeated rollout logprob whose train logprobs are far away: tokens that nobody sampled."""
    runs = constant_runs(log.rollout, log.offsets, 3) & log.mask & np.isfinite(log.train)
    floor = -0.5
    if log.samples.top_p is not None and len(log.samples.top_p):
        floor = min(floor, 2 * float(np.log(max(1e-6, float(log.samples.top_p.min())))))
    if not runs.any() or runs.sum() > 0.5 * max(1, log.mask.sum()):
        return [], np.zeros(log.token_count, bool)
    block = np.cumsum(np.diff(np.concatenate([[False], runs])) != 0)
    chosen = block[runs]
    count = np.bincount(chosen)
    gap = log.train[runs].astype(np.float64) - log.rollout[runs]
    # Where the whole log is off, or a real loop of one certain token is scored differently, a run means nothing.
    others = log.mask & ~runs & np.isfinite(log.train) & np.isfinite(log.rollout)
    typical = np.abs(log.train[others].astype(np.float64) - log.rollout[others])
    usual = float(np.minimum(typical, 4).mean()) if others.any() else 0.0
    far = np.bincount(chosen, weights=gap) / np.maximum(count, 1) < min(floor, -6 * usual)
    if log.tokens is not None and far.any():
        inside = far[chosen]
        pairs = chosen[inside] * (int(log.tokens.max()) + 1) + log.tokens[runs][inside]
        if len(np.unique(pairs)) < 0.5 * len(pairs):  # a loop of a few certain tokens, not injected text
            far[:] = False
    hit = np.zeros(log.token_count, bool)
    hit[np.flatnonzero(runs)[far[chosen]]] = True
    if not hit.any():
        return [], hit
    where = np.flatnonzero(hit)
    sample = np.searchsorted(log.offsets, where, side="right") - 1
    # A run at the very start of the loss is a prompt; a run further in was injected.
    first = np.full(log.sample_count, np.iinfo(np.int64).max)
    masked = np.flatnonzero(log.mask)
    np.minimum.at(first, np.searchsorted(log.offsets, masked, side="right") - 1, masked)
    leading = len(np.unique(sample[where == first[sample]])) > 0.5 * len(np.unique(sample))
    cause = "mask-prompt" if leading else "mask-tool"
    value = float(log.rollout[where[0]])
    detail = (
        f"{len(where)} loss tokens of {len(np.unique(sample))} samples carry the filler {value:g} as rollout logprob"
    )
    numbers: dict[str, float | str] = {"tokens": len(where), "filler": value}
    return [Evidence(cause, SURE, 0.96, detail, numbers)], hit


def end_token(log: TokenLog) -> list[Evidence]:
    """Samples that ended by themselves but whose end token is not in the loss."""
    if log.tokens is None:
        return []
    nonempty = np.diff(log.offsets) > 1
    last = np.maximum(log.offsets[1:] - 1, 0)
    eos = log.facts.eos_token_id
    stopped = log.samples.stopped
    outside = nonempty & ~log.mask[last] & log.mask[np.maximum(last - 1, 0)]
    ended = nonempty & (log.tokens[last] == eos) if eos is not None else outside
    missing = outside & ended
    if eos is not None:
        # One padding token that equals the end token, behind a counted end token, is nothing.
        missing &= log.tokens[np.maximum(last - 1, 0)] != eos
    cut = np.zeros_like(missing)
    if eos is not None and stopped is not None:
        cut = nonempty & stopped & (log.tokens[last] != eos) & log.mask[last]
        if not (nonempty & (log.tokens[last] == eos)).any() and cut.sum() > 0 and not _one_id(log.tokens[last[cut]]):
            cut = cut & stopped
        else:
            cut = np.zeros_like(missing)
    count = int(missing.sum() + cut.sum())
    if not count or (eos is None and not _one_id(log.tokens[last[missing]])):
        return []
    total = int(((ended | cut) & nonempty).sum())
    detail = f"{count} of {total} samples that ended have no end token in the loss"
    numbers: dict[str, float | str] = {"samples": count, "ended": total}
    return [Evidence("mask-eos", SURE, 0.9, detail, numbers)]


def _one_id(tokens: npt.NDArray[np.int32]) -> bool:
    """Whether at least 90 % of the tokens are one and the same."""
    if len(tokens) < 3:
        return False
    return bool(np.unique(tokens, return_counts=True)[1].max() >= 0.9 * len(tokens))
