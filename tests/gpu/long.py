"""Long rollouts on a GPU, every logprob against the trainer's score with the same weights.

``python -m tests.gpu.long --layers 36 --samples 8 --tokens 3000 --repeats 3 --seconds 500 --json FILE`` draws samples
of up to so many tokens; with ``--borders`` 64 samples whose decode passes have every number of keys from 66 to 4,200,
so that pages and KV splits of every length begin and end; with ``--launched`` no pass is a graph. Exit code 0 where no
logprob differs, 1 where one does, 2 without a GPU. At the limit it scores what it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_engine.engines.rollout.builtin.engine import Job, Output, RolloutEngine, RolloutSettings
from rl_engine.engines.train.builtin import TrainEngine, TrainSettings
from rl_engine.engines.types import Request, Sample, SamplingSettings, canonical
from rl_engine.models.decoder import Decoder
from rl_engine.models.weights import ModelWeights
from rl_engine.ops import Operators, uniform
from tests.helpers.long_runs import DEVICE, Limit, Record, as_in_production, free, normal_weights, qwen3_8b
from tests.helpers.models import train_settings

LAYERS, TOKENS, REPEATS, SEED = 36, 4000, 3, 0
PAGE, CHUNK = 64, 2048
BORDER_SAMPLES, BORDER_NEW = 64, 192
SCORED = 16_384  # tokens of a micro-batch
SCORE_RATE, SCORE_START = 20_000, 10.0  # tokens/s and seconds that are set aside for the scores behind a limit
PROGRESS = 10.0  # seconds between lines
KEPT = 64  # differences that a round keeps

Spoil = Callable[[list[Sample]], list[Sample]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first logprob of a sample that is not the trainer's: its number among the response's, and the keys of the
    decode pass that drew it."""

    prompt: int
    sample: int
    token: int
    keys: int
    rollout: str
    trainer: str
    others: int


@dataclasses.dataclass(frozen=True)
class Round:
    """One rollout and its scores. ``seconds`` of both; ``complete`` is False where a limit cut it."""

    compared: int
    differing: int
    seconds: float
    rollout_seconds: float
    passes: int
    replayed: int
    preemptions: int
    complete: bool
    first: tuple[Difference, ...]


class Scorer(TrainEngine):
    """A trainer that only scores: master weights and moments of 36 layers, 98 GB, are not made."""

    def __init__(self, weights: ModelWeights, operators: Operators, positions: int, settings: TrainSettings) -> None:
        self.weights, self.ops, self.settings = weights, operators, settings
        self.decoder = Decoder(weights, operators, positions)


def job(request: Request, step: int, new: int, seed: int) -> Job:
    return Job(request, step, SamplingSettings(1.0, 1.0, -1, new, seed, ()))


def prompts(random: np.random.Generator, vocabulary: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(random.integers(3, vocabulary, size=length).tolist()) for length in lengths]


def long_jobs(vocabulary: int, samples: int, tokens: int, number: int, seed: int) -> list[Job]:
    """Samples of at most ``tokens`` tokens, prompt included. Odd rounds: ragged prompts of up to an eighth and ends in
    the last quarter, so that batches become small. Even ones: up to 8 samples share a prompt, and all end together."""
    random = np.random.default_rng((seed, number, samples))
    if number % 2:
        lengths = random.integers(1, max(2, tokens // 8), size=samples).tolist()
        ends = random.integers(tokens - tokens // 4, tokens + 1, size=samples).tolist()
        ends[0] = tokens
        requests = [Request(p, 0, text) for p, text in enumerate(prompts(random, vocabulary, lengths))]
    else:
        texts = prompts(random, vocabulary, [max(1, tokens // 16)] * -(-samples // 8))
        requests, ends = [Request(s // 8, s % 8, texts[s // 8]) for s in range(samples)], [tokens] * samples
    return [job(request, number, end - len(request.tokens), seed) for request, end in zip(requests, ends, strict=True)]


def border_jobs(vocabulary: int, number: int, seed: int, samples: int = BORDER_SAMPLES) -> list[Job]:
    """Sample i begins near the end of page i of 64 keys, everywhere within a page, and crosses three borders at least.
    So every page of 64 samples is begun and filled by decode passes, every split of the first four too, and passes have
    13 and more blocks in a split at every residue: :func:`key_counts` is without a gap."""
    random = np.random.default_rng((seed, number))
    lengths = [64 * i + 1 + (37 * i + number) % 64 for i in range(samples)]
    new = [BORDER_NEW + (29 * i + number) % 64 for i in range(samples)]
    texts = prompts(random, vocabulary, lengths)
    return [job(Request(i, 0, text), number, new[i], seed) for i, text in enumerate(texts)]


def key_counts(jobs: Sequence[Job]) -> set[int]:
    """Keys that the decode passes of ``jobs`` have in a sample: its first token is drawn from the prompt's pass."""
    ranges = ((len(j.request.tokens) + 1, j.cached_tokens + 1) for j in jobs)
    return {keys for first, last in ranges for keys in range(first, last)}


def operators(provider: str, weights: ModelWeights) -> Operators:
    """One provider everywhere; the sampler beside torch's own operators computes where the weights lie."""
    return Operators(uniform(provider, update="triton" if weights.device.type == "cuda" else "cpu"))


def rollout_engine(
    weights: ModelWeights, provider: str, rounds: Sequence[list[Job]], batch: int, launched: bool = False
) -> RolloutEngine:
    """Graphs of every size unless passes are to be ``launched``, and pages for the longest ``batch`` samples of a
    round. On a GPU engines only read the weights, so this one has the trainer's; on a CPU it repacks its own."""
    positions = max(j.cached_tokens + 1 for jobs in rounds for j in jobs)
    needed = (sorted((-(-j.cached_tokens // PAGE) for j in jobs), reverse=True)[:batch] for jobs in rounds)
    sizes, pages = () if launched else tuple(range(1, batch + 1)), max(map(sum, needed))
    settings = RolloutSettings(max_batch=batch, chunk=CHUNK, page=PAGE, pages=pages, graph_sizes=sizes)
    own = weights if weights.device.type == "cuda" else weights.clone()
    return RolloutEngine(own, operators(provider, weights), positions, settings)


def draw(engine: RolloutEngine, jobs: list[Job], limit: Limit) -> tuple[list[Sample], bool]:
    """(samples in canonical order, True), or what there is when the time for their scores begins, and False."""
    for each in jobs:
        engine.add(each)
    done: list[Output] = []
    before, told, total = engine.generated_tokens, limit.spent, sum(j.sampling.max_response_len for j in jobs)
    prompt_tokens = sum(len(j.request.tokens) for j in jobs)
    while engine.unfinished:
        done += engine.step()
        drawn = engine.generated_tokens - before
        if limit.spent > told + PROGRESS:
            told = limit.spent
            limit.tell(f"{drawn} of {total} tokens, {engine.unfinished} samples unfinished")
        if limit.left < SCORE_START + (drawn + prompt_tokens) / SCORE_RATE:
            break
    complete = not engine.unfinished
    for sequence in [*engine.scheduler.running, *engine.scheduler.waiting]:
        if sequence.responses:
            done.append(Output.of(sequence, engine.name, "limit"))
        engine.cancel(sequence.number)
    return canonical([output.sample for output in done]), complete


def differences(samples: list[Sample], scores: list[np.ndarray]) -> tuple[int, tuple[Difference, ...]]:
    """(logprobs whose bits differ, the first one of each sample), integer views compared."""
    count, found = 0, []
    for sample, score in zip(samples, scores, strict=True):
        assert sample.logprobs.dtype == score.dtype == np.float32 and sample.logprobs.shape == score.shape
        ours, theirs = sample.logprobs.view(np.uint32), score.view(np.uint32)
        places = np.flatnonzero(ours != theirs).tolist()
        count += len(places)
        if places:
            at = places[0]
            keys = len(sample.prompt_tokens) + at
            values = (f"{int(ours[at]):08x}", f"{int(theirs[at]):08x}")
            found.append(Difference(sample.prompt, sample.sample, at, keys, *values, len(places) - 1))
    return count, tuple(found[:KEPT])


def flip_logprob(samples: list[Sample]) -> list[Sample]:
    """A control: the lowest bit of one logprob of the last sample."""
    *others, last = samples
    bits = last.logprobs.view(np.int32).copy()
    bits[len(bits) // 2] ^= 1
    return [*others, dataclasses.replace(last, logprobs=bits.view(np.float32))]


def one_round(
    engine: RolloutEngine, scorer: TrainEngine, jobs: list[Job], limit: Limit, spoil: Spoil | None = None
) -> Round:
    """Draws ``jobs``, scores them, compares. ``spoil`` is a control's: what it returns is compared instead."""
    started, before = limit.spent, dataclasses.replace(engine.statistics)
    samples, complete = draw(engine, jobs, limit)
    rolled, after = limit.spent, engine.statistics
    scores = scorer.score(samples)
    count, first = differences(samples if spoil is None else spoil(samples), scores)
    found = Round(
        compared=sum(map(len, scores)),
        differing=count,
        seconds=limit.spent - started,
        rollout_seconds=rolled - started,
        passes=after.passes - before.passes,
        replayed=after.replayed - before.replayed,
        preemptions=after.preemptions - before.preemptions,
        complete=complete,
        first=first,
    )
    limit.tell(
        f"{found.differing} of {found.compared} logprobs differ; {found.rollout_seconds:.1f} s of rollout "
        f"({found.replayed} of {found.passes} passes replayed), {limit.spent - rolled:.1f} s of scores"
        + ("" if complete else ", cut by the limit")
    )
    for difference in first[:4]:
        limit.tell(str(difference))
    return found


def warm_up(engine: RolloutEngine, scorer: TrainEngine, limit: Limit) -> None:
    """Compiles what every round needs, so that a limit's time for the scores is time for scores."""
    random = np.random.default_rng(0)
    longest = max(1, engine.positions - 4)
    texts = prompts(random, engine.weights.config.vocabulary, [longest, min(longest, 20)])
    scorer.score(draw(engine, [job(Request(i, 0, text), 0, 3, 0) for i, text in enumerate(texts)], Limit())[0])
    limit.tell("compiled")


def against_trainer(
    weights: ModelWeights,
    rounds: Sequence[list[Job]],
    *,
    provider: str = "triton",
    batch: int | None = None,
    launched: bool = False,
    limit: Limit | None = None,
    rollout_provider: str | None = None,
    spoil: Spoil | None = None,
    record: Record | None = None,
) -> list[Round]:
    """Every round of jobs through one rollout engine of at most ``batch`` samples at once (all of a round by default),
    scored by a trainer with the same weights. Rounds for which a limit leaves no time are missing."""
    limit, record = limit or Limit(), record or Record(None)
    most = batch or max(map(len, rounds))
    engine = rollout_engine(weights, rollout_provider or provider, rounds, most, launched)
    settings = train_settings(fold_tokens=4096, max_tokens=max(SCORED, engine.positions))
    scorer = Scorer(weights, operators(provider, weights), engine.positions, settings)
    limit.tell(f"{weights.config.layers} layers, {most} samples at once, {engine.settings.pages} pages of {PAGE}")
    found: list[Round] = []
    with as_in_production():
        warm_up(engine, scorer, limit)
        for jobs in rounds:
            if limit.left < 2 * SCORE_START:
                break
            found.append(one_round(engine, scorer, jobs, limit, spoil))
            record.add(found[-1])
    engine.memory.check()
    return found


def rollout_against_trainer(
    layers: int = LAYERS,
    samples: int = 8,
    tokens: int = TOKENS,
    repeats: int = REPEATS,
    seed: int = SEED,
    *,
    borders: bool = False,
    **how: Any,
) -> list[Round]:
    """On the GPU: ``samples`` samples at once of a model of Qwen3-8B's width, ``repeats`` times: those of
    :func:`long_jobs`, or with ``borders`` those of :func:`border_jobs`. ``how`` as :func:`against_trainer` takes it."""
    config, numbers = qwen3_8b(layers), range(1, repeats + 1)
    if borders:
        rounds = [border_jobs(config.vocabulary, number, seed) for number in numbers]
    else:
        rounds = [long_jobs(config.vocabulary, samples, tokens, number, seed) for number in numbers]
    return against_trainer(normal_weights(config, seed, DEVICE), rounds, batch=samples, **how)


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="python -m tests.gpu.long", description=__doc__)
    command.add_argument("--layers", type=int, default=LAYERS, metavar="N", help=f"of Qwen3-8B's width ({LAYERS})")
    command.add_argument("--samples", type=int, default=8, metavar="N", help="at once (8)")
    command.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"of the longest sample ({TOKENS})")
    command.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"rounds ({REPEATS})")
    command.add_argument("--borders", action="store_true", help="64 samples that cross every page and split")
    command.add_argument("--launched", action="store_true", help="no graphs")
    command.add_argument("--seed", type=int, default=SEED, metavar="N")
    command.add_argument("--provider", choices=("triton", "gpu"), default="triton", help="gpu: by the proven table")
    command.add_argument("--seconds", type=float, metavar="LIMIT", help="score what there is then (no limit)")
    command.add_argument("--json", type=Path, metavar="FILE", help="written after every round")
    return command


def main(arguments: list[str] | None = None) -> int:
    import torch

    options = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("tests.gpu.long: found no GPU, expected one that torch sees", file=sys.stderr)
        return 2
    limit, asked = Limit(options.seconds), {**vars(options), "json": None}
    record = Record(options.json, what="rollout against trainer", asked=asked)
    with record.of_this_run():
        found = rollout_against_trainer(
            *(options.layers, options.samples, options.tokens, options.repeats, options.seed),
            borders=options.borders,
            provider=options.provider,
            launched=options.launched,
            limit=limit,
            record=record,
        )
    free()
    wrong, compared = sum(r.differing for r in found), sum(r.compared for r in found)
    limit.tell(f"{wrong} of {compared} logprobs differ in {len(found)} of {options.repeats} rounds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
