"""The processes of a run's engines: each opens one engine by the plan and passes calls on. They know nothing of Ray;
``ray_head`` makes actors of them."""

from __future__ import annotations

import abc
import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rl_engine.config.plan import Plan, SamplingPlan
from rl_engine.engines.protocol import EngineEvidence, Held, Logprobs, RolloutEngine, Rows, TrainEngine, WeightPart
from rl_engine.engines.types import Request, Sample, Scored, UpdateResult
from rl_engine.orchestrators.memory import peak_resident, return_memory
from rl_engine.orchestrators.tokens import Tokenizer
from rl_engine.records.environment import collect_environment
from rl_engine.records.sources import source_record
from rl_engine.records.types import EnvironmentRecord, Side

SOURCE_ROOT = Path(__file__).resolve().parents[2]


class QualificationFailed(RuntimeError):
    """A provider's bits are not its contract's on this machine."""


@dataclasses.dataclass(frozen=True)
class WorkerHost:
    """What an engine in a worker is told and may ask; see :class:`rl_engine.engines.protocol.Host`."""

    plan: Plan
    side: Side
    engine: str
    number: int
    process: int
    processes: int
    store: str

    def prove(self) -> str | None:
        """
        Raises:
            QualificationFailed: a provider's bits are wrong here.
        """
        from rl_engine.engines.setup import model_config, own_contract
        from rl_engine.qualify.proof import prove

        contract = own_contract(self.plan)
        sides = [dict(self.plan.providers.train), dict(self.plan.providers.rollout)]
        folder = Path(self.store.removeprefix("file://")).parent if self.store else None
        sizes = (self.plan.topology.train_tp, self.plan.topology.rollout_tp)
        proof = prove(model_config(self.plan), sides, contract, folder=folder, tp_sizes=sizes)
        if proof.failed:
            case = proof.failed[0]
            raise QualificationFailed(
                f"{len(proof.failed)} of {len(proof.cases)} cases differ, first {case.operator} through "
                f"{case.provider}: {case.what}, {case.differing} of {case.elements} elements"
            )
        return proof.digest

    def decode(self, tokens: list[int]) -> str:
        return _tokenizer(self.plan.model_root).decode(tokens)


@functools.lru_cache(maxsize=1)
def _tokenizer(model_root: str) -> Tokenizer:
    return Tokenizer(Path(model_root))


class _Worker(abc.ABC):
    """What both sides share: the engine, its progress and its evidence.

    The constructor only remembers: an error in it would reach the caller as the actor's death, without its type.
    """

    engine: TrainEngine | RolloutEngine

    def __init__(self, host: WorkerHost) -> None:
        self.host = host
        self._progress = (0, 0)

    def pid(self) -> int:
        """Id of the worker's process."""
        return os.getpid()

    def open(self) -> None:
        """The engine with its weights.

        Raises:
            QualificationFailed: a provider's bits are wrong here.
            UserError: a checkpoint or a device that cannot be used.
            PeerLost: another rank did not come.
        """
        self._open()
        return_memory()

    @abc.abstractmethod
    def _open(self) -> None:
        """Makes ``engine``."""

    def _report(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def progress(self) -> tuple[int, int]:
        """(done, all) of the call in progress."""
        return self._progress

    def peak(self) -> int:
        """Bytes of this process at its peak, in host memory."""
        return peak_resident()

    def evidence(self) -> list[EngineEvidence]:
        """Of every rank that this process speaks for."""
        return self.engine.evidence()

    def close(self) -> None:
        """Ends what the engine started."""
        self.engine.close()

    def environment(self, phase: Literal["start", "end"]) -> EnvironmentRecord:
        """This process; what its ranks tell of themselves is still to come."""
        return collect_environment(
            phase=phase,
            role=self.host.side,
            engine=self.host.engine,
            rank=self.host.process,
            device="",
            contract_id="",
            contract_digest="",
            qualification_digest=None,
            threads=None,
            sources=(source_record("rl_kernel", SOURCE_ROOT),),
        )


class TrainWorker(_Worker):
    engine: TrainEngine

    def _open(self) -> None:
        from rl_engine.engines.registry import train_class

        self.engine = train_class(self.host.plan).open(self.host)

    def score(self, samples: list[Sample]) -> Scored:
        """The logprobs, the reference model's too where the loss asks for them."""
        started = time.perf_counter()
        self._report(0, 0)
        scores = self.engine.score(samples, self._report)
        reference = self.engine.score_reference(samples) if self.host.plan.loss.kl_coef > 0 else None
        return_memory()
        return Scored(scores.logprobs, reference, scores.calls, scores.tokens, time.perf_counter() - started)

    def step(
        self, samples: list[Sample], advantages: list[float], old: Logprobs, reference: Logprobs | None
    ) -> UpdateResult:
        self._report(0, 0)
        result = self.engine.step(samples, advantages, old, reference, self._report)
        return_memory()
        return result

    def save(self, folder: str) -> None:
        """This process' part of the trainer's state, as files in ``folder``.

        Raises:
            OSError: the disk is full or failing.
        """
        self.engine.save(Path(folder))

    def restore(self, folder: str) -> None:
        """The trainer's state from what :meth:`save` of all processes left in ``folder``.

        Raises:
            StateMismatch: not a state of this model.
        """
        self.engine.load(Path(folder))

    def keep(self, path: str, *parts: WeightPart) -> None:
        """What all processes exported as one file.

        Raises:
            OSError: the disk is full or failing.
        """
        from rl_engine.engines.kept import save_kept
        from rl_engine.engines.snapshot import JoinedWeights

        save_kept(JoinedWeights(parts), Path(path))

    def export(self, version: int) -> tuple[WeightPart, Rows, Mapping[str, str]]:
        """(weights, their rows, digests): the weights go straight to the rollout engines, the rest to the driver."""
        part = self.engine.export(version)
        return part, part.held, part.digests

    def digests(self, rows: Sequence[tuple[str, int, int]], *parts: WeightPart) -> list[str]:
        """Digest of rows (name, first, last + 1) of what all processes exported."""
        from rl_engine.engines.snapshot import JoinedWeights, rows_digest

        whole = JoinedWeights(parts)
        return [rows_digest(whole, name, first, last) for name, first, last in rows]


class RolloutWorker(_Worker):
    engine: RolloutEngine

    def _open(self) -> None:
        from rl_engine.engines.registry import rollout_class

        self.engine = rollout_class(self.host.plan).open(self.host)

    def generate(
        self, requests: list[Request], step: int, sampling: SamplingPlan, stop_tokens: tuple[int, ...]
    ) -> tuple[list[Sample], float]:
        """(samples in the requests' order, seconds)."""
        started = time.perf_counter()
        self._report(0, len(requests))
        samples = self.engine.generate(requests, step, sampling, stop_tokens, self._report)
        return samples, time.perf_counter() - started

    def load_weights(self, *parts: WeightPart) -> None:
        """The trainer's weights, as its processes exported them."""
        from rl_engine.engines.snapshot import JoinedWeights

        self.engine.load_weights(JoinedWeights(parts))
        return_memory()

    def held(self) -> list[Held]:
        """Weights of every rank that this process speaks for, as they were loaded."""
        return self.engine.held()


class BaselineWorker:
    """transformers' ``generate`` with the run's threads, for the speed beside native mode."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def measure(self, prompts: list[list[int]]) -> tuple[int, float]:
        """(new tokens, seconds)."""
        from rl_engine.engines.rollout.transformers_baseline import measure
        from rl_engine.engines.setup import device_of, use_threads

        use_threads(self.plan)
        sampling = self.plan.sampling
        speed = measure(
            *(Path(self.plan.model_root), prompts, sampling.max_response_len, sampling.temperature),
            device_of(self.plan),
        )
        return speed.tokens, speed.seconds
