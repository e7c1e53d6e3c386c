"""A GRPO run on this machine, from its directory's first file to its last word; the steps are in ``loop``."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from rl_engine.config.codec import plan_digest, plan_to_json
from rl_engine.config.plan import Plan
from rl_engine.data.prompts import open_prompts
from rl_engine.engines.setup import model_config
from rl_engine.orchestrators import causes
from rl_engine.orchestrators.asker import Asker
from rl_engine.orchestrators.causes import RunFailed
from rl_engine.orchestrators.display import Display
from rl_engine.orchestrators.failures import Failures
from rl_engine.orchestrators.fleet import Fleet
from rl_engine.orchestrators.judge import Judge
from rl_engine.orchestrators.loop import Parts, run_steps
from rl_engine.orchestrators.memory import MemoryWatch
from rl_engine.orchestrators.ray_head import Head
from rl_engine.orchestrators.recorder import Recorder
from rl_engine.orchestrators.resume import check_inputs_unchanged, input_digests
from rl_engine.orchestrators.tokens import Tokenizer
from rl_engine.records.checkpoints import latest_checkpoint
from rl_engine.records.codec import RecordError
from rl_engine.records.errors import UserError
from rl_engine.records.reader import RunReader
from rl_engine.records.types import StepRecord
from rl_engine.records.writer import RunWriter
from rl_engine.rewards.checker import CheckerUnavailable
from rl_engine.rewards.math import open_reward, reward_name


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
        self.tokens = Tokenizer(Path(plan.model_root))
        self.prompts = open_prompts(plan.data.source, plan.data.path, plan.data.seed)
        self.asker = Asker(plan, self.tokens, self.config.vocabulary, self.config.max_positions)
        self.asker.check(self.prompts)
        self.started = False
        self.steps: list[StepRecord] = earlier.steps() if self.finished and earlier is not None else []
        self.fleet: Fleet | None = None

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
        self.head = head
        recorder, failures = Recorder(self.plan, self.writer, self.display, self.steps), Failures(head, self.writer)
        reward = open_reward(reward_name(self.plan.data.source))
        try:
            self.writer.state("running")
            self._inputs()
            if self.writer.next_step < self.plan.rollouts:
                fleet = self._start(recorder, failures)
                judge = Judge(self.plan, self.tokens, self.config.vocabulary, reward, recorder.warn)
                parts = Parts(self.plan, self.prompts, self.asker, judge, fleet, recorder)
                run_steps(parts, self._restore(fleet, recorder))
                recorder.end(fleet, memory, failures.pids)
                fleet.every("close")
            recorder.own_environment("end")
            self.writer.event("memory", peak_pss_bytes=memory.peak)
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
            reward.close()
            if self.fleet is not None:
                self.fleet.stop()

    def _inputs(self) -> None:
        digests = input_digests(self.plan)
        check_inputs_unchanged(RunReader(self.writer.run_dir), digests)
        self.writer.event("inputs", **digests)

    def _start(self, recorder: Recorder, failures: Failures) -> Fleet:
        recorder.own_environment("start")
        with self.display.task(f"{self.plan.mode}: starting engines"):
            fleet = self.fleet = Fleet(self.head, self.plan, self.display, failures.explained)
            failures.members = fleet.members
            for member, pid in fleet.every("pid"):
                failures.pids[member.name] = pid
                self.writer.event("worker_started", engine=member.engine, rank=member.rank, pid=pid)
            recorder.declare(fleet)
            fleet.every("open")
            recorder.environments(fleet, "start")
        recorder.sync(fleet, 0)  # on resuming too: the model must be the one that the run began with
        recorder.offer(fleet, 0)
        return fleet

    def _restore(self, fleet: Fleet, recorder: Recorder) -> int:
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
            fleet.trainer.restore(str(folder))
            recorder.sync(fleet, state.weight_version)
            recorder.offer(fleet, state.weight_version)
            first, why = state.next_step, "; ".join(passed_over)
        self.writer.event("resumed", first_step=first, finished_steps=done, passed_over=why)
        again = f"; steps {first + 1} to {done} are computed again and compared" if first < done else ""
        recorder.say(f"{self.plan.mode}: {done} finished steps, going on from step {first + 1}{again}")
        return first

    def _close(self, state: str, reason: str) -> None:
        """The last state; on a full disk the error that ended the run is the one to report."""
        if not self.started:
            return
        with contextlib.suppress(OSError):
            self.writer.state(state, " ".join(reason.split())[:500])
