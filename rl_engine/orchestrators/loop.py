"""The loop of a run: this file is the algorithm."""

from __future__ import annotations

import dataclasses

from rl_engine.config.plan import Plan
from rl_engine.data.prompts import PromptSource
from rl_engine.engines.evidence import sample_batch
from rl_engine.engines.types import canonical
from rl_engine.orchestrators import causes
from rl_engine.orchestrators.asker import Asker
from rl_engine.orchestrators.display import Stopwatch
from rl_engine.orchestrators.fleet import Fleet
from rl_engine.orchestrators.judge import Judge
from rl_engine.orchestrators.recorder import Computed, Recorder


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of: ``asker`` makes requests of prompts, ``judge`` rewards and advantages of samples,
    ``fleet`` has the engines, ``recorder`` the run directory."""

    plan: Plan
    prompts: PromptSource
    asker: Asker
    judge: Judge
    fleet: Fleet
    recorder: Recorder


def run_steps(parts: Parts, first: int) -> None:
    """GRPO from step ``first`` on. A step that is recorded already is computed again and compared.

    Raises:
        RunFailed: an engine failed, or holds other weights than the trainer's.
        RecordError: a step that was computed again came out differently.
        UserError: a prompt that cannot be used.
    """
    plan, fleet, judge, recorder = parts.plan, parts.fleet, parts.judge, parts.recorder
    for step in range(first, plan.rollouts):
        watch = Stopwatch()
        prompts = parts.prompts.batch(step, plan.data.prompts_per_step)
        requests = parts.asker.requests(prompts)

        drawn = fleet.rollout.generate(requests, step, parts.asker.stop_tokens)
        samples = canonical(drawn.samples)
        recorder.passes(fleet)
        watch.lap()

        records = judge.rewards(step, prompts, samples)
        advantages = judge.advantages(step, records, samples)
        reward = watch.lap()

        scored = fleet.trainer.score(samples)  # the trainer's own logprobs, never the rollout's
        batch = sample_batch(samples, scored.logprobs, records, judge.vocabulary)
        update = fleet.trainer.step(samples, advantages, scored.logprobs, scored.reference)
        causes.check_finite(step, update)
        watch.lap()

        recorder.sync(fleet, step + 1)
        computed = Computed(step, batch, scored, update, drawn.seconds, reward, watch.lap())
        recorder.offer(fleet, step + 1)
        if recorder.knows(step):
            recorder.confirm(computed)
            continue
        recorder.step_files(fleet, computed)
        recorder.step(computed, watch.lap())
