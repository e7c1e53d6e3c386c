"""A GRPO run on this machine: Ray actors and the loop. The loop in :meth:`LocalRun._steps` is the documentation."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rl_engine.config.codec import plan_digest, plan_to_json
from rl_engine.config.plan import Plan
from rl_engine.data.prompts import Prompt, encode_prompt, open_prompts
from rl_engine.engines.evidence import sample_batch
from rl_engine.engines.kept import save_kept
from rl_engine.engines.setup import model_config
from rl_engine.engines.train.grpo import group_advantages
from rl_engine.engines.types import Request, Sample, Scored, UpdateResult, canonical
from rl_engine.orchestrators import causes
from rl_engine.orchestrators.actors import SOURCE_ROOT
from rl_engine.orchestrators.causes import RunFailed
from rl_engine.orchestrators.display import Advance, Display, Stopwatch, step_line
from rl_engine.orchestrators.fleet import Fleet
from rl_engine.orchestrators.memory import MemoryWatch
from rl_engine.orchestrators.ray_head import Head
from rl_engine.orchestrators.resume import check_inputs_unchanged, input_digests
from rl_engine.orchestrators.tokens import Tokenizer
from rl_engine.records.checkpoints import latest_checkpoint, write_checkpoint
from rl_engine.records.codec import RecordError
from rl_engine.records.environment import collect_environment
from rl_engine.records.errors import UserError
from rl_engine.records.kept import keep_or_drop, offer_weights
from rl_engine.records.reader import RunReader
from rl_engine.records.sources import source_record
from rl_engine.records.statistics import logprob_statistics
from rl_engine.records.types import SampleBatch, SampleRecord, StepRecord, StepSeconds
from rl_engine.records.writer import RunWriter
from rl_engine.rewards.checker import CheckerUnavailable
from rl_engine.rewards.math import open_reward, reward_name

T = TypeVar("T")
CHECKED_PROMPTS = 4096  # looked at before anything starts; later ones in their step
JUDGED = {"correct", "wrong", "empty", "no answer", "too long"}  # reasons that say something about the response


class LocalRun:
    """One run of one plan: a new one, or the rest of one whose directory is there.

    Raises:
        UserError: an input that cannot be used; nothing was started or written.
    """

    writer: RunWriter

    def __init__(self, plan: Plan, display: Display, earlier: RunReader | None = None) -> None:
        self.plan, self.display, self.earlier = plan, display, earlier
        self.finished = earlier is not None and "finished" in {state.name for state in earlier.states()}
        if plan.data.samples_per_prompt < 2:
            raise UserError(
                f"--samples-per-prompt {plan.data.samples_per_prompt}",
                "at least 2: GRPO compares the samples of one prompt",
                "--samples-per-prompt 8",
            )
        self.config = model_config(plan)
        self.tokenizer = Tokenizer(Path(plan.model_root))
        self.prompts = open_prompts(plan.data.source, plan.data.path, plan.data.seed)
        for step in range(min(plan.rollouts, math.ceil(CHECKED_PROMPTS / plan.data.prompts_per_step))):
            self.requests(self.prompts.batch(step, plan.data.prompts_per_step))
        self.started = False
        self.steps: list[StepRecord] = earlier.steps() if self.finished and earlier is not None else []
        self.fleet: Any = None
        self.pids: dict[str, int] = {}
        self._keeps = plan.backend == "cpu"  # a GPU's models are large
        self._exported: list[Any] = []  # the last sync's weights, in the object store until they are offered
        self._captured: set[tuple[str, int]] = set()  # graphs that the record knows of

    # -- the loop

    def claim(self) -> None:
        """Makes the run directory, or takes over the one that is there; from here on it says how the run ends.

        Raises:
            UserError: the directory is taken, or another process works on it.
            RunFailed: it cannot be written.
        """
        if self.finished:
            return
        try:
            if self.earlier is None:
                plan = json.loads(plan_to_json(self.plan))
                self.writer = RunWriter.create(Path(self.plan.run_dir), plan, plan_digest(self.plan))
            else:
                self.writer = RunWriter.take_over(Path(self.plan.run_dir))
                self.steps = RunReader(self.writer.run_dir).steps()
        except OSError as error:
            raise RunFailed(str(error)) from error
        self.started = True

    def leave(self) -> None:
        """An end for a run that did not begin, since the other one of its pair broke off."""
        if self.started and self.writer.current_state == "planned":
            self._close("interrupted", "the run before it did not finish")

    def run(self, head: Head, memory: MemoryWatch) -> None:
        """All steps that are not finished yet.

        Raises:
            RunFailed: a worker died or raised, a record could not be written, or a step that was computed again came
                out differently.
            UserError: the proof of the operators failed, or an input cannot be used.
        """
        self.head, self.ray = head, head.ray
        self.reward = open_reward(reward_name(self.plan.data.source))
        try:
            self.writer.state("running")
            self._inputs()
            if self.writer.next_step < self.plan.rollouts:
                self._start()
                self._steps(self._restore())
            self._end(memory)
            self.writer.state("finished")
        except (KeyboardInterrupt, BrokenPipeError) as error:
            why = "interrupted by the user" if isinstance(error, KeyboardInterrupt) else "nobody reads the output"
            self._close("interrupted", why)
            raise
        except BaseException as error:
            self._close("failed", str(error))
            if isinstance(error, (OSError, RecordError)):
                raise causes.of_record(error) from error
            if isinstance(error, CheckerUnavailable):
                raise RunFailed(str(error)) from error
            raise
        finally:
            self.reward.close()
            if self.fleet is not None:
                self.fleet.stop()

    def _inputs(self) -> None:
        digests = input_digests(self.plan)
        check_inputs_unchanged(RunReader(self.writer.run_dir), digests)
        self.writer.event("inputs", **digests)

    def _steps(self, first: int) -> None:
        for step in range(first, self.plan.rollouts):
            watch, seconds = Stopwatch(), {}
            prompts = self.prompts.batch(step, self.plan.data.prompts_per_step)
            requests = self.requests(prompts)
            samples, seconds["rollout"] = self._generate(requests, step)
            samples = canonical(samples)
            watch.lap()
            records = self._judge(step, prompts, samples)
            seconds["reward"] = watch.lap()
            scored: Scored = self._train("scoring", "score", samples)
            old, seconds["old_logp"] = scored.logprobs, scored.seconds
            batch = sample_batch(samples, old, records, self.config.vocabulary)
            advantages = self._advantages(step, records, samples)
            update: UpdateResult = self._train("training", "step", samples, advantages, old, scored.reference)
            causes.check_finite(step, update)
            watch.lap()
            self._sync(step + 1)
            seconds["weight_sync"] = watch.lap()
            self._offer(step + 1)
            if step < self.writer.next_step:
                record = self._step_record(step, batch, scored, update, {**seconds, "other": 0.0})
                self.writer.confirm(record, batch)
                continue
            self.writer.samples(step, batch)
            self._save(step + 1)
            seconds["other"] = watch.lap()
            self._record(step, batch, scored, update, seconds)
            keep_or_drop(self.writer.run_dir, step)

    # -- the phases

    def _start(self) -> None:
        self._environment("start")
        with self.display.task(f"{self.plan.mode}: starting engines"):
            self.fleet = Fleet(self.head, self.plan)
            for member, pid in self.guard(lambda: self.fleet.every("pid")):
                self.pids[member.name] = pid
                self.writer.event("worker_started", engine=member.engine, rank=member.rank, pid=pid)
            self.guard(lambda: self.fleet.every("open"))
            for _, record in self.guard(lambda: self.fleet.every("environment")):
                self.writer.environment(record)
        self._sync(0)  # on resuming too: the model must be the one that the run began with
        self._offer(0)

    def _restore(self) -> int:
        """The first step to compute: after the newest trainer state that belongs to finished steps.

        Finished steps that lie behind it are computed again, and must come out as they are recorded.
        """
        done = self.writer.next_step
        if not done:
            return 0
        try:
            folder, state, passed_over = latest_checkpoint(self.writer.run_dir, self.writer.plan_digest, at_most=done)
        except UserError as error:
            first, why = 0, error.found
        else:
            with self.display.task(f"{self.plan.mode}: restoring the trainer"):
                self.guard(lambda: self.fleet.train("restore", str(folder)))
            self._sync(state.weight_version)
            self._offer(state.weight_version)
            first, why = state.next_step, "; ".join(passed_over)
        self.writer.event("resumed", first_step=first, finished_steps=done, passed_over=why)
        again = f"; steps {first + 1} to {done} are computed again and compared" if first < done else ""
        self._say(f"{self.plan.mode}: {done} finished steps, going on from step {first + 1}{again}")
        return first

    def _save(self, done: int) -> None:
        """What this step must leave before it counts as finished: measured calls, and the trainer's state when due."""
        for member, routes in self.guard(lambda: self.fleet.every("routes")):
            self.writer.routes(member.engine, member.rank, routes)
        if self.plan.engine.graph_capture_sizes:
            for member, sizes in self.guard(lambda: self.fleet.every("captured")):
                for size in sizes:
                    if (member.name, size) not in self._captured:
                        self._captured.add((member.name, size))
                        self.writer.event("graph_capture", engine=member.engine, rank=member.rank, size=size)
        every = self.plan.checkpoint_every
        if every and done % every == 0:
            write_checkpoint(
                self.writer.run_dir,
                self.writer.plan_digest,
                next_step=done,
                weight_version=done,
                save=lambda folder: self._train("saving its state", "save", str(folder)),
            )

    def requests(self, prompts: list[Prompt]) -> list[Request]:
        """Every sample of a step to draw.

        Raises:
            UserError: a prompt that the model or a micro-batch cannot hold.
        """
        requests = [
            Request(prompt.index, sample, tuple(tokens))
            for prompt in prompts
            for tokens in [self._encode(prompt)]
            for sample in range(self.plan.data.samples_per_prompt)
        ]
        self._check_lengths(requests)
        return requests

    def _encode(self, prompt: Prompt) -> list[int]:
        tokens = encode_prompt(self.tokenizer.tokenizer, prompt)
        if max(tokens) >= self.config.vocabulary:
            raise UserError(
                f"token {max(tokens)} in the prompt {prompt.source}",
                f"ids below the model's vocabulary of {self.config.vocabulary}",
                "use the tokenizer that belongs to the model",
            )
        return tokens

    def _check_lengths(self, requests: list[Request]) -> None:
        """The longest possible sample must fit into the model and, as a fold unit, into a micro-batch."""
        cap = self.plan.sampling.max_response_len
        longest = max(len(request.tokens) for request in requests) + cap
        if longest > self.config.max_positions:
            raise UserError(
                f"a prompt of {longest - cap} tokens with --max-response-len {cap}",
                f"at most {self.config.max_positions} positions together",
                "lower --max-response-len or drop the prompt",
            )
        unit = max(longest, min(self.plan.fold_tokens, longest * len(requests)))
        if unit > self.plan.max_tokens_per_gpu:
            raise UserError(
                f"--max-tokens-per-gpu {self.plan.max_tokens_per_gpu}",
                f"at least {unit}, one fold unit (prompt and response of a sample, or --fold-tokens)",
                f"--max-tokens-per-gpu {unit}",
            )

    def _judge(self, step: int, prompts: list[Prompt], samples: list[Sample]) -> list[SampleRecord]:
        """Rewards, and the samples' identities with them."""
        answers = {prompt.index: prompt.answer for prompt in prompts}
        texts = [self.tokenizer.decode(s.response_tokens.tolist()) for s in samples]
        results = self.reward.reward(texts, [answers[s.prompt] for s in samples])
        odd = sorted({result.reason for result in results} - JUDGED)
        if odd:
            count = sum(result.reason in odd for result in results)
            why = ", ".join(odd)[:200]
            text = f"step {step + 1}: {count} rewards are 0 because the checker could not judge ({why})"
            self._warn("rewards_not_judged", text, step=step, count=count, reasons=odd)
        return [
            SampleRecord(
                prompt_index=s.prompt,
                sample_index=s.sample,
                seed=self.plan.sampling.rollout_seed,
                weight_version=s.weight_version,
                engine=s.engine,
                text=text,
                reward=result.value,
                answer=answers[s.prompt],
                finish_reason=s.finish_reason,
            )
            for s, text, result in zip(samples, texts, results, strict=True)
        ]

    def _advantages(self, step: int, records: list[SampleRecord], samples: list[Sample]) -> list[float]:
        loss = self.plan.loss
        rewards, groups = [r.reward for r in records], [r.prompt_index for r in records]
        advantages = group_advantages(rewards, groups, loss.std_normalization, loss.advantage_eps)
        empty = sum(len(s.response_tokens) == 1 and s.finish_reason == "stop" for s in samples)
        if empty:
            self._warn("empty_responses", f"step {step + 1}: {empty} responses end at once", step=step, count=empty)
        if not any(advantages):
            text = f"step {step + 1}: every group has equal rewards, so all advantages are 0 and no reward is learned"
            self._warn("zero_advantages", text, step=step)
        return advantages

    def _generate(self, requests: list[Request], step: int) -> tuple[list[Sample], float]:
        stops = self.tokenizer.stop_tokens
        with self.display.task(f"{self.plan.mode}: generating") as advance:
            drawn = self.guard(lambda: self.fleet.generate(requests, step, stops, self._shown(advance)))
        for engine, passes in self.guard(self.fleet.passes):
            self.writer.passes(engine, passes)
        return drawn

    def _train(self, what: str, method: str, *arguments: Any) -> Any:
        with self.display.task(f"{self.plan.mode}: {what}") as advance:
            return self.guard(lambda: self.fleet.train(method, *arguments, advance=self._shown(advance)))

    def _shown(self, advance: Advance) -> Advance | None:
        """Progress is asked for only where it can be seen."""
        return advance if self.display.console.is_terminal else None

    def _sync(self, version: int) -> None:
        """The trainer's weights to every rollout rank; the first version is already there, from the checkpoint."""
        with self.display.task(f"{self.plan.mode}: weights"):
            snapshots, digests = self.guard(self.fleet.export)
            self._exported = snapshots
            digest = self.writer.weights(version, digests)
            if version:
                self.guard(lambda: self.fleet.load(snapshots))
            for member, equal in self.guard(lambda: self.fleet.held(snapshots, digests)):
                if not equal:
                    raise RunFailed(f"{member.name} holds other weights than version {version} of the trainer")
                place = {"engine": member.engine, "rank": member.rank}
                self.writer.event("weights_loaded", version=version, digest=digest, **place)

    def _offer(self, version: int) -> None:
        """Hands the last sync's memory back; before, the weights that the next step draws with go to a file, since they
        may be kept once it is over."""
        exported, self._exported = self._exported, []
        if self._keeps and max(self.writer.next_step, 1) <= version < self.plan.rollouts:
            offer_weights(self.writer.run_dir, version, lambda path: save_kept(self.ray.get(exported), path))

    def _record(
        self, step: int, batch: SampleBatch, scored: Scored, update: UpdateResult, seconds: dict[str, float]
    ) -> None:
        changed = update.changed_elements
        self.writer.event("update", step=step, changed_elements=changed, elements=update.elements)
        if self.plan.mode == "consistency" and update.ratio_mismatches:
            text = f"step {step + 1}: {update.ratio_mismatches} tokens with a ratio that is not 1 on an exact path"
            self._warn("ratio_mismatch", text, step=step, count=update.ratio_mismatches)
        record = self._step_record(step, batch, scored, update, seconds)
        self.writer.step(record)
        self.steps.append(record)
        self.writer.log(step_line(self.plan.mode, record, self.plan.rollouts))
        self.display.step(self.plan.mode, record, self.plan.rollouts)

    def _step_record(
        self, step: int, batch: SampleBatch, scored: Scored, update: UpdateResult, seconds: dict[str, float]
    ) -> StepRecord:
        statistics = logprob_statistics(batch)
        records = batch.samples
        responses = statistics.tokens_compared
        return StepRecord(
            step=step,
            weight_version=step,
            samples=len(records),
            tokens_compared=responses,
            mismatches=statistics.mismatches,
            max_abs_dlogp=statistics.max_abs_dlogp,
            mean_abs_dlogp=statistics.mean_abs_dlogp,
            kl_k1=statistics.kl_k1,
            kl_k3=statistics.kl_k3,
            reward_mean=math.fsum(r.reward for r in records) / len(records),
            response_len_mean=responses / len(records),
            truncated=sum(r.finish_reason == "length" for r in records),
            entropy_mean=update.entropy_mean,
            loss=update.loss,
            clip_fraction=update.clip_fraction,
            grad_norm=update.grad_norm,
            grad_norm_hex=update.grad_norm.hex(),
            seconds=StepSeconds(train=update.seconds_train, optimizer=update.seconds_optimizer, **seconds),
            train_tokens_per_s=update.train_tokens / (update.seconds_train + update.seconds_optimizer),
            rollout_tokens_per_gpu_s=responses / seconds["rollout"],
            score_calls=scored.calls,
            score_tokens=scored.tokens,
            ratio_mismatches=update.ratio_mismatches,
        )

    def _end(self, memory: MemoryWatch) -> None:
        if self.fleet is not None:
            for _, record in self.guard(lambda: self.fleet.every("closing_environment")):
                self.writer.environment(record)
            for member, sent in self.guard(lambda: self.fleet.every("sent")):
                if sent:
                    self.writer.event("bytes_sent", engine=member.engine, rank=member.rank, **sent)
            for member, peaks in self.guard(lambda: self.fleet.every("peaks")):
                sizes = {"peak_pss_bytes": memory.peaks.get(self.pids[member.name], 0), **peaks}
                self.writer.event("worker_memory", engine=member.engine, rank=member.rank, **sizes)
        self._environment("end")
        self.writer.event("memory", peak_pss_bytes=memory.peak)

    # -- helpers

    def _environment(self, phase: Any) -> None:
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

    def _close(self, state: str, reason: str) -> None:
        """The last state; on a full disk the error that ended the run is the one to report."""
        if not self.started:
            return
        with contextlib.suppress(OSError):
            self.writer.state(state, " ".join(reason.split())[:500])

    def _say(self, text: str) -> None:
        self.writer.log(text)
        self.display.say(text)

    def _warn(self, kind: str, text: str, **fields: Any) -> None:
        self.writer.event(kind, **fields)
        self._say(f"{self.plan.mode}: {text}")

    def guard(self, call: Callable[[], T]) -> T:
        """What ``call`` gets from workers; their failure as one of ours."""
        errors = self.ray.exceptions
        try:
            return call()
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, UserError):
                raise cause from error
            if type(cause).__name__ == "QualificationFailed":
                self.writer.event("refusal", operator="qualify", reason=str(cause)[:400])
                raise UserError(
                    f"operators that fail their proof ({cause})", "bits equal to the contract", "rlk-repro qualify"
                ) from error
            self.writer.log(str(error))
            raise causes.of_error(cause) from error
        except errors.RayError as error:
            self.writer.log(str(error))
            raise self._death(error) from error

    def _death(self, error: Any) -> RunFailed:
        """Who died; what the worker wrote last goes to the log."""
        for member in self.fleet.members:
            if getattr(error, "actor_id", None) == member.actor._actor_id.hex():
                if member.name not in self.pids:
                    return RunFailed(f"{member.name} did not start: {' '.join(str(error).split())[-300:]}")
                pid = self.pids[member.name]
                said = self.head.last_words(pid)
                self.writer.log(said or f"{member.name} wrote nothing")
                self.writer.event("worker_died", engine=member.engine, rank=member.rank, pid=pid)
                return causes.of_death(member.name, pid, said, causes.memory_kills() - self.fleet.memory_kills)
        return causes.of_error(error)
