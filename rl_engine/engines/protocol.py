"""What an engine is: the calls that a run makes of it, and nothing else of it is ever called.

A rollout engine draws tokens, a train engine scores them and updates the weights. ``config/engines.py`` says how an
engine is found by its name. The object found is a class: ``processes`` tells how many processes of one engine a run
starts, and in each of them ``open`` makes the engine from its :class:`Host`. All processes of an engine get the same
calls with the same arguments, in the same order; the first one's answer counts. An engine that starts workers itself
has one process, and speaks for all its ranks in :meth:`RolloutEngine.held` and ``evidence``.

Calls come from several threads of a process, one after the other. An engine knows nothing of what carries them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rl_engine.config.engines import EvidenceKind
from rl_engine.config.plan import Plan, SamplingPlan
from rl_engine.engines.types import Redrawn, Request, Sample, Scores, UpdateResult
from rl_engine.records.types import PassRecord, RouteRecord, Side, ThreadSettings

Logprobs = list[npt.NDArray[np.float32]]  # fp32 [R] of every sample
Progress = Callable[[int, int], None]  # (done, all)
Rows = Mapping[str, tuple[int, int]]  # HF name -> (first, last + 1)


class Host(Protocol):
    """One process of an engine, and what its starter does for it.

    Attributes:
        plan: the run.
        side, engine: ``rollout`` and ``rollout-0``, for example: the engine's name in the evidence.
        number: which engine of its side this is, from 0.
        process, processes: this one among the engine's. 1 of 1 where it is opened alone, to score again what a run
            recorded, whatever the plan's topology is.
        store: ``file:///path`` at which the engine's processes may meet; its folder is the run's own. Empty alone.
    """

    @property
    def plan(self) -> Plan: ...
    @property
    def side(self) -> Side: ...
    @property
    def engine(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def process(self) -> int: ...
    @property
    def processes(self) -> int: ...
    @property
    def store(self) -> str: ...

    def prove(self) -> str | None:
        """Tries to refute this package's operators on the present device; the digest of the proof, for the evidence.
        None alone: what is scored again is compared with a record.

        Raises:
            QualificationFailed: a provider's bits are not its contract's.
        """


class RolloutHost(Host, Protocol):
    """One process of a rollout engine."""

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids by the model's tokenizer, for stop strings."""


class WeightPart(Protocol):
    """Rows that one process of a train engine exports, by reference: bytes move when rows are read.

    A part crosses processes as a pickle, whatever it refers to: arrays that a store shares, or handles of device
    memory, which its owner keeps valid until the next ``step``.
    """

    @property
    def version(self) -> int: ...
    @property
    def held(self) -> Rows:
        """HF name -> rows of the part."""

    @property
    def digests(self) -> Mapping[str, str]:
        """HF name -> ``numerics.digest.tensor_digest`` of the part's rows."""

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """bf16 rows [first, last) of an HF tensor, all of them the part's: a copy of the caller's own, on the device
        where they lie."""


class WeightSource(Protocol):
    """All weights of one version, whoever holds them: parts of every process joined."""

    @property
    def version(self) -> int: ...
    @property
    def held(self) -> Rows:
        """HF name -> (0, number of its rows)."""

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """bf16 rows [first, last) of an HF tensor: a copy of the caller's own.

        Raises:
            SnapshotMismatch: a row that no part has.
        """


@dataclasses.dataclass(frozen=True)
class Held:
    """What one rank of a rollout engine computes with: rows of every tensor, and their digests as they were loaded."""

    rank: int
    version: int
    rows: Rows
    digests: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ContractUse:
    """The numerical contract that a rank computes by, and the digest of its proof; None where nothing was proved."""

    id: str
    digest: str
    qualification: str | None


@dataclasses.dataclass(frozen=True)
class EngineEvidence:
    """What one rank tells of itself; what its engine does not declare stays empty.

    ``device`` and ``driver`` in words. ``routes`` are all calls since the engine was opened; ``passes``, told by an
    engine's first rank, those since it was last asked; ``graphs`` batch sizes that are captured. ``memory`` (bytes at
    its peak) and ``sent`` (bytes to other ranks) by purpose, for the reader alone.
    """

    rank: int
    device: str
    driver: str | None = None
    threads: ThreadSettings | None = None
    contract: ContractUse | None = None
    routes: Sequence[RouteRecord] = ()
    passes: Sequence[PassRecord] = ()
    graphs: Sequence[int] = ()
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sent: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What an engine declares: the records that it gives of every rank. Gates ask for these, and say of the others
    that they were not declared."""

    evidence: frozenset[EvidenceKind] = frozenset()


class _Engine(Protocol):
    capabilities: ClassVar[Capabilities]

    @classmethod
    def processes(cls, plan: Plan) -> int:
        """Processes of one engine that a run starts."""

    def evidence(self) -> list[EngineEvidence]:
        """Of every rank that this process speaks for: between them, the processes name each rank of the plan once."""

    def close(self) -> None:
        """The run ends; processes that the engine started end with it."""


class RolloutEngine(_Engine, Protocol):
    """Draws responses. What it draws for a request depends on the request's identity, the step and the weights."""

    @classmethod
    def open(cls, host: RolloutHost) -> RolloutEngine:
        """The engine with the weights of the plan's checkpoint as version 0.

        Raises:
            UserError: a checkpoint, device or setting that it cannot use.
        """

    def generate(
        self,
        requests: list[Request],
        step: int,
        sampling: SamplingPlan,
        stop_tokens: tuple[int, ...],
        progress: Progress | None = None,
    ) -> list[Sample]:
        """One sample a request, in the requests' order, all from the weights that it holds.

        ``stop_tokens`` end a response and belong to it, as ``sampling.stop_strings`` do. Logprobs are those of the
        distribution that was drawn from: after temperature, top-k and top-p.
        """

    def load_weights(self, source: WeightSource) -> None:
        """Replaces the weights; nothing computed with older ones is used afterwards. The source is gone when this
        returns."""

    def held(self) -> list[Held]:
        """Of every rank that this process speaks for."""


class TrainEngine(_Engine, Protocol):
    """Scores samples and updates the weights."""

    @classmethod
    def open(cls, host: Host) -> TrainEngine:
        """The engine with the weights of the plan's checkpoint as version 0, and a frozen copy where
        ``plan.loss.kl_coef`` is above 0.

        Raises:
            UserError: a checkpoint, device or setting that it cannot use.
        """

    def score(self, samples: list[Sample], progress: Progress | None = None) -> Scores:
        """Logprob of every response token by the present weights, after temperature and within the retained sets."""

    def score_reference(self, samples: list[Sample], progress: Progress | None = None) -> Logprobs:
        """The same by the frozen copy; asked for only where the plan has a KL term."""

    def step(
        self,
        samples: list[Sample],
        advantages: list[float],
        old: Logprobs,
        reference: Logprobs | None = None,
        progress: Progress | None = None,
    ) -> UpdateResult:
        """One update over all samples, in canonical order; the version grows by 1."""

    def export(self, version: int) -> WeightPart:
        """This process' rows of the weights.

        Raises:
            VersionMismatch: the engine is at another version.
        """

    def load_weights(self, source: WeightSource) -> None:
        """Replaces the weights alone, to score with them what a run recorded; its optimizer has no use afterwards."""

    def redraw(self, samples: list[Sample], step: int) -> Redrawn:
        """:meth:`score`, and what the plan's seed and sampling draw from the same states; asked for only where the
        engine declares ``draws``, and alone."""

    def save(self, folder: Path) -> None:
        """Everything that the next step depends on, as files of this process in ``folder``.

        Raises:
            OSError: the disk is full or failing.
        """

    def load(self, folder: Path) -> None:
        """The state that all processes' :meth:`save` left in ``folder``, its version too.

        Raises:
            StateMismatch: not a state of this model.
        """


class VersionMismatch(RuntimeError):
    """An engine holds other weights than it was asked for."""
