"""Training: one scoring pass and one GRPO update, consistency against native; growth with samples and length."""

from __future__ import annotations

import argparse
import functools

from benchmarks import workload
from benchmarks.measure import Case, Report, in_turns
from rl_engine.config.plan import LossPlan, OptimizerPlan
from rl_engine.engines.train.builtin import TrainEngine, TrainSettings

QUICK_LAYERS = 8  # both trainers live at once: 18 bytes a parameter each

SETTINGS = TrainSettings(
    optimizer=OptimizerPlan(lr=1e-6, weight_decay=0.1, beta1=0.9, beta2=0.98, eps=1e-8, clip_grad=1.0),
    loss=LossPlan(kl_coef=0.0, std_normalization=True, advantage_eps=1e-6, clip_low=0.2, clip_high=0.2),
    temperature=1.0,
    fold_tokens=512,
    max_tokens=None,
)


def main(options: argparse.Namespace) -> Report:
    """(samples, tokens of each): one axis grows at a time."""
    provider = workload.start(options)
    weights = workload.model(options, layers=None if options.full else QUICK_LAYERS)
    config = weights.config
    sizes = [(count, 64) for count in ((1, 4, 16, 64) if options.full else (1, 4, 16))]
    sizes += [(4, length) for length in ((256, 1024) if options.full else (256,))]
    positions = max(length for _, length in sizes)
    engines = {
        mode: TrainEngine(workload.copy(weights), workload.operators(mode, provider), positions, SETTINGS)
        for mode in ("native", "consistency")
    }
    report = Report("train", workload.about(options, provider, config))
    for count, length in sizes:
        samples = workload.samples(config, count, length)
        advantages = [1.0 if index % 2 else -1.0 for index in range(count)]
        update, score = {}, {}
        for mode, engine in engines.items():
            score[mode] = functools.partial(engine.score, samples)
            update[mode] = functools.partial(engine.step, samples, advantages, engine.score(samples))
        for what, contestants in (("score", score), ("update", update)):
            name = f"{what}: {count} samples of {length}"
            report.cases.append(Case(name, count * length, "tokens", in_turns(contestants, options.rounds)))
    return report
