"""What gates judge: the records of one run, decoded once, and facts of each step's samples from a single pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from rl_engine.checks.finding import Finding
from rl_engine.config.engines import BUILTIN, EVIDENCE, SIDES, EvidenceKind
from rl_engine.config.plan import Plan
from rl_engine.numerics.bits import hex_bits, int_view
from rl_engine.records.codec import RecordError, decode
from rl_engine.records.errors import printable
from rl_engine.records.reader import RunReader
from rl_engine.records.statistics import summarise
from rl_engine.records.types import (
    BatchSummary,
    EnvironmentRecord,
    EventRecord,
    RouteFile,
    SampleBatch,
    SampleRecord,
    Side,
    StateRecord,
    StepRecord,
    WeightsRecord,
)

NOT_JUDGED = "not judged"
NOT_DECLARED = "not declared"
Asks = tuple[tuple[Side, EvidenceKind], ...]


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What one pass over a step's samples showed; a problem is the first one's description, empty for none.

    ``drawn`` has for every engine the tokens that it had to compute, all but the last of each of its samples, and
    those samples as (prompt, sample).
    """

    step: int
    samples: tuple[SampleRecord, ...]
    summary: BatchSummary
    first_mismatch: str
    mask_problem: str
    finite_problem: str
    retained_problem: str
    prompt_problem: str
    drawn: dict[str, tuple[int, list[tuple[int, int]]]]


class RunEvidence:
    """Every record of a run, read on first use and kept; reading raises RecordError for damaged files.

    Attributes:
        sealing: whether the run is to be sealed if it passes: then a seal that is gone does not fail it.
    """

    def __init__(self, reader: RunReader, sealing: bool = False) -> None:
        self.reader, self.sealing = reader, sealing

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan as its dataclass."""
        return decode(Plan, self.reader.plan().plan, "plan.json")

    @functools.cached_property
    def plan_digest(self) -> str:
        """The verified digest of ``plan.json``."""
        return self.reader.plan().digest

    @functools.cached_property
    def states(self) -> list[StateRecord]:
        """``state.jsonl``."""
        return self.reader.states()

    @functools.cached_property
    def events(self) -> list[EventRecord]:
        """``events.jsonl``."""
        return self.reader.events()

    @functools.cached_property
    def steps(self) -> list[StepRecord]:
        """``steps.jsonl``."""
        return self.reader.steps()

    @functools.cached_property
    def attempt_routes(self) -> list[tuple[int, RouteFile]]:
        """(attempt, its route file) of every route file."""
        return self.reader.attempt_routes()

    @property
    def routes(self) -> list[RouteFile]:
        """Every route file."""
        return [route for _, route in self.attempt_routes]

    @functools.cached_property
    def weights(self) -> dict[int, WeightsRecord]:
        """Weights files by version."""
        return self.reader.weights()

    @functools.cached_property
    def environments(self) -> list[EnvironmentRecord]:
        """Every environment record."""
        return self.reader.environments()

    @functools.cached_property
    def facts(self) -> list[StepFacts]:
        """Facts of every step that has samples; one batch is in memory at a time."""
        needs_sets = self.plan.sampling.top_p < 1.0 or self.plan.sampling.top_k > 0
        return [_step_facts(step, self.reader.samples(step), needs_sets) for step in self.reader.sample_steps()]

    @functools.cached_property
    def attempts(self) -> list[tuple[int, int]]:
        """(number, steps that it finished) of every attempt, from the word that each left when it began.

        Raises:
            RecordError: not one such event for every time that the run ran, or steps that go back.
        """
        begun = [event.fields for event in self.events if event.kind == "attempt"]
        ran = sum(state.name == "running" for state in self.states)
        numbers, firsts = [fields.get("number") for fields in begun], [fields.get("next_step") for fields in begun]
        steps = [step for step in firsts if type(step) is int]
        ends = [*steps[1:], len(self.steps)] if steps else []
        counts = [end - first for first, end in zip(steps, ends, strict=True)]
        if numbers != list(range(ran)) or len(steps) != ran or steps[:1] not in ([], [0]) or min(counts, default=0) < 0:
            found = f"attempts {numbers[:20]} from steps {firsts[:20]}"
            raise RecordError(found, f"{ran} from step 0, each going on where the last ended")
        return list(enumerate(counts))

    @property
    def workers(self) -> list[EnvironmentRecord]:
        """Environment records of processes that run operators."""
        return [record for record in self.environments if record.role != "driver"]

    def declared(self, side: Side) -> frozenset[str]:
        """What the engine of a side declares that it records. A built-in engine records everything, whatever an event
        says; of another, what every attempt said."""
        name = self.plan.engines.of(side)
        if name == BUILTIN:
            return frozenset(EVIDENCE[side])
        events = [event.fields for event in self.events if event.kind == "engine_declared"]
        said = [fields.get("records") for fields in events if (fields.get("side"), fields.get("name")) == (side, name)]
        sets = [frozenset(map(str, records)) if isinstance(records, tuple) else frozenset() for records in said]
        return frozenset.intersection(*sets) if sets else frozenset()

    def declares(self, side: str, kind: EvidenceKind) -> bool:
        """Whether the engine of a side declares that it records ``kind``."""
        return side in SIDES and kind in self.declared(side)

    def undeclared(self, asks: Asks) -> list[str]:
        """In words, what of ``asks`` the run's engines do not declare."""
        return [
            f"{kind} by {side} engine {self.plan.engines.of(side)[:40]}"
            for side, kind in asks
            if not self.declares(side, kind)
        ]

    def recording(self, kind: EvidenceKind) -> list[EnvironmentRecord]:
        """Environment records of workers whose engine declares ``kind``."""
        return [record for record in self.workers if self.declares(record.role, kind)]

    def engines(self, role: str) -> set[tuple[str, int]]:
        """``(engine, rank)`` of every worker of a side, from environment records."""
        return {(record.engine, record.rank) for record in self.workers if record.role == role}


@dataclasses.dataclass(frozen=True)
class Gate:
    """One check of a run.

    ``judge`` returns ``(passed, found, hint)``; ``needs`` names gates whose failure makes this one meaningless: it is
    then reported as not judged. ``asks`` are records that an engine may not declare: it judges those that are, and
    warns of the others.
    """

    name: str
    expected: str
    judge: Callable[[RunEvidence], tuple[bool, str, str]]
    needs: tuple[str, ...] = ("records",)
    failure: str = "FAIL"
    asks: Asks = ()


def run_gate(gate: Gate, evidence: RunEvidence, failed: set[str]) -> Finding:
    """Judge one gate; a gate that crashes is itself a finding."""
    blocking = [name for name in gate.needs if name in failed]
    if blocking:
        found = f"{NOT_JUDGED}: {blocking[0]} failed"
        return Finding(gate.name, "WARN", found, gate.expected, f"repair {blocking[0]}")
    missing: list[str] = []
    try:
        missing = evidence.undeclared(gate.asks)
        if missing and len(missing) == len(gate.asks):
            return Finding(gate.name, "WARN", printable(f"{NOT_DECLARED}: {', '.join(missing)}"), gate.expected, "")
        passed, found, hint = gate.judge(evidence)
    except RecordError as error:
        return Finding(gate.name, "FAIL", f"{error.found} ({error.expected} expected)", gate.expected, error.hint)
    except Exception as error:
        text = printable(f"{type(error).__name__}: {str(error)[:300]}")
        return Finding(gate.name, "FAIL", text, gate.expected, "")
    if missing and passed:
        found = printable(f"{found}; {NOT_DECLARED}: {', '.join(missing)}")
        return Finding(gate.name, "WARN", found, gate.expected, "")
    status = "PASS" if passed else gate.failure
    return Finding(gate.name, status, printable(found), gate.expected, "" if passed else printable(hint))


def _step_facts(step: int, batch: SampleBatch, needs_sets: bool) -> StepFacts:
    return StepFacts(
        step=step,
        samples=batch.samples,
        summary=summarise(batch),
        first_mismatch=_first_mismatch(step, batch),
        mask_problem=_mask_problem(step, batch),
        finite_problem=_finite_problem(step, batch),
        retained_problem=_retained_problem(step, batch, needs_sets),
        prompt_problem=_prompt_problem(step, batch),
        drawn=_drawn(batch),
    )


def _drawn(batch: SampleBatch) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    found: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    for length, sample in zip(np.diff(batch.offsets).tolist(), batch.samples, strict=True):
        tokens, identities = found.get(sample.engine, (0, []))
        found[sample.engine] = tokens + length - 1, [*identities, (sample.prompt_index, sample.sample_index)]
    return found


def locate(batch: SampleBatch, position: int) -> str:
    """``sample S (prompt P, sample K) token T`` of a position in the joined tokens."""
    sample = int(np.searchsorted(batch.offsets, position, side="right")) - 1
    identity = batch.samples[sample]
    token = position - int(batch.offsets[sample])
    return f"sample {sample} (prompt {identity.prompt_index}, sample {identity.sample_index}) token {token}"


def _first_mismatch(step: int, batch: SampleBatch) -> str:
    rollout, train = int_view(batch.rollout_logprob), int_view(batch.train_logprob)
    where = np.flatnonzero((rollout != train) & (batch.loss_mask == 1))
    if not where.size:
        return ""
    first = int(where[0])
    return (
        f"step {step} {locate(batch, first)}: rollout {hex_bits(rollout[first], 4)}, train {hex_bits(train[first], 4)}"
    )


def _mask_problem(step: int, batch: SampleBatch) -> str:
    mask = batch.loss_mask
    if int(mask.max(initial=0)) > 1:
        return f"step {step}: a mask value of {int(mask.max())}"
    bounds = zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)
    for sample, (start, end) in enumerate(bounds):
        row = mask[start:end]
        if row.size == 0 or row[0] == 1:
            return f"step {step} sample {sample}: no prompt token"
        if bool(np.any(row[1:] < row[:-1])):
            return f"step {step} sample {sample}: prompt tokens after the response began"
    outside = mask == 0
    for name in ("rollout_logprob", "train_logprob"):
        where = np.flatnonzero(outside & (int_view(getattr(batch, name)) != 0))
        if where.size:
            return f"step {step} {locate(batch, int(where[0]))}: {name} outside the mask is not +0"
    return ""


def _finite_problem(step: int, batch: SampleBatch) -> str:
    for name in ("rollout_logprob", "train_logprob"):
        where = np.flatnonzero(~np.isfinite(getattr(batch, name)))
        if where.size:
            return f"step {step} {locate(batch, int(where[0]))}: {name} is {getattr(batch, name)[where[0]]}"
    return ""


def _retained_problem(step: int, batch: SampleBatch, needed: bool) -> str:
    if batch.retained is None:
        return f"step {step}: no retained sets" if needed else ""
    sets, response = batch.retained, batch.loss_mask == 1
    sizes = np.diff(sets.offsets)
    bare = np.flatnonzero(response & (sizes == 0))
    if needed and bare.size:
        return f"step {step} {locate(batch, int(bare[0]))}: no retained set"
    # One ascending key per (position, id), so that a single search answers for every token.
    positions = np.flatnonzero(response & (sizes > 0))
    keys = np.repeat(np.arange(sizes.size, dtype=np.int64), sizes) * sets.vocab + sets.ids
    tokens = batch.tokens[positions].astype(np.int64)
    inside = (tokens >= 0) & (tokens < sets.vocab)
    wanted = positions * sets.vocab + np.where(inside, tokens, 0)
    index = np.minimum(np.searchsorted(keys, wanted), max(keys.size - 1, 0))
    outside = np.flatnonzero(~inside | (keys[index] != wanted)) if positions.size else positions
    if outside.size:
        position = int(positions[outside[0]])
        return f"step {step} {locate(batch, position)}: token {batch.tokens[position]} outside its retained set"
    return ""


def _prompt_problem(step: int, batch: SampleBatch) -> str:
    """Samples of one prompt must start from the same tokens, or their rewards cannot be compared within a group."""
    prompts: dict[int, bytes] = {}
    for sample, record in enumerate(batch.samples):
        start, end = int(batch.offsets[sample]), int(batch.offsets[sample + 1])
        row = batch.tokens[start:end][batch.loss_mask[start:end] == 0].tobytes()
        if prompts.setdefault(record.prompt_index, row) != row:
            return f"step {step} sample {sample}: prompt {record.prompt_index} with other tokens than its group's"
    return ""
