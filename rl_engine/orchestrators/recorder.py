"""What a run writes down: its engines, every step, and how it ended."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from rl_engine.config.engines import SIDES, find_engine
from rl_engine.config.plan import Plan
from rl_engine.engines.protocol import ContractUse, EngineEvidence
from rl_engine.engines.types import Scored, UpdateResult
from rl_engine.orchestrators.actors import SOURCE_ROOT
from rl_engine.orchestrators.causes import RunFailed
from rl_engine.orchestrators.display import Display, step_line
from rl_engine.orchestrators.fleet import Exported, Fleet, Member
from rl_engine.orchestrators.memory import MemoryWatch
from rl_engine.records.checkpoints import write_checkpoint
from rl_engine.records.environment import collect_environment
from rl_engine.records.kept import keep_or_drop, offer_weights
from rl_engine.records.sources import source_record
from rl_engine.records.statistics import logprob_statistics
from rl_engine.records.types import SampleBatch, StepRecord, StepSeconds
from rl_engine.records.writer import RunWriter


@dataclasses.dataclass(frozen=True)
class Computed:
    """A step that was computed: ``rollout``, ``reward`` and ``weight_sync`` in seconds."""

    step: int
    batch: SampleBatch
    scored: Scored
    update: UpdateResult
    rollout: float
    reward: float
    weight_sync: float

    def record(self, other: float) -> StepRecord:
        """The step's line in ``steps.jsonl``; ``other`` is the rest of its seconds."""
        statistics, update, samples = logprob_statistics(self.batch), self.update, self.batch.samples
        responses = statistics.tokens_compared
        return StepRecord(
            step=self.step,
            weight_version=self.step,
            samples=len(samples),
            tokens_compared=responses,
            mismatches=statistics.mismatches,
            max_abs_dlogp=statistics.max_abs_dlogp,
            mean_abs_dlogp=statistics.mean_abs_dlogp,
            kl_k1=statistics.kl_k1,
            kl_k3=statistics.kl_k3,
            reward_mean=math.fsum(sample.reward for sample in samples) / len(samples),
            response_len_mean=responses / len(samples),
            truncated=sum(sample.finish_reason == "length" for sample in samples),
            entropy_mean=update.entropy_mean,
            loss=update.loss,
            clip_fraction=update.clip_fraction,
            grad_norm=update.grad_norm,
            grad_norm_hex=update.grad_norm.hex(),
            seconds=StepSeconds(
                rollout=self.rollout,
                reward=self.reward,
                old_logp=self.scored.seconds,
                train=update.seconds_train,
                optimizer=update.seconds_optimizer,
                weight_sync=self.weight_sync,
                other=other,
            ),
            train_tokens_per_s=update.train_tokens / (update.seconds_train + update.seconds_optimizer),
            rollout_tokens_per_gpu_s=responses / self.rollout,
            score_calls=self.scored.calls,
            score_tokens=self.scored.tokens,
            ratio_mismatches=update.ratio_mismatches,
        )


class Recorder:
    """Writes a run's records and tells the user.

    Attributes:
        steps: lines of ``steps.jsonl`` so far.
    """

    def __init__(self, plan: Plan, writer: RunWriter, display: Display, steps: list[StepRecord]) -> None:
        self.plan, self.writer, self.display, self.steps = plan, writer, display, steps
        self._keeps = plan.backend == "cpu"  # a GPU's models are large
        self._exported: Exported | None = None  # the last sync's weights, in the object store until they are offered
        self._captured: set[tuple[str, int, int]] = set()  # graphs that the record knows of

    def say(self, text: str) -> None:
        """To the log and to the user."""
        self.writer.log(text)
        self.display.say(text)

    def warn(self, kind: str, text: str, **fields: Any) -> None:
        """Says ``text`` and records the event ``kind``."""
        self.writer.event(kind, **fields)
        self.say(f"{self.plan.mode}: {text}")

    # -- engines

    def declare(self, fleet: Fleet) -> None:
        """Which engines these are, and what each records: gates ask for that."""
        for side in SIDES:
            engine = find_engine(side, self.plan.engines.of(side))
            declared = sorted(fleet.capabilities[side].evidence)
            words = {"name": engine.name, "package": engine.package, "version": engine.version}
            self.writer.event("engine_declared", side=side, records=declared, **words)

    def environments(self, fleet: Fleet, phase: Literal["start", "end"]) -> list[tuple[Member, EngineEvidence]]:
        """Every rank's surroundings: its process', and what the rank tells of itself."""
        processes = {member.name: record for member, record in fleet.every("environment", phase)}
        ranks = fleet.evidence(fleet.members)
        for member, rank in ranks:
            contract = rank.contract or ContractUse("", "", None)
            record = dataclasses.replace(
                processes[member.name],
                rank=rank.rank,
                device=rank.device,
                driver=rank.driver,
                threads=rank.threads,
                contract_id=contract.id,
                contract_digest=contract.digest,
                qualification_digest=contract.qualification,
            )
            self.writer.environment(record)
        return ranks

    def own_environment(self, phase: Literal["start", "end"]) -> None:
        """This process' surroundings."""
        self.writer.environment(
            collect_environment(
                phase=phase,
                role="driver",
                engine="driver",
                rank=0,
                device="cpu",
                contract_id=self.plan.contract_id,
                contract_digest=self.plan.contract_digest,
                qualification_digest=None,
                threads=None,
                sources=(source_record("rl_kernel", SOURCE_ROOT),),
            )
        )

    def end(self, fleet: Fleet, memory: MemoryWatch, pids: dict[str, int]) -> None:
        """What every rank sent and needed."""
        ranks = self.environments(fleet, "end")
        peaks = {member.name: peak for member, peak in fleet.every("peak")}
        for member, rank in ranks:
            place: dict[str, Any] = {"engine": member.engine, "rank": rank.rank}
            if rank.sent:
                self.writer.event("bytes_sent", **place, **rank.sent)
            sizes = {"peak_pss_bytes": memory.peaks.get(pids[member.name], 0), "peak_rss_bytes": peaks[member.name]}
            self.writer.event("worker_memory", **place, **sizes, **rank.memory)

    # -- steps

    def knows(self, step: int) -> bool:
        """Whether the step is recorded already."""
        return step < self.writer.next_step

    def passes(self, fleet: Fleet) -> None:
        """The passes that drew the step, as each engine's first rank tells them: all ranks decide alike."""
        if fleet.declares("rollout", "passes"):
            for member, rank in fleet.evidence([engine[0] for engine in fleet.rollout.engines]):
                if rank.rank == 0:
                    self.writer.passes(member.engine, rank.passes)

    def sync(self, fleet: Fleet, version: int) -> None:
        """The trainer's weights to every rollout rank; the first version is already there, from the checkpoint.

        Raises:
            RunFailed: a rank holds other weights.
        """
        with self.display.task(f"{self.plan.mode}: weights"):
            weights = fleet.trainer.export(version)
            self._exported = weights
            digest = self.writer.weights(version, weights.digests)
            if version:
                fleet.rollout.load(weights)
            for member, rank, equal in fleet.holds(weights) if fleet.declares("rollout", "weights") else ():
                if not equal:
                    raise RunFailed(f"{member.name} holds other weights than version {version} of the trainer")
                self.writer.event("weights_loaded", version=version, digest=digest, engine=member.engine, rank=rank)

    def offer(self, fleet: Fleet, version: int) -> None:
        """Hands the last sync's memory back; before, the weights that the next step draws with go to a file, since they
        may be kept once it is over."""
        weights, self._exported = self._exported, None
        wanted = max(self.writer.next_step, 1) <= version < self.plan.rollouts
        if self._keeps and wanted and weights is not None:
            offer_weights(self.writer.run_dir, version, lambda path: fleet.trainer.keep(weights, str(path)))

    def confirm(self, computed: Computed) -> None:
        """Compares a recorded step with what came out of it again.

        Raises:
            RecordError: another sample, logprob or sum.
        """
        self.writer.confirm(computed.record(0.0), computed.batch)

    def step_files(self, fleet: Fleet, computed: Computed) -> None:
        """What a step must leave before it counts as finished: samples, measured calls, the trainer's state when
        due."""
        self.writer.samples(computed.step, computed.batch)
        for member, rank in fleet.evidence(fleet.members):
            if fleet.declares(member.side, "routes"):
                self.writer.routes(member.engine, rank.rank, rank.routes)
            for size in rank.graphs:
                if (member.engine, rank.rank, size) not in self._captured:
                    self._captured.add((member.engine, rank.rank, size))
                    self.writer.event("graph_capture", engine=member.engine, rank=rank.rank, size=size)
        done, every = computed.step + 1, self.plan.checkpoint_every
        if every and done % every == 0:
            write_checkpoint(
                self.writer.run_dir,
                self.writer.plan_digest,
                next_step=done,
                weight_version=done,
                save=lambda folder: fleet.trainer.save(str(folder)),
            )

    def step(self, computed: Computed, other: float) -> None:
        """The step's line: it is finished, and its weights may be kept. ``other`` seconds went into its files."""
        update, step = computed.update, computed.step
        self.writer.event("update", step=step, changed_elements=update.changed_elements, elements=update.elements)
        if self.plan.mode == "consistency" and update.ratio_mismatches:
            text = f"step {step + 1}: {update.ratio_mismatches} tokens with a ratio that is not 1 on an exact path"
            self.warn("ratio_mismatch", text, step=step, count=update.ratio_mismatches)
        record = computed.record(other)
        self.writer.step(record)
        self.steps.append(record)
        self.writer.log(step_line(self.plan.mode, record, self.plan.rollouts))
        self.display.step(self.plan.mode, record, self.plan.rollouts)
        keep_or_drop(self.writer.run_dir, step)
