"""The workers of a run. They hold one engine each and know nothing of Ray; ``ray_head`` makes actors of them."""

from __future__ import annotations

import abc
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from rl_engine.config.plan import DEVICE_KINDS, Plan
from rl_engine.engines.evidence import route_records
from rl_engine.engines.types import Request, Sample, Scored, UpdateResult, WeightSnapshot
from rl_engine.numerics.contract import Contract
from rl_engine.orchestrators.memory import peak_resident, return_memory
from rl_engine.orchestrators.tokens import Tokenizer
from rl_engine.records.environment import collect_environment
from rl_engine.records.sources import source_record
from rl_engine.records.types import EnvironmentRecord, PassRecord, RouteRecord, Side, ThreadSettings

P = ParamSpec("P")
T = TypeVar("T")
Logprobs = list[npt.NDArray[np.float32]]
SOURCE_ROOT = Path(__file__).resolve().parents[2]


class QualificationFailed(RuntimeError):
    """A provider's bits are not its contract's on this machine."""


def own_contract(plan: Plan) -> Contract:
    """The contract that this process' code computes with, for the plan's fold units and compiler."""
    gemm = "chain256" if plan.contract_id.endswith("-chain256") else "chain"
    return Contract(device_kind=DEVICE_KINDS[plan.backend], gemm=gemm, fold_tokens=plan.fold_tokens)


def on_device(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A worker's method whose kernels are launched on the worker's GPU: an actor's calls run on several threads, and
    which GPU is in force is a thread's own business."""

    @functools.wraps(method)
    def call(self: Any, *arguments: P.args, **words: P.kwargs) -> T:
        if self.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.device)
        return method(self, *arguments, **words)

    return call


class _Worker(abc.ABC):
    """What both sides share: threads, the start-up proof, progress and evidence.

    The constructor only remembers: an error in it would reach the caller as the actor's death, without its type.
    """

    side: Side

    def __init__(self, plan: Plan, name: str, rank: int = 0, store: str = "") -> None:
        self.plan, self.name, self.rank, self.store = plan, name, rank, store
        self._progress = (0, 0)

    def pid(self) -> int:
        """Id of the worker's process."""
        return os.getpid()

    def open(self) -> None:
        """Threads, the start-up proof in consistency mode, and the engine with its weights.

        Raises:
            QualificationFailed: a provider's bits are wrong here.
            UserError: a checkpoint or a device that cannot be used.
            PeerLost: another rank did not come.
        """
        from rl_engine.engines.setup import device_of, join, use_threads

        self.threads: ThreadSettings = use_threads(self.plan)
        self.device = device_of(self.plan, self._place())
        self.qualification = self._prove() if self.plan.mode == "consistency" else None
        self.mesh = join(self.plan, self.side, self.rank, self.store, self.device)
        self._open_engine()
        self._return_memory()

    def _return_memory(self) -> None:
        """What is free goes back to the system, and on a GPU to the other engine's process."""
        import torch

        return_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _place(self) -> int:
        """This rank's number among all ranks of its side."""
        return self.rank

    @abc.abstractmethod
    def _open_engine(self) -> None:
        """Makes ``engine``."""

    def captured(self) -> tuple[int, ...]:
        """Batch sizes whose passes are captured as graphs."""
        return ()

    def _prove(self) -> str:
        from rl_engine.engines.setup import model_config
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

    def _report(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def progress(self) -> tuple[int, int]:
        """(done, all) of the call in progress."""
        return self._progress

    def peaks(self) -> dict[str, int]:
        """Bytes of this process at its peak, in host memory and on its GPU."""
        import torch

        found = {"peak_rss_bytes": peak_resident()}
        if self.device.type == "cuda":
            found["peak_device_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return found

    def sent(self) -> dict[str, int]:
        """Bytes that this rank sent to others, by purpose."""
        return self.mesh.sent()

    def closing_environment(self) -> EnvironmentRecord:
        """This process at its end, for the evidence."""
        return self.environment("end")

    def environment(self, phase: Any = "start") -> EnvironmentRecord:
        """This process, for the evidence."""
        from rl_engine.engines.setup import device_words

        contract = own_contract(self.plan)
        device, driver = device_words(self.device)
        return collect_environment(
            phase=phase,
            role=self.side,
            engine=self.name,
            rank=self.rank,
            device=device,
            driver=driver,
            contract_id=contract.id,
            contract_digest=contract.digest(),
            qualification_digest=self.qualification,
            threads=self.threads,
            sources=(source_record("rl_kernel", SOURCE_ROOT),),
        )


class TrainWorker(_Worker):
    side: Side = "train"

    def _open_engine(self) -> None:
        from rl_engine.engines.setup import train_engine

        self.engine = train_engine(self.plan, self.mesh, self.device)

    @on_device
    def score(self, samples: list[Sample]) -> Scored:
        """The logprobs, the reference model's too where the loss asks for them."""
        started = time.perf_counter()
        self._report(0, 0)
        with self.engine.ops.counting("selected_logp") as counted:
            logprobs = self.engine.score(samples, self._report)
        reference = self.engine.score_reference(samples) if self.plan.loss.kl_coef > 0 else None
        self._return_memory()
        return Scored(logprobs, reference, counted.calls, counted.rows, time.perf_counter() - started)

    @on_device
    def step(
        self, samples: list[Sample], advantages: list[float], old: Logprobs, reference: Logprobs | None
    ) -> UpdateResult:
        self._report(0, 0)
        result = self.engine.step(samples, advantages, old, reference, self._report)
        self.engine.release_gradients()
        self._return_memory()
        return result

    @on_device
    def save(self, folder: str) -> None:
        """This rank's part of the trainer's state, as files in ``folder``.

        Raises:
            OSError: the disk is full or failing.
        """
        from rl_engine.engines.train.state import save_state

        save_state(self.engine, Path(folder))

    @on_device
    def restore(self, folder: str) -> None:
        """The trainer's state from what :meth:`save` of all ranks left in ``folder``.

        Raises:
            StateMismatch: not a state of this model.
        """
        from rl_engine.engines.train.state import load_state

        load_state(self.engine, Path(folder))

    @on_device
    def export(self) -> tuple[WeightSnapshot, dict[str, str]]:
        """(weights, digests): the weights go straight to the rollout engines, the digests to the evidence."""
        snapshot = self.engine.export()
        return snapshot, snapshot.digests

    def routes(self) -> list[RouteRecord]:
        return route_records(self.engine.ops.routes(), self.side)


class RolloutWorker(_Worker):
    side: Side = "rollout"

    def __init__(self, plan: Plan, name: str, rank: int = 0, store: str = "", number: int = 0) -> None:
        super().__init__(plan, name, rank, store)
        self.number = number  # of its engine

    def _place(self) -> int:
        return self.number * self.plan.topology.rollout_tp * self.plan.topology.rollout_cp + self.rank

    def captured(self) -> tuple[int, ...]:
        graphs = self.engine.graphs
        return () if graphs is None else tuple(sorted(set(graphs.captured)))

    def _open_engine(self) -> None:
        from rl_engine.engines.rollout.builtin.passes import PassLog
        from rl_engine.engines.setup import read_weights, rollout_engine
        from rl_engine.engines.snapshot import own_digests

        weights = read_weights(self.plan, self.mesh, self.device)
        self._rows = {name: (first, first + len(rows)) for name, (first, rows) in weights.export_rows().items()}
        self._digests = own_digests(weights)
        decode = Tokenizer(Path(self.plan.model_root)).decode if self.plan.sampling.stop_strings else None
        self._passes = PassLog()
        self.engine = rollout_engine(self.plan, weights, self.name, self.mesh, decode, self._passes)

    def held(self) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
        """(rows of every tensor, their digests) of the weights as they were loaded or arrived."""
        return self._rows, self._digests

    def passes(self) -> list[PassRecord]:
        """The engine's passes since the last call."""
        return self._passes.take()

    @on_device
    def generate(self, requests: list[Request], step: int, stop_tokens: tuple[int, ...]) -> tuple[list[Sample], float]:
        """(samples in the requests' order, seconds)."""
        from rl_engine.engines.setup import sampling_settings

        started = time.perf_counter()
        self._report(0, len(requests))
        settings, stops = sampling_settings(self.plan, stop_tokens), self.plan.sampling.stop_strings
        samples = self.engine.generate(requests, step, settings, self._report, stops)
        return samples, time.perf_counter() - started

    @on_device
    def load_weights(self, *snapshots: WeightSnapshot) -> None:
        """This rank's rows of the trainer ranks' snapshots."""
        self._digests = self.engine.load_weights(snapshots)
        self._return_memory()

    def routes(self) -> list[RouteRecord]:
        return route_records(self.engine.ops.routes(), self.side)


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
