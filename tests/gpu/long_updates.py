"""The same update again and again on a GPU, with a learning rate of 0: nothing may change that the batch decides.

``python -m tests.gpu.long_updates --layers 2 --updates 1000 --seconds 500 --json FILE`` compares every repetition with
the first: the scores' bits, loss and gradient norm, an integer checksum of every gradient, moment, master and weight.
Exit code 0 where all are equal, 1 where one is not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.engines.types import Sample
from rl_engine.ops import Operators, uniform
from rl_engine.ops.grad_norm import NonFiniteGradient
from tests.helpers.long_runs import DEVICE, Limit, Record, as_in_production, normal_weights, qwen3_8b
from tests.helpers.models import joined, random_samples, train_settings

LAYERS, UPDATES, SEED = 2, 1000, 0
VOCABULARY = 32_768
PROMPTS = (9, 64, 150, 900)  # the last one's samples are longer than a KV split
RESPONSES = (40, 129, 300, 7, 64, 200, 511, 33, 100, 400, 63, 65)
FOLD, SCORED = 1024, 2048  # tokens of a fold unit, of a micro-batch
PROGRESS = 10.0  # seconds between lines
KEPT = 64  # repetitions that are described

Spoil = Callable[[int, TrainEngine], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """``wrong`` of ``updates`` repetitions differ from the first one; ``found`` says in what."""

    updates: int
    wrong: int
    seconds: float
    micro_batches: int
    tokens: int
    found: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a repetition left behind: fp32 scores, fp64 metrics in hex, checksums by the name of what they are of."""

    scores: np.ndarray
    metrics: dict[str, str]
    sums: dict[str, int]

    def differs(self, first: Seen) -> list[str]:
        """Names of what is not the first repetition's."""
        scores = int(np.count_nonzero(self.scores.view(np.int32) != first.scores.view(np.int32)))
        names = [f"{scores} of {self.scores.size} scores"] if scores else []
        names += [name for name, value in self.metrics.items() if value != first.metrics[name]]
        return names + [name for name, value in self.sums.items() if value != first.sums[name]]


def checksum(x: Tensor) -> Tensor:
    """int64 []: the bits of ``x`` as 64-bit integers, added modulo 2^64 in whatever order; one bit that differs changes
    it. Elements may have any width that fills whole words."""
    return x.detach().reshape(-1).view(torch.int64).sum()


def checksums(engine: TrainEngine) -> dict[str, int]:
    """Of every fp32 gradient, master and moment, and of every bf16 weight, in one word to the host."""
    tensors: dict[str, Tensor] = {}
    for weight in engine.weights:
        assert weight.grad is not None
        state = engine.state[weight.name]
        tensors |= {f"gradient of {weight.name}": weight.grad, f"master of {weight.name}": state.master}
        tensors |= {f"m of {weight.name}": state.m, f"v of {weight.name}": state.v}
        tensors[f"bf16 {weight.name}"] = weight.value
    return dict(zip(tensors, torch.stack([checksum(x) for x in tensors.values()]).tolist(), strict=True))


def flip_gradient(number: int, engine: TrainEngine) -> None:
    """A control: the lowest bit of one gradient element, behind the third update."""
    if number == 3:
        gradient = engine.weights["model.layers.0.mlp.down_proj.weight"].grad
        assert gradient is not None
        gradient.view(torch.int32).view(-1)[7] ^= 1


def repetition(engine: TrainEngine, samples: list[Sample], number: int, spoil: Spoil | None) -> Seen:
    """Scores and an update from empty moments, so that these must come out the same too. ``spoil`` is a control's: it
    may change what the update left before that is looked at.

    Raises:
        NonFiniteGradient: a gradient is NaN or infinite.
    """
    for state in engine.state.values():
        state.m.zero_()
        state.v.zero_()
    scores = engine.score(samples)
    advantages = [(-1.0) ** i * (0.5 + i % 5) for i in range(len(samples))]
    result = engine.step(samples, advantages, scores)
    if spoil is not None:
        spoil(number, engine)
    names = ("loss", "entropy_mean", "clip_fraction", "grad_norm", "ratio_mismatches", "changed_elements")
    metrics = {name: float(getattr(result, name)).hex() for name in names}
    return Seen(joined(scores), metrics, checksums(engine))


def untouched(engine: TrainEngine, seen: Seen) -> list[str]:
    """What a single repetition must have: its own scores again inside the update, and weights that a learning rate of 0
    has left alone."""
    zero = (0.0).hex()
    names = [name for name in ("ratio_mismatches", "changed_elements") if seen.metrics[name] != zero]
    for weight in engine.weights:
        same = torch.equal(engine.state[weight.name].master, weight.value.detach().float())
        names += [] if same else [f"master of {weight.name} is not the weight"]
    return names


def repeat(
    engine: TrainEngine, samples: list[Sample], updates: int, limit: Limit, spoil: Spoil | None = None
) -> Outcome:
    """Update after update until there are ``updates``, or the limit's time is over."""
    started, told = limit.spent, limit.spent
    first: Seen | None = None
    done, wrong, found = 0, 0, list[str]()
    cut = engine._batches(samples)
    while done < updates and (limit.left > 0 or done == 0):
        try:
            seen = repetition(engine, samples, done + 1, spoil)
            names = seen.differs(first) if first is not None else untouched(engine, seen)
            first = first or seen
        except NonFiniteGradient as error:
            names = [str(error)]
        done += 1
        if names:
            wrong += 1
            found.append(f"update {done}: {', '.join(names[:8])}" + (", and more" if len(names) > 8 else ""))
            limit.tell(found[-1])
        if limit.spent > told + PROGRESS:
            told = limit.spent
            limit.tell(f"{done} of {updates} updates, {wrong} wrong, {(told - started) / done * 1000:.0f} ms each")
    tokens = sum(sample.length for sample in samples)
    return Outcome(done, wrong, limit.spent - started, len(cut), tokens, tuple(found[:KEPT]))


def repeated_updates(
    layers: int = LAYERS,
    updates: int = UPDATES,
    seconds: float | None = None,
    seed: int = SEED,
    *,
    vocabulary: int = VOCABULARY,
    provider: str = "triton",
    limit: Limit | None = None,
    spoil: Spoil | None = None,
) -> Outcome:
    """On the GPU: a trainer of Qwen3-8B's width with few layers and a head of ``vocabulary`` columns."""
    limit = limit or Limit(seconds)
    weights = normal_weights(qwen3_8b(layers, vocabulary), seed, DEVICE)
    samples = random_samples(vocabulary, PROMPTS, RESPONSES, seed)
    settings = train_settings(lr=0.0, fold_tokens=FOLD, max_tokens=SCORED)
    with as_in_production():
        engine = TrainEngine(weights, Operators(uniform(provider)), max(s.length for s in samples), settings)
        outcome = repeat(engine, samples, updates, limit, spoil)
    limit.tell(
        f"{outcome.wrong} of {outcome.updates} updates differ from the first; {outcome.tokens} tokens in "
        f"{outcome.micro_batches} micro-batches, {outcome.seconds / outcome.updates * 1000:.0f} ms each"
    )
    return outcome


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="python -m tests.gpu.long_updates", description=__doc__)
    command.add_argument("--layers", type=int, default=LAYERS, metavar="N", help=f"of Qwen3-8B's width ({LAYERS})")
    command.add_argument("--updates", type=int, default=UPDATES, metavar="N", help=f"repetitions ({UPDATES})")
    command.add_argument("--vocabulary", type=int, default=VOCABULARY, metavar="N", help=f"columns ({VOCABULARY})")
    command.add_argument("--seed", type=int, default=SEED, metavar="N")
    command.add_argument("--provider", choices=("triton", "gpu"), default="triton", help="gpu: by the proven table")
    command.add_argument("--seconds", type=float, metavar="LIMIT", help="begin no update behind it (no limit)")
    command.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    return command


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("tests.gpu.long_updates: found no GPU, expected one that torch sees", file=sys.stderr)
        return 2
    record = Record(options.json, what="repeated updates", asked={**vars(options), "json": None})
    with record.of_this_run():
        outcome = repeated_updates(
            *(options.layers, options.updates, options.seconds, options.seed),
            vocabulary=options.vocabulary,
            provider=options.provider,
        )
        record.add(outcome)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
