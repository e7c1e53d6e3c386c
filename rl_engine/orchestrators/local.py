"""A GRPO run on this machine: Ray actors and the loop. The loop in :meth:`LocalRun._steps` is the documentation."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_engine.checks.validate import passed, record_validation, run_validation
from rl_engine.config.codec import plan_digest, plan_to_json
from rl_engine.config.plan import Plan
from rl_engine.data.prompts import Prompt, encode_prompt, open_prompts
from rl_engine.engines.evidence import sample_batch
from rl_engine.engines.setup import model_config
from rl_engine.engines.train.grpo import group_advantages
from rl_engine.engines.types import Request, Sample, UpdateResult, canonical
from rl_engine.orchestrators import ray_head as head
from rl_engine.orchestrators.actors import SOURCE_ROOT, BaselineWorker, RolloutWorker, TrainWorker
from rl_engine.orchestrators.display import (
    Display,
    Stopwatch,
    rollout_speed,
    summary_table,
    total_seconds,
    verdict_lines,
)
from rl_engine.orchestrators.memory import MemoryWatch
from rl_engine.orchestrators.tokens import Tokenizer
from rl_engine.records.environment import collect_environment, source_record
from rl_engine.records.errors import UserError
from rl_engine.records.pair import pair_record, write_pair
from rl_engine.records.statistics import logprob_statistics
from rl_engine.records.types import SampleBatch, SampleRecord, StepRecord, StepSeconds
from rl_engine.records.writer import RunWriter
from rl_engine.rewards.math import open_reward, reward_name

POLL_SECONDS = 0.25


class RunFailed(RuntimeError):
    """A run ended by itself: a worker died or an engine raised. The message says which and why."""


class LocalRun:
    """One run of one plan."""

    def __init__(self, ray: Any, plan: Plan, display: Display) -> None:
        self.ray, self.plan, self.display = ray, plan, display
        self.config = model_config(plan)
        self.tokenizer = Tokenizer(Path(plan.model_root))
        self.prompts = open_prompts(plan.data.source, plan.data.path, plan.data.seed)
        self._check_lengths(self._requests(self.prompts.batch(0, plan.data.prompts_per_step)))
        text = plan_to_json(plan)
        self.writer = RunWriter.create(Path(plan.run_dir), json.loads(text), plan_digest(plan))
        self.steps: list[StepRecord] = []
        self.actors: list[Any] = []

    # -- the loop

    def run(self) -> None:
        """All steps.

        Raises:
            RunFailed: a worker died or raised.
            UserError: the proof of the operators failed, or an input cannot be used.
        """
        self.reward = open_reward(reward_name(self.plan.data.source))
        try:
            self.writer.state("running")
            self._start()
            self._steps()
            self._end()
            self.writer.state("finished")
        except KeyboardInterrupt:
            self.writer.state("interrupted", "interrupted by the user")
            raise
        except BaseException as error:
            self.writer.state("failed", " ".join(str(error).split())[:500])
            raise
        finally:
            self.reward.close()
            head.stop(self.ray, self.actors)

    def _steps(self) -> None:
        for step in range(self.plan.rollouts):
            watch, seconds = Stopwatch(), {}
            prompts = self.prompts.batch(step, self.plan.data.prompts_per_step)
            requests = self._requests(prompts)
            self._check_lengths(requests)
            samples, seconds["rollout"] = self._call(
                "generating", self.rollout, "generate", requests, step, self.tokenizer.stop_tokens
            )
            samples = canonical(samples)
            watch.lap()
            records = self._judge(prompts, samples)
            seconds["reward"] = watch.lap()
            old, reference, seconds["old_logp"] = self._call("scoring", self.train, "score", samples)
            batch = sample_batch(samples, old, records, self.config.vocabulary)
            advantages = self._advantages(step, records, samples)
            update: UpdateResult = self._call("training", self.train, "step", samples, advantages, old, reference)
            watch.lap()
            self._sync(step + 1)
            seconds["weight_sync"] = watch.lap()
            self.writer.samples(step, batch)
            seconds["other"] = watch.lap()
            self._record(step, batch, update, seconds)

    # -- the phases

    def _start(self) -> None:
        self._environment("start")
        with self.display.task(f"{self.plan.mode}: starting engines"):
            self.train = head.start(self.ray, TrainWorker, self.plan)
            self.rollout = head.start(self.ray, RolloutWorker, self.plan, "rollout-0")
            self.actors = [self.train, self.rollout]
            for actor in self.actors:
                self.writer.environment(self._get(actor.environment.remote("start")))
        self.weights_digest = self.writer.weights(0, self._get(self.train.export.options(num_returns=2).remote()[1]))
        self._loaded(0, self._get(self.rollout.starting_digest.remote()))

    def _requests(self, prompts: list[Prompt]) -> list[Request]:
        return [
            Request(prompt.index, sample, tuple(tokens))
            for prompt in prompts
            for tokens in [encode_prompt(self.tokenizer.tokenizer, prompt)]
            for sample in range(self.plan.data.samples_per_prompt)
        ]

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

    def _judge(self, prompts: list[Prompt], samples: list[Sample]) -> list[SampleRecord]:
        """Rewards, and the samples' identities with them."""
        answers = {prompt.index: prompt.answer for prompt in prompts}
        texts = [self.tokenizer.decode(s.response_tokens.tolist()) for s in samples]
        results = self.reward.reward(texts, [answers[s.prompt] for s in samples])
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

    def _sync(self, version: int) -> None:
        snapshot, digests = self.train.export.options(num_returns=2).remote()
        with self.display.task(f"{self.plan.mode}: weights"):
            self.weights_digest = self.writer.weights(version, self._get(digests))
            self._loaded(version, self._get(self.rollout.load_weights.remote(snapshot)))

    def _loaded(self, version: int, digest: str) -> None:
        self.writer.event("weights_loaded", engine="rollout-0", rank=0, version=version, digest=digest)
        if digest != self.weights_digest:
            raise RunFailed(f"rollout-0 holds other weights than version {version} of the trainer")

    def _record(self, step: int, batch: SampleBatch, update: UpdateResult, seconds: dict[str, float]) -> None:
        statistics = logprob_statistics(batch)
        records = batch.samples
        responses = statistics.tokens_compared
        changed = update.changed_elements
        self.writer.event("update", step=step, changed_elements=changed, elements=update.elements)
        if self.plan.mode == "consistency" and update.ratio_mismatches:
            text = f"step {step + 1}: {update.ratio_mismatches} tokens with a ratio that is not 1 on an exact path"
            self._warn("ratio_mismatch", text, step=step, count=update.ratio_mismatches)
        record = StepRecord(
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
        )
        self.writer.step(record)
        self.steps.append(record)
        self.display.step(self.plan.mode, record, self.plan.rollouts)

    def _end(self) -> None:
        for actor, name in zip(self.actors, ("train", "rollout-0"), strict=True):
            self.writer.routes(name, 0, self._get(actor.routes.remote()))
            self.writer.environment(self._get(actor.environment.remote("end")))
        self._environment("end")

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

    def _warn(self, kind: str, text: str, **fields: Any) -> None:
        self.writer.event(kind, **fields)
        self.display.say(f"{self.plan.mode}: {text}")

    def _call(self, what: str, actor: Any, method: str, *arguments: Any) -> Any:
        """One method of a worker, with its progress on the screen."""
        pending = getattr(actor, method).remote(*arguments)
        with self.display.task(f"{self.plan.mode}: {what}") as advance:
            while not self.ray.wait([pending], timeout=POLL_SECONDS)[0]:
                if self.display.console.is_terminal:
                    advance(*self._get(actor.progress.remote()))
        return self._get(pending)

    def _get(self, reference: Any) -> Any:
        """A worker's result; its failure as one of ours."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayActorError as error:
            reason = " ".join(str(error).split())
            raise RunFailed(f"{self._name(error)} died: {reason[:300]}") from error
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, UserError):
                raise cause from error
            if type(cause).__name__ == "QualificationFailed":
                self.writer.event("refusal", operator="qualify", reason=str(cause)[:400])
                raise UserError(
                    f"operators that fail their proof ({cause})", "bits equal to the contract", "rlk-repro qualify"
                ) from error
            self.writer.log(str(error))
            raise RunFailed(f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}") from error

    def _name(self, error: Any) -> str:
        dead = getattr(error, "actor_id", None)
        for actor, name in zip(self.actors, ("trainer rank 0", "rollout engine rollout-0"), strict=False):
            if dead is not None and str(dead) == actor._actor_id.hex():
                return name
        return "a worker"


# -- one or two runs, and the verdict


def run(plans: list[Plan], *, wait: bool, json_output: bool) -> int:
    """Runs every plan in turn, validates each, and judges a pair. Returns the exit code.

    Raises:
        UserError: an input that cannot be used; nothing has run, or the run directory says what happened.
    """
    assert wait, "a detached run is refused by the launcher"
    display = Display()
    config = model_config(plans[0])
    model_bytes = 2 * sum(math.prod(shape) for shape in config.tensor_shapes().values())
    runs: list[LocalRun] = []
    with _interruptible(), MemoryWatch() as memory, head.ray_head(plans[0].threads, model_bytes) as ray:
        for plan in plans:
            code = _run_one(ray, plan, display, runs)
            if code:
                _finish_output(plans, code, json_output)
                return code
        baseline = _baseline(ray, plans[0], runs[0], display) if len(plans) == 2 else None
    return _verdict(plans, runs, display, baseline, memory.peak, json_output)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a run like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _run_one(ray: Any, plan: Plan, display: Display, runs: list[LocalRun]) -> int:
    """0, or the exit code of a run that failed."""
    local = LocalRun(ray, plan, display)
    runs.append(local)
    try:
        local.run()
    except RunFailed as error:
        display.say(
            f"rlk-repro: run failed: {error}; {len(local.steps)} finished steps are in {plan.run_dir}, "
            f"log {local.writer.log_path}"
        )
        return 3
    return 0


def _baseline(ray: Any, plan: Plan, local: LocalRun, display: Display) -> tuple[int, float]:
    """(tokens, seconds) of transformers' generate on the first step's prompts."""
    prompts = local.prompts.batch(0, plan.data.prompts_per_step)
    tokens = [list(request.tokens) for request in local._requests(prompts)]
    worker = head.start(ray, BaselineWorker, plan)
    try:
        with display.task("transformers: generating, for comparison"):
            return local._get(worker.measure.remote(tokens))
    finally:
        head.stop(ray, [worker])


def _verdict(
    plans: list[Plan],
    runs: list[LocalRun],
    display: Display,
    baseline: tuple[int, float] | None,
    peak: int,
    json_output: bool,
) -> int:
    good = True
    for plan in plans:
        findings = run_validation(plan.run_dir)
        record_validation(plan.run_dir, findings)
        good &= passed(findings)
        for finding in findings:
            if finding.status == "FAIL":
                display.say(f"{plan.mode}: [FAIL] {finding.name}: found {finding.found}, expected {finding.expected}")
        display.say(f"{plan.mode}: {sum(f.status == 'PASS' for f in findings)} of {len(findings)} gates pass")
    display.console.print(summary_table([(run.plan.mode, run.steps) for run in runs]))
    code = 0 if good else 1
    if len(plans) == 2:
        code = max(code, _pair_verdict(plans, runs, display, baseline))
    display.say(f"peak memory of all processes, Ray included: {peak / 1e9:.1f} GB")
    _finish_output(plans, code, json_output)
    return code


def _pair_verdict(plans: list[Plan], runs: list[LocalRun], display: Display, baseline: tuple[int, float] | None) -> int:
    """The verdict from the two run directories' files; 1 where it is not what a pair promises."""
    native, consistency = plans
    assert native.pair_id is not None
    pair = pair_record(native.pair_id, Path(native.run_dir), Path(consistency.run_dir))
    path = write_pair(Path(native.output_root), pair)
    slow, fast = runs[0].steps, runs[1].steps
    if baseline is not None:
        display.say(f"transformers' generate on the same model and prompts: {baseline[0] / baseline[1]:.1f} tok/s")
    step_ratio = sum(map(total_seconds, fast)) / sum(map(total_seconds, slow))
    speed = rollout_speed(fast) / rollout_speed(slow)
    display.say(f"consistency against native: {speed:.2f}x the rollout tokens/s, {step_ratio:.2f}x the time of a step")
    for line in verdict_lines(pair):
        display.say(line)
    display.say(f"pair: {path}")
    wanted = pair.control or not native.require_control
    return 0 if pair.exact and pair.same_start and wanted else 1


def _finish_output(plans: list[Plan], code: int, json_output: bool) -> None:
    for plan in plans:
        if not Path(plan.run_dir).is_dir():
            continue
        if json_output:
            status = "succeeded" if code == 0 else "failed"
            print(json.dumps({"status": status, "submission_id": plan.run_id, "run_dir": plan.run_dir}))
        else:
            print(f"run_dir: {plan.run_dir}")
    sys.stdout.flush()
