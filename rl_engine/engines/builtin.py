"""The built-in engines behind the protocol: each process is one rank, on the CPU or on one of the machine's GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch

from rl_engine.config.engines import EVIDENCE
from rl_engine.config.plan import Plan, SamplingPlan
from rl_engine.engines.evidence import route_records
from rl_engine.engines.protocol import (
    Capabilities,
    ContractUse,
    EngineEvidence,
    Held,
    Host,
    Logprobs,
    Progress,
    RolloutHost,
    VersionMismatch,
    WeightSource,
)
from rl_engine.engines.rollout.builtin.passes import PassLog
from rl_engine.engines.setup import (
    device_of,
    device_words,
    join,
    own_contract,
    read_weights,
    rollout_engine,
    sampling_settings,
    train_engine,
    use_threads,
)
from rl_engine.engines.snapshot import load_source, own_digests
from rl_engine.engines.train.redraw import redraw
from rl_engine.engines.train.state import load_state, save_state
from rl_engine.engines.types import Redrawn, Request, Sample, Scores, UpdateResult, WeightSnapshot
from rl_engine.ops import Operators
from rl_engine.parallel import single_mesh
from rl_engine.records.types import PassRecord

P = ParamSpec("P")
T = TypeVar("T")


def on_device(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """An engine's method whose kernels are launched on the engine's GPU: calls come on several threads, and which GPU
    is in force is a thread's own business."""

    @functools.wraps(method)
    def call(self: Any, *arguments: P.args, **words: P.kwargs) -> T:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        return method(self, *arguments, **words)

    return call


class _Rank:
    """What both sides share: threads, the device, the start-up proof in consistency mode, the other ranks.

    Raises:
        QualificationFailed: a provider's bits are wrong here.
        UserError: a device that cannot be used.
        PeerLost: another rank did not come.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, host: Host) -> None:
        plan = self.plan = host.plan
        self.host, self.rank = host, host.process
        self.threads = use_threads(plan)
        self.device = device_of(plan, host.number * host.processes + host.process)
        self.qualification = host.prove() if plan.mode == "consistency" else None
        alone = host.processes == 1
        self.mesh = single_mesh() if alone else join(plan, host.side, host.process, host.store, self.device)

    def _release(self) -> None:
        """What is free goes to the other engine's process on this GPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _evidence(self, ops: Operators, passes: list[PassRecord], graphs: tuple[int, ...]) -> EngineEvidence:
        device, driver = device_words(self.device)
        contract = own_contract(self.plan)
        memory = {}
        if self.device.type == "cuda":
            memory["peak_device_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return EngineEvidence(
            rank=self.rank,
            device=device,
            driver=driver,
            threads=self.threads,
            contract=ContractUse(contract.id, contract.digest(), self.qualification),
            routes=route_records(ops.routes(), self.host.side),
            passes=passes,
            graphs=graphs,
            memory=memory,
            sent=self.mesh.sent(),
        )

    def close(self) -> None:
        """Nothing was started."""


class BuiltinTrainEngine(_Rank):
    """One rank of the built-in trainer."""

    capabilities = Capabilities(frozenset(EVIDENCE["train"]))

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.engine = train_engine(self.plan, self.mesh, self.device)
        self._release()

    @classmethod
    def processes(cls, plan: Plan) -> int:
        return plan.topology.train_tp * plan.topology.train_cp

    @classmethod
    def open(cls, host: Host) -> BuiltinTrainEngine:
        return cls(host)

    @on_device
    def score(self, samples: list[Sample], progress: Progress | None = None) -> Scores:
        with self.engine.ops.counting("selected_logp") as counted:
            logprobs = self.engine.score(samples, progress)
        self._release()
        return Scores(logprobs, counted.calls, counted.rows)

    @on_device
    def score_reference(self, samples: list[Sample], progress: Progress | None = None) -> Logprobs:
        logprobs = self.engine.score_reference(samples)
        self._release()
        return logprobs

    @on_device
    def step(
        self,
        samples: list[Sample],
        advantages: list[float],
        old: Logprobs,
        reference: Logprobs | None = None,
        progress: Progress | None = None,
    ) -> UpdateResult:
        result = self.engine.step(samples, advantages, old, reference, progress)
        self.engine.release_gradients()
        self._release()
        return result

    @on_device
    def export(self, version: int) -> WeightSnapshot:
        if version != self.engine.version:
            raise VersionMismatch(f"weights of version {self.engine.version}, asked for {version}")
        if self.mesh.cp.index:
            return WeightSnapshot(version, {}, {})  # the first CP rank has the same rows
        return self.engine.export()

    @on_device
    def load_weights(self, source: WeightSource) -> None:
        load_source(self.engine.weights, source)
        self.engine.weights.refresh_input_shards(self.mesh.tp)
        self.engine.version = source.version

    @on_device
    def redraw(self, samples: list[Sample], step: int) -> Redrawn:
        return redraw(self.engine, samples, self.plan.sampling, step)

    @on_device
    def save(self, folder: Path) -> None:
        save_state(self.engine, folder)

    @on_device
    def load(self, folder: Path) -> None:
        load_state(self.engine, folder)

    @on_device
    def evidence(self) -> list[EngineEvidence]:
        return [self._evidence(self.engine.ops, [], ())]


class BuiltinRolloutEngine(_Rank):
    """One rank of a built-in rollout engine."""

    capabilities = Capabilities(frozenset(EVIDENCE["rollout"]))

    def __init__(self, host: RolloutHost) -> None:
        super().__init__(host)
        weights = read_weights(self.plan, self.mesh, self.device)
        self._rows = {name: (first, first + len(rows)) for name, (first, rows) in weights.export_rows().items()}
        self._digests = own_digests(weights)
        self._passes = PassLog()
        decode = host.decode if self.plan.sampling.stop_strings else None
        self.engine = rollout_engine(self.plan, weights, host.engine, self.mesh, decode, self._passes)
        self._release()

    @classmethod
    def processes(cls, plan: Plan) -> int:
        return plan.topology.rollout_tp * plan.topology.rollout_cp

    @classmethod
    def open(cls, host: RolloutHost) -> BuiltinRolloutEngine:
        return cls(host)

    @on_device
    def generate(
        self,
        requests: list[Request],
        step: int,
        sampling: SamplingPlan,
        stop_tokens: tuple[int, ...],
        progress: Progress | None = None,
    ) -> list[Sample]:
        settings = sampling_settings(sampling, stop_tokens)
        return self.engine.generate(requests, step, settings, progress, sampling.stop_strings)

    @on_device
    def load_weights(self, source: WeightSource) -> None:
        self._digests = self.engine.load_weights(source)
        self._release()

    def held(self) -> list[Held]:
        return [Held(self.rank, self.engine.version, self._rows, self._digests)]

    @on_device
    def evidence(self) -> list[EngineEvidence]:
        graphs = () if self.engine.graphs is None else tuple(sorted(set(self.engine.graphs.captured)))
        return [self._evidence(self.engine.ops, self._passes.take(), graphs)]
