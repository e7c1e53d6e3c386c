"""Runs without a fault, in the shapes that tempt a detector: native bf16 noise, top-p, short, asynchronous, sparse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from rl_engine.diagnose.log import SampleColumns, TokenLog

from .distribution import to_bf16
from .models_differ import record_right_loss
from .registry import base_spec
from .runs import RunSpec, apply_penalty, sample_run, token_counts
from .scene import Scene, make_scene, render

Edit = Callable[[Scene], None]


def _nothing(scene: Scene) -> None:
    return None


def _exact(scene: Scene) -> None:
    scene.train_hooks.append(lambda train: scene.rollout)


def _both_round_logits(scene: Scene) -> None:
    """Both sides keep bf16 logits; the rollout's are scored again since sampling used fp32 ones."""
    from .scene import score

    scene.train.before += (to_bf16,)
    scene.rollout = score(scene.run, scene.train, int(scene.rng.integers(1 << 30)))


def _both_store_bf16(scene: Scene) -> None:
    scene.rollout = to_bf16(scene.rollout)
    scene.train_hooks.append(to_bf16)


def _old_but_equal(scene: Scene) -> None:
    """Samples of several versions, but the weights hardly moved."""
    age = scene.rng.integers(0, 3, scene.run.spec.samples)
    scene.columns["train_version"] = scene.columns["weight_version"] + age


def _bare(scene: Scene) -> None:
    """Tokens, mask and logprobs alone."""

    def hook(log: TokenLog) -> TokenLog:
        facts = dataclasses.replace(log.facts, vocab_size=None, padded_vocab_size=None, chunk_size=None, page_size=None)
        return dataclasses.replace(log, samples=SampleColumns(), facts=facts, ref_logprob=None)

    scene.log_hooks.append(hook)


def _tools_masked(scene: Scene) -> None:
    """Tool outputs inside responses, rightly masked, with a filler as rollout logprob."""

    def hook(log: TokenLog) -> TokenLog:
        mask, rollout = log.mask.copy(), log.rollout.copy()
        for i in range(0, log.sample_count, 2):
            start = int(log.offsets[i]) + scene.run.spec.prompt + 3
            part = slice(start, min(start + 8, int(log.offsets[i + 1]) - 1))
            mask[part], rollout[part] = False, 0.0
        return dataclasses.replace(log, mask=mask, rollout=rollout)

    scene.log_hooks.append(hook)


def _penalised(scene: Scene) -> None:
    """The trainer applies the rollout's penalty too."""
    counts, penalty = token_counts(scene.run), scene.run.spec.penalty
    scene.train.before += (lambda z: apply_penalty(z, counts, penalty),)


VARIANTS: dict[str, tuple[dict[str, object], Edit]] = {
    "bf16 noise": ({}, _nothing),
    "more bf16 noise": ({"noise": 0.002}, _nothing),
    "fp32 noise": ({"noise": 1e-6}, _nothing),
    "equal bits": ({}, _exact),
    "top-p replayed": ({"top_p": 0.95}, _nothing),
    "top-k replayed": ({"top_k": 20}, _nothing),
    "temperature 0.7": ({"temperature": 0.7}, _nothing),
    "temperature and top-p": ({"temperature": 1.2, "top_p": 0.9}, _nothing),
    "short": ({"samples": 8, "prompt": 16, "response": 12}, _nothing),
    "short, top-p": ({"samples": 12, "prompt": 16, "response": 24, "top_p": 0.9}, _nothing),
    "large": ({"samples": 128, "response": 192}, _nothing),
    "bf16 logits on both sides": ({}, _both_round_logits),
    "bf16 logprobs on both sides": ({}, _both_store_bf16),
    "old but equal weights": ({}, _old_but_equal),
    "bare": ({}, _bare),
    "tool tokens masked": ({}, _tools_masked),
    "right loss recorded": ({}, record_right_loss),
    "same penalty on both sides": ({"penalty": (1.05, 0.0, 0.0)}, _penalised),
}


def clean_log(variant: str, seed: int) -> TokenLog:
    """The clean log of a variant and seed."""
    settings, edit = VARIANTS[variant]
    spec: RunSpec = dataclasses.replace(base_spec(seed), **settings)  # type: ignore[arg-type]
    scene = make_scene(sample_run(spec), seed)
    if spec.samples < 20:
        scene.columns["rank"] = np.arange(spec.samples) % 2
    edit(scene)
    return render(scene)
