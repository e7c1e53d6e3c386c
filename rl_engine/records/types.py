"""The typed evidence of a run. Every class is frozen and goes through ``records.codec``; units are in the names."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rl_engine.records.codec import added

StateName = Literal["planned", "running", "finished", "failed", "interrupted", "valid", "invalid", "sealed"]
STATE_NAMES: tuple[str, ...] = get_args(StateName)
Side = Literal["train", "rollout"]
Status = Literal["PASS", "FAIL", "WARN"]
EventValue = bool | int | float | str | tuple[int | float | str, ...] | None


@dataclasses.dataclass(frozen=True)
class StateRecord:
    """One line of ``state.jsonl``; ``time`` is UTC, ISO 8601."""

    time: str
    name: StateName
    reason: str | None


@dataclasses.dataclass(frozen=True)
class EventRecord:
    """One line of ``events.jsonl``. ``kind`` is a lower-case identifier, ``fields`` are scalars or lists of them.

    Kinds that checks read: ``weights_loaded`` (engine, rank, version, digest: what an engine holds after a weight
    sync), ``graph_capture`` (engine, rank, size), ``refusal`` (operator, reason: a provider declined, which
    consistency mode must never see), ``engine_declared`` (side, name, package, version, records: what a side's engine
    says that it records).
    """

    time: str
    kind: str
    fields: dict[str, EventValue]


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Wall-clock seconds of a step's phases; ``other`` is the rest of the step."""

    rollout: float
    reward: float
    old_logp: float
    train: float
    optimizer: float
    weight_sync: float
    other: float


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One line of ``steps.jsonl``.

    ``weight_version`` is the version that drew and scored the step's samples (before its update). Logprob columns are
    :class:`LogprobStatistics` over response tokens, in nats. ``response_len_mean`` in tokens; ``truncated`` counts
    samples that ended at the response cap. ``grad_norm_hex`` is ``float.hex`` of the fp64 norm before clipping.

    ``score_calls`` and ``score_tokens`` are calls of ``selected_logp`` and their rows in one trainer rank while it
    scored the step, none of those that the update makes. ``ratio_mismatches`` counts tokens whose logprob in the first
    update after scoring is not the scored one, bit for bit. None: written by a version that did not record them.
    """

    step: int
    weight_version: int
    samples: int
    tokens_compared: int
    mismatches: int
    max_abs_dlogp: float
    mean_abs_dlogp: float
    kl_k1: float
    kl_k3: float
    reward_mean: float
    response_len_mean: float
    truncated: int
    entropy_mean: float
    loss: float
    clip_fraction: float
    grad_norm: float
    grad_norm_hex: str
    seconds: StepSeconds
    train_tokens_per_s: float
    rollout_tokens_per_gpu_s: float
    score_calls: int | None = added(None)
    score_tokens: int | None = added(None)
    ratio_mismatches: int | None = added(None)


@dataclasses.dataclass(frozen=True)
class LogprobStatistics:
    """Comparison of rollout and train logprobs over the masked tokens of a batch, from files.

    ``mismatches`` counts differing fp32 bit patterns; the rest is fp64: ``max`` and ``mean`` of |train - rollout|,
    ``kl_k1`` = mean(rollout - train), ``kl_k3`` = mean(exp(train - rollout) - 1 - (train - rollout)).
    """

    tokens_compared: int
    mismatches: int
    max_abs_dlogp: float
    mean_abs_dlogp: float
    kl_k1: float
    kl_k3: float


@dataclasses.dataclass(frozen=True)
class BatchSummary:
    """The columns of a :class:`StepRecord` that follow from the step's samples alone, under the same names."""

    samples: int
    tokens_compared: int
    mismatches: int
    max_abs_dlogp: float
    mean_abs_dlogp: float
    kl_k1: float
    kl_k3: float
    reward_mean: float
    response_len_mean: float
    truncated: int


@dataclasses.dataclass(frozen=True)
class SampleRecord:
    """Identity and outcome of one sample; the step is the file's. ``finish_reason`` is ``stop`` or ``length``."""

    prompt_index: int
    sample_index: int
    seed: int
    weight_version: int
    engine: str
    text: str
    reward: float
    answer: str | None
    finish_reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class RetainedSets:
    """Token ids that top-k and top-p kept, for each token position.

    ``offsets`` int64 [T+1] from 0, ``ids`` int32 [offsets[T]] strictly ascending within a token and below ``vocab``;
    an empty row means no set was recorded there (prompt tokens, or no filter).
    """

    offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    vocab: int


@dataclasses.dataclass(frozen=True, eq=False)
class SampleBatch:
    """The samples of one step, prompt and response of every sample joined.

    tokens int32 [T]; offsets int64 [S+1], sample i is tokens[offsets[i]:offsets[i+1]]; loss_mask uint8 [T], 1 on
    response tokens; rollout_logprob and train_logprob fp32 [T] in nats, +0 where the mask is 0; ``samples`` has S
    records in the same order.
    """

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.uint8]
    rollout_logprob: npt.NDArray[np.float32]
    train_logprob: npt.NDArray[np.float32]
    samples: tuple[SampleRecord, ...]
    retained: RetainedSets | None = None


@dataclasses.dataclass(frozen=True)
class RouteRecord:
    """Measured calls of one operator in one worker: the sum over calls of one provider, dtype and execution form.

    ``shapes`` maps shape buckets (``"T<=64,K=576"``) to counts that sum to ``calls``; ``execution`` is how the calls
    ran.
    """

    side: Side
    operator: str
    provider: str
    dtype: str
    execution: Literal["eager", "graph"]
    calls: int
    shapes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class RouteFile:
    """``routes/<engine>-<rank>.json``: everything one worker counted, bound to the run's plan."""

    plan_digest: str
    engine: str
    rank: int
    routes: tuple[RouteRecord, ...]


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """One line of ``passes/<engine>.jsonl``: a forward pass of a rollout engine, or several in a row in which the same
    samples take one token each.

    ``first`` counts the engine's passes from 0, ``passes`` those of the line; ``step`` is the rollout step that asked
    for them. Of each pass: ``samples`` in it and ``waiting`` in the queue, ``tokens`` computed, ``prefill`` of them
    for samples that were not caught up. ``shared`` tokens were taken over from other samples' pages, ``discarded``
    ones thrown away when their samples went back to the queue. Samples as (prompt, sample): ``admitted`` and
    ``preempted`` with the first pass, ``finished`` with the last. ``pages`` of the pool, 0 for an engine without one,
    of which samples held ``pages_held`` in the last pass. ``execution`` is how it ran.
    """

    step: int
    weight_version: int
    first: int
    passes: int
    samples: int
    waiting: int
    tokens: int
    prefill: int
    shared: int
    discarded: int
    admitted: tuple[tuple[int, int], ...]
    preempted: tuple[tuple[int, int], ...]
    finished: tuple[tuple[int, int], ...]
    pages: int
    pages_held: int
    execution: Literal["eager", "graph"]


@dataclasses.dataclass(frozen=True)
class WeightsRecord:
    """``weights/<version>.json``: digest of every exported tensor, and of the sorted map."""

    version: int
    digest: str
    tensors: dict[str, str]


@dataclasses.dataclass(frozen=True)
class SourceRecord:
    """One source tree: ``revision`` None outside version control; ``diff_hash`` covers uncommitted changes."""

    name: str
    revision: str | None
    dirty: bool
    diff_hash: str | None


@dataclasses.dataclass(frozen=True)
class ThreadSettings:
    """Thread counts of one process: torch's intra-op and inter-op pools and ``OMP_NUM_THREADS`` (None: not set)."""

    intra_op: int
    inter_op: int
    omp: int | None


@dataclasses.dataclass(frozen=True)
class EnvironmentRecord:
    """``environment-NNNN.json``: one process, at its start or its end.

    ``role`` is ``driver``, ``train`` or ``rollout``; ``engine`` and ``rank`` are those of the route file. Variables
    are an allow-list with secrets redacted. ``threads`` is None for a process that runs no operators.
    """

    time: str
    phase: Literal["start", "end"]
    role: Literal["driver", "train", "rollout"]
    engine: str
    rank: int
    host: str
    device: str
    driver: str | None
    python: str
    platform: str
    versions: dict[str, str]
    threads: ThreadSettings | None
    contract_id: str
    contract_digest: str
    qualification_digest: str | None
    sources: tuple[SourceRecord, ...]
    variables: dict[str, str]


@dataclasses.dataclass(frozen=True)
class FindingRecord:
    """One gate's result as stored."""

    name: str
    status: Status
    found: str
    expected: str
    hint: str


@dataclasses.dataclass(frozen=True)
class ValidationRecord:
    """``validation-NNNN.json``: every gate, and in plain words what the run does and does not show."""

    time: str
    run_id: str
    plan_digest: str
    passed: bool
    findings: tuple[FindingRecord, ...]
    certifies: tuple[str, ...]
    does_not_certify: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PairSide:
    """One run of a pair, summed over its steps: the statistics' means are weighted by tokens."""

    run_id: str
    mode: str
    plan_digest: str
    steps: int
    tokens_compared: int
    mismatches: int
    max_abs_dlogp: float
    mean_abs_dlogp: float


@dataclasses.dataclass(frozen=True)
class PairRecord:
    """``<id>-pair.json``: native and consistency on the same prompts, seeds and starting weights.

    ``exact`` is consistency without a mismatch over at least one token; ``control`` is native with at least one
    mismatch, without which the pair proves nothing; ``same_start`` is equal digests of both runs' first weights.
    """

    pair_id: str
    native: PairSide
    consistency: PairSide
    same_start: bool
    exact: bool
    control: bool
