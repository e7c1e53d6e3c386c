"""A sample while it is drawn, and what is handed out when it is done."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from rl_engine.engines.rollout.builtin.pool import block_hash
from rl_engine.engines.types import Request, RetainedRow, Sample, SamplingSettings, retained_ids
from rl_engine.records.samples import retained_digest


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """How the work is cut. No value changes a bit of a sample in consistency mode.

    Attributes:
        max_batch: samples in a pass.
        chunk: prefill tokens of one sample in a pass.
        page: tokens of a KV page.
        budget: tokens of a pass, prefill and decode together; at least ``max_batch``.
        pages: size of the KV pool; None lets it grow with the samples in flight, so that none is ever preempted.
        share_prefixes: samples with the same beginning share its full pages.
        log_entries: entries that the scheduler's log keeps.
        graph_sizes: batch sizes whose decode passes one rank on a GPU may capture as CUDA graphs; empty: none.
    """

    max_batch: int = 64
    chunk: int = 512
    page: int = 16
    budget: int = 8192
    pages: int | None = None
    share_prefixes: bool = True
    log_entries: int = 4096
    graph_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_batch", "chunk", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")
        if self.budget < self.max_batch:
            raise ValueError(f"a budget of {self.budget} tokens is below max_batch {self.max_batch}")
        if self.pages is not None and self.pages < 1:
            raise ValueError(f"a pool of {self.pages} pages")
        if any(size < 1 for size in self.graph_sizes):
            raise ValueError(f"a graph of {min(self.graph_sizes)} samples")


@dataclasses.dataclass(frozen=True)
class Job:
    """A request with all that decides its tokens. ``stop_strings`` end a response as stop tokens do; ``raw`` asks for
    logprobs at temperature 1 over the whole vocabulary too."""

    request: Request
    step: int
    sampling: SamplingSettings
    stop_strings: tuple[str, ...] = ()
    raw: bool = False

    @property
    def cached_tokens(self) -> int:
        """Most tokens whose keys are ever needed: the last response token's are not."""
        return len(self.request.tokens) + self.sampling.max_response_len - 1


@dataclasses.dataclass(eq=False)
class Sequence:
    """``tokens`` are known, the keys of the first ``computed`` are in the cache. ``number`` is the order of arrival.
    ``raw_logprobs`` has what the job asks for; ``queued`` is how many passes had been decided when the queue took it.
    """

    number: int
    job: Job
    tokens: list[int]
    computed: int = 0
    logprobs: list[float] = dataclasses.field(default_factory=list)
    raw_logprobs: list[float] = dataclasses.field(default_factory=list)
    retained: list[RetainedRow] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    queued: int = 0
    waited: int = 0
    preempted: int = 0
    restarted: int = 0
    shared_tokens: int = 0
    hashes: list[bytes] = dataclasses.field(default_factory=list)

    @staticmethod
    def begin(number: int, job: Job) -> Sequence:
        return Sequence(number, job, list(job.request.tokens))

    @property
    def responses(self) -> int:
        return len(self.tokens) - len(self.job.request.tokens)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next draw."""
        return len(self.tokens) - self.computed

    @property
    def on_last(self) -> bool:
        """The next token drawn ends the sample."""
        return self.responses + 1 >= self.job.sampling.max_response_len

    def hash_of(self, block: int, page: int) -> bytes:
        """Identity of the page ``block`` of ``page`` tokens, which must all be known."""
        while len(self.hashes) <= block:
            first = len(self.hashes) * page
            previous = self.hashes[-1] if self.hashes else b""
            self.hashes.append(block_hash(previous, self.tokens[first : first + page]))
        return self.hashes[block]

    def restart(self) -> None:
        """Throws the response away: it began with weights that are gone."""
        self.restarted += bool(self.responses)
        del self.tokens[len(self.job.request.tokens) :]
        for values in (self.logprobs, self.raw_logprobs, self.retained, self.versions, self.hashes):
            values.clear()


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """A finished sample.

    Attributes:
        number: what :meth:`RolloutEngine.add` returned.
        sample: prompt, response, logprobs and retained sets.
        raw_logprobs: fp32 [R] at temperature 1 over the whole vocabulary, where the job asked for them.
        versions: int64 [R], the weight version that drew each token; all equal.
        waited: passes in which the sample was in the queue and not in the batch.
        preempted, restarted: times its keys, or its response, were thrown away.
        shared_tokens: tokens whose keys other samples had computed.
    """

    number: int
    sample: Sample
    raw_logprobs: npt.NDArray[np.float32] | None
    versions: npt.NDArray[np.int64]
    waited: int
    preempted: int
    restarted: int
    shared_tokens: int

    @staticmethod
    def of(sequence: Sequence, engine: str, reason: str) -> Output:
        request, versions = sequence.job.request, np.array(sequence.versions, dtype=np.int64)
        assert (versions == versions[0]).all(), "a sample of two weight versions"
        sample = Sample(
            prompt=request.prompt,
            sample=request.sample,
            prompt_tokens=np.array(request.tokens, dtype=np.int32),
            response_tokens=np.array(sequence.tokens[len(request.tokens) :], dtype=np.int32),
            logprobs=np.array(sequence.logprobs, dtype=np.float32),
            retained=tuple(sequence.retained) if sequence.retained else None,
            weight_version=int(versions[0]),
            engine=engine,
            finish_reason=reason,
        )
        return Output(
            number=sequence.number,
            sample=sample,
            raw_logprobs=np.array(sequence.raw_logprobs, dtype=np.float32) if sequence.job.raw else None,
            versions=versions,
            waited=sequence.waited,
            preempted=sequence.preempted,
            restarted=sequence.restarted,
            shared_tokens=sequence.shared_tokens,
        )

    def retained_digests(self, vocabulary: int) -> list[bytes] | None:
        """SHA-256 of every response token's retained set, as the run's records have it."""
        if self.sample.retained is None:
            return None
        return [retained_digest(retained_ids(row, vocabulary)) for row in self.sample.retained]
