"""Gates about samples: counts, identities, masks, logprobs as bits, groups."""

from __future__ import annotations

import math
from collections import defaultdict

from rl_engine.checks.gates.evidence import Gate, RunEvidence, StepFacts
from rl_engine.records.statistics import merge_statistics
from rl_engine.records.types import StepRecord

Verdict = tuple[bool, str, str]
_AFTER_STEPS = ("records", "steps")
# Means in steps.jsonl may have been summed in another order than the validator's exact sums.
_MEAN_TOLERANCE = 1e-9


def _sample_count(evidence: RunEvidence) -> Verdict:
    batch, total = evidence.plan.global_batch_size, 0
    for step, facts in zip(evidence.steps, evidence.facts, strict=True):
        if not step.samples == len(facts.samples) == batch:
            return False, f"step {step.step}: {step.samples} recorded, {len(facts.samples)} in the file", "run it again"
        total += len(facts.samples)
    return True, f"{total} samples", ""


def _identities(evidence: RunEvidence) -> Verdict:
    data, count = evidence.plan.data, 0
    for facts in evidence.facts:
        groups: dict[int, list[int]] = defaultdict(list)
        for sample in facts.samples:
            groups[sample.prompt_index].append(sample.sample_index)
            if sample.finish_reason not in ("stop", "length"):
                return False, f"step {facts.step}: finish reason {sample.finish_reason[:40]!r}", "stop or length"
        for prompt, indices in sorted(groups.items()):
            # The plan's own numbers size nothing here: a stranger may have written them.
            if sorted(indices) != list(range(len(indices))) or len(indices) != data.samples_per_prompt:
                return (
                    False,
                    f"step {facts.step} prompt {prompt}: sample indices {sorted(indices)[:20]}",
                    "run it again",
                )
        if len(groups) != data.prompts_per_step:
            return False, f"step {facts.step}: {len(groups)} prompts", "run it again"
        count += len(facts.samples)
    return True, f"{count} identities", ""


def _first_problem(evidence: RunEvidence, name: str, good: str, hint: str) -> Verdict:
    for facts in evidence.facts:
        problem = getattr(facts, name)
        if problem:
            return False, problem, hint
    return True, good, ""


def _masks(evidence: RunEvidence) -> Verdict:
    return _first_problem(evidence, "mask_problem", "every mask is prompt, then response", "run it again")


def _finite(evidence: RunEvidence) -> Verdict:
    return _first_problem(evidence, "finite_problem", "every logprob is finite", "look at the step before for overflow")


def _retained(evidence: RunEvidence) -> Verdict:
    return _first_problem(evidence, "retained_problem", "every drawn token is in its set", "run it again")


def _lengths(evidence: RunEvidence) -> Verdict:
    for facts, step in zip(evidence.facts, evidence.steps, strict=True):
        wanted = (facts.summary.reward_mean, facts.summary.response_len_mean)
        given = (step.reward_mean, step.response_len_mean)
        close = all(map(_close, given, wanted))
        if not close or step.truncated != facts.summary.truncated:
            found = f"{(*given, step.truncated)}, the files say {(*wanted, facts.summary.truncated)}"
            return False, f"step {step.step}: {found}", "steps.jsonl does not describe these samples"
    return True, "reward, length and truncation follow from the samples", ""


def _statistics(evidence: RunEvidence) -> Verdict:
    for step, facts in zip(evidence.steps, evidence.facts, strict=True):
        problem = _statistics_problem(step, facts)
        if problem:
            return False, f"step {step.step}: {problem}", "steps.jsonl does not describe these samples"
    return True, "steps.jsonl follows from the samples", ""


def _statistics_problem(step: StepRecord, facts: StepFacts) -> str:
    actual = facts.summary
    for name in ("tokens_compared", "mismatches", "max_abs_dlogp"):
        if not _same(getattr(step, name), getattr(actual, name)):
            return f"{name} {getattr(step, name)}, the files say {getattr(actual, name)}"
    for name in ("mean_abs_dlogp", "kl_k1", "kl_k3"):
        if not _close(getattr(step, name), getattr(actual, name)):
            return f"{name} {getattr(step, name)}, the files say {getattr(actual, name)}"
    return ""


def _mismatches(evidence: RunEvidence) -> Verdict:
    total = merge_statistics(facts.summary for facts in evidence.facts)
    found = f"{total.mismatches} of {total.tokens_compared} logprobs differ in bits"
    if total.tokens_compared == 0:
        return False, "no token to compare", "every response is empty; look at the prompts and the response cap"
    if evidence.plan.mode == "native":
        return True, f"{found} (native: reported)", ""
    first = next((facts.first_mismatch for facts in evidence.facts if facts.first_mismatch), "")
    return total.mismatches == 0, f"{found}{'; first ' + first if first else ''}", "run `locate` on this directory"


def _not_reused(evidence: RunEvidence) -> Verdict:
    hint = "the trainer must score every step"
    for step in evidence.steps:
        if not step.seconds.old_logp > 0:
            return False, f"step {step.step}: no time spent on old logprobs", hint
    if not evidence.declares("train", "routes"):
        return True, "time spent on old logprobs in every step; calls are not declared", ""
    scores = _records_scoring(evidence)
    for step, facts in zip(evidence.steps, evidence.facts, strict=True) if scores else ():
        tokens = facts.summary.tokens_compared
        if (step.score_calls or 0) < 1 or step.score_tokens != tokens:
            found = f"{step.score_tokens} of {tokens} response tokens scored in {step.score_calls} calls"
            return False, f"step {step.step}: {found}", hint
    calls = sum(
        route.calls
        for file in evidence.routes
        for route in file.routes
        if route.side == "train" and route.operator == "selected_logp"
    )
    scoring = sum(step.score_calls or 0 for step in evidence.steps) if scores else len(evidence.steps)
    # Counts are written before their step's line, so that a killed attempt leaves those of its finished steps.
    if calls < scoring:
        return False, f"{calls} selected_logp calls in the trainer, {scoring} of them to score", hint
    if not scores:
        return True, f"{calls} selected_logp calls in the trainer, updates included: a run of an earlier version", ""
    total = sum(step.score_tokens or 0 for step in evidence.steps)
    return True, f"{total} tokens scored in {scoring} calls, updates apart", ""


def _records_scoring(evidence: RunEvidence) -> bool:
    """False for a run of a version that did not: neither its attempts nor one of its steps say so."""
    begun = any(event.kind == "attempt" and event.fields.get("scoring") for event in evidence.events)
    return begun or any((s.score_calls, s.score_tokens, s.ratio_mismatches) != (None,) * 3 for s in evidence.steps)


def _ratios(evidence: RunEvidence) -> Verdict:
    if not _records_scoring(evidence):
        return True, "not recorded: a run of an earlier version", ""
    for step in evidence.steps:
        if step.ratio_mismatches is None or not 0 <= step.ratio_mismatches <= step.tokens_compared:
            return False, f"step {step.step}: {step.ratio_mismatches} of {step.tokens_compared} ratios", "run it again"
    counts = [(step.ratio_mismatches or 0, step.step) for step in evidence.steps]
    total, tokens = sum(count for count, _ in counts), sum(step.tokens_compared for step in evidence.steps)
    found = f"{total} of {tokens} logprobs of the update are not the scored ones"
    if evidence.plan.mode == "native":
        return True, f"{found} (native: reported)", ""
    first = next((f"; first in step {step}" for count, step in counts if count), "")
    return total == 0, f"{found}{first}", "the logprobs that the trainer scored are not those that it trains on"


def _grpo(evidence: RunEvidence) -> Verdict:
    if evidence.plan.data.samples_per_prompt < 2:
        return False, f"{evidence.plan.data.samples_per_prompt} sample per prompt", "a group needs two samples"
    for step, facts in zip(evidence.steps, evidence.facts, strict=True):
        if facts.prompt_problem:
            return False, facts.prompt_problem, "run it again"
        if not all(math.isfinite(sample.reward) for sample in facts.samples):
            return False, f"step {step.step}: a reward that is not finite", "look at the reward function"
        if not math.isfinite(step.loss) or not 0 <= step.clip_fraction <= 1:
            return False, f"step {step.step}: loss {step.loss}, clip fraction {step.clip_fraction}", "run it again"
    return True, f"groups of {evidence.plan.data.samples_per_prompt} from equal prompts", ""


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _close(a: float, b: float) -> bool:
    return _same(a, b) or math.isclose(a, b, rel_tol=_MEAN_TOLERANCE, abs_tol=1e-15)


SAMPLE_GATES: tuple[Gate, ...] = (
    Gate("sample_count", "rollouts x global batch samples", _sample_count, _AFTER_STEPS),
    Gate("identities", "every prompt of a step once, with all its samples", _identities),
    Gate("masks", "0 on the prompt, 1 on the response, logprobs +0 outside", _masks),
    Gate("finite", "finite logprobs on both sides", _finite),
    Gate("retained_sets", "a set around every drawn token where top-p or top-k filter", _retained),
    Gate("step_samples", "steps.jsonl equal to what the samples say", _lengths, (*_AFTER_STEPS, "sample_count")),
    Gate("step_logprobs", "steps.jsonl equal to a comparison of the files", _statistics, (*_AFTER_STEPS, "finite")),
    Gate("mismatches", "consistency: 0 differing logprobs, compared as bits", _mismatches, ("records", "finite")),
    Gate(
        "not_reused", "every response token scored by the trainer in its step", _not_reused, (*_AFTER_STEPS, "routes")
    ),
    Gate(
        "ratios", "consistency: 0 logprobs of a step's first update differ from the scored ones", _ratios, _AFTER_STEPS
    ),
    Gate(
        "grpo", "groups of at least two samples of one prompt; finite rewards and loss", _grpo, (*_AFTER_STEPS, "masks")
    ),
)
