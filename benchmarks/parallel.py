"""Layouts: seconds of every phase and bytes sent under TP and CP, against one rank; bytes beside their formula.

Every rank is a process with the same number of threads. On a machine with fewer cores than ranks, seconds say little:
the CPU seconds of all ranks together say what a layout costs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.multiprocessing

from benchmarks import workload
from benchmarks.measure import Case, Report, Timing
from benchmarks.train import SETTINGS
from rl_engine.engines.rollout.builtin.engine import RolloutEngine, RolloutSettings
from rl_engine.engines.train.batching import fold_units, micro_batches
from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.engines.types import SamplingSettings
from rl_engine.models.checkpoint import load_weights
from rl_engine.models.config import ModelConfig
from rl_engine.models.sharding import LayoutRefused, Sharding, merged_names
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.ops import Operators, library, uniform
from rl_engine.parallel import ContextLayout, Group, Mesh, bounds, join_mesh
from rl_engine.parallel.groups import leave_mesh

ONE_RANK = "one rank"
PHASES = ("rollout", "score", "train", "optimizer")
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
FULL_LAYOUTS = (*LAYOUTS, (4, 1), (1, 4), (4, 2), (2, 4), (8, 1), (1, 8))
# Qwen3-0.6B with a short vocabulary and half its MLP: TP 8 is possible.
SHAPE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    layers=2,
    hidden=1024,
    intermediate=1536,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=8000,
    tied=False,
    qk_norm=True,
    norm_eps=1e-6,
    rope_base=1e6,
    rope_scaling=None,
    max_positions=4096,
)
BF16, FP32, INT64 = 2, 4, 8
Sent = collections.Counter[str]  # bytes by purpose


# -- the formula


def per_token(config: ModelConfig, tp: int, cp: int) -> dict[str, dict[str, float]]:
    """Bytes that all ranks together send per token and layer, ``forward`` and ``backward``, by purpose.

    Where every slice has the same size this is exact for every layout; ``Traffic`` has the general case.
    """
    p, c, h, i, d = tp, cp, config.hidden, config.intermediate, config.head_dim
    a, kv, n = config.heads * d, config.kv_heads * d, config.heads
    forward = {
        "inputs": 2 * (p - 1) * (a + i),
        "outputs": 2 * (p - 1) * 2 * h,
        "K": 2 * (c - 1) * kv,
        "V": 2 * (c - 1) * kv,
    }
    backward = {
        "dY": 2 * (p - 1) * (a + 2 * kv + 2 * i),
        "dX": 2 * (p - 1) * 2 * h,
        "dW dY": 2 * (c - 1) / c * (a + 2 * kv + 2 * i + 2 * h),
        "dW X": 2 * (c - 1) * p * (2 * h + a + i),
        "attention gradient": (c - 1) * (4 * a + 8 * n),
        "gain terms": 4 * (c - 1) / c * (2 * h * p + ((a + kv) if config.qk_norm else 0)),
    }
    return {"forward": forward, "backward": backward}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one trainer rank sends, exactly, by purpose. Global rank = ``cp_index * tp + tp_index``."""

    config: ModelConfig
    tp: int
    cp: int
    tp_index: int
    cp_index: int

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.config, self.tp, self.tp_index)

    def _slice(self, length: int, parts: int, index: int) -> int:
        first, last = bounds(length, parts)[index]
        return last - first

    def _merged(self) -> dict[str, tuple[int, int, int]]:
        """Kind of linear -> (own output columns, all inputs, own columns of a K slice)."""
        s, found = self.sharding, {}
        for name in merged_names(self.config):
            if name.startswith("model.layers.0.") and "_proj" in name:
                first, last = s.inputs(name)
                inputs = max(s.inputs(name, rank)[1] for rank in range(self.tp))
                found[name.split(".")[-2]] = (len(s.canonical_rows(name, self.tp_index)), inputs, last - first)
        return found

    def forward(self, tokens: int) -> Sent:
        """One layer's forward pass over ``tokens`` own tokens."""
        linear, width = self._merged(), self.config.kv_heads // self.tp * self.config.head_dim
        others = self.tp - 1
        return Sent(
            {
                "inputs": tokens * BF16 * (linear["o_proj"][2] + linear["down_proj"][2]) * others,
                "outputs": tokens * BF16 * (linear["o_proj"][0] + linear["down_proj"][0]) * others,
                "K": tokens * BF16 * width * (self.cp - 1),
                "V": tokens * BF16 * width * (self.cp - 1),
            }
        )

    def backward(self, tokens: int, units: int) -> Sent:
        """One layer's backward pass over ``tokens`` own tokens of ``units`` fold units."""
        config, linear = self.config, self._merged()
        heads, kv_heads = config.heads // self.tp, config.kv_heads // self.tp
        tp_others, cp_others = self.tp - 1, self.cp - 1
        rows = sum(own - self._slice(own, self.cp, self.cp_index) for own, _, _ in linear.values())
        part = self._slice(config.head_dim, self.cp, self.cp_index)
        qk_heads = (heads + kv_heads) if config.qk_norm else 0
        gain = 2 * self._gain_terms(tokens) + tokens * FP32 * qk_heads * (config.head_dim - part)
        query = BF16 * heads * config.head_dim
        return Sent(
            {
                "dY": tokens * BF16 * (linear["qkv_proj"][0] + linear["gate_up_proj"][0]) * tp_others,
                "dX": tokens * BF16 * (linear["qkv_proj"][2] + linear["gate_up_proj"][2]) * tp_others,
                "dW dY": tokens * BF16 * rows,
                "dW X": tokens * BF16 * sum(inputs for _, inputs, _ in linear.values()) * cp_others,
                "attention gradient": tokens * (2 * query + 2 * FP32 * heads) * cp_others,
                "gain terms": gain,
                "gain sums": units * FP32 * qk_heads * part * tp_others,
            }
        )

    def _gain_terms(self, tokens: int) -> int:
        """A norm over hidden rows: tokens for slices of the axis."""
        return tokens * FP32 * (self.config.hidden - self._slice(self.config.hidden, self.cp, self.cp_index))

    def batch(
        self, lengths: Sequence[int], prompts: Sequence[int], ids: torch.Tensor, units: int, *, recompute: bool
    ) -> tuple[Sent, Sent]:
        """(scoring, forward and backward of an update) of one micro-batch of samples of ``lengths`` tokens, the first
        ``prompts`` of each the prompt; ids int64 [all tokens]."""
        own = ContextLayout(tuple(lengths), self.cp, self.cp_index).own
        tokens, rows = len(own), len(set(own.tolist()) & _rows(lengths, prompts))
        once, layers = self._ends(ids[own], rows), self.config.layers
        through = _times(self.forward(tokens), layers)
        score = once + through + Sent({"logp": rows * FP32 * (self.cp - 1)})
        update = once + _times(through, 2 if recompute else 1) + _times(self.backward(tokens, units), layers)
        return score, update + self._ends_backward(tokens, rows)

    def _ends(self, own_ids: torch.Tensor, rows: int) -> Sent:
        """Embedding and logprobs, forward."""
        s, others = self.sharding, self.tp - 1
        first, last = s.vocabulary(self.tp_index)
        found = int(((own_ids >= first) & (own_ids < last)).sum())
        return Sent(
            {
                "embedding": found * BF16 * self.config.hidden * others,
                "logp states": rows * 3 * FP32 * len(s.groups(self.tp_index)) * others,
                "logp targets": rows * FP32 * others,
            }
        )

    def _ends_backward(self, tokens: int, rows: int) -> Sent:
        """Logprobs for the loss, the head's and the embedding's backward, the last norm."""
        h, groups = self.config.hidden, len(self.sharding.groups(self.tp_index))
        part = self._slice(h, self.tp, self.tp_index)
        return Sent(
            {
                # logprob and entropy; then hidden row, coefficient and four numbers of the softmax
                "logp": rows * (2 * FP32 + BF16 * h + 5 * FP32) * (self.cp - 1),
                "dH groups": rows * FP32 * groups * (h - part),
                "dH": rows * BF16 * part * (self.tp - 1),
                "gain terms": self._gain_terms(tokens),
                "embedding gradient": tokens * (INT64 + BF16 * h) * (self.cp - 1),
            }
        )

    def copies(self) -> Sent:
        """K-sharded copies: at the start and after every update."""
        sent, s = 0, self.sharding
        if self.tp > 1:
            for name in merged_names(self.config):
                if "_proj.weight" in name:
                    rows = len(s.canonical_rows(name, self.tp_index))
                    width = max(s.inputs(name, rank)[1] for rank in range(self.tp))
                    first, last = s.inputs(name)
                    sent += BF16 * rows * (width - (last - first))
        return Sent({"weights": sent})

    def optimizer(self) -> Sent:
        """Norm bins and counts; updated rows to the CP group; the copies."""
        sent, shapes, s = 0, self.config.tensor_shapes(), self.sharding
        for parts in merged_names(self.config).values():
            rows = sum(s.rows(part)[1] - s.rows(part)[0] for part in parts)
            width = math.prod(shapes[parts[0]][1:])
            sent += BF16 * self._slice(rows, self.cp, self.cp_index) * width * (self.cp - 1)
        bins = (256 * 2 * INT64 + INT64) * (self.tp * self.cp - 1)
        return Sent({"weights": sent, "gradient norm": bins}) + self.copies()

    def update(
        self,
        samples: Sequence[tuple[Sequence[int], Sequence[int]]],
        fold_tokens: int,
        max_tokens: int | None,
        *,
        recompute: bool,
    ) -> tuple[Sent, Sent]:
        """(scoring, update) of samples, each (prompt token ids, response token ids), in canonical order."""
        lengths = [len(prompt) + len(response) for prompt, response in samples]
        score, update = Sent(), self.optimizer()
        for units in micro_batches(fold_units(lengths, fold_tokens), lengths, max_tokens):
            chosen = [samples[index] for unit in units for index in unit]
            ids = torch.tensor([token for sample in chosen for part in sample for token in part])
            one = self.batch(
                [len(p) + len(r) for p, r in chosen], [len(p) for p, _ in chosen], ids, len(units), recompute=recompute
            )
            score, update = score + one[0], update + one[1]
        return score, update


def _rows(lengths: Sequence[int], prompts: Sequence[int]) -> set[int]:
    """Places in the joined row of the tokens before response tokens."""
    places, offset = set(), 0
    for length, prompt in zip(lengths, prompts, strict=True):
        places.update(range(offset + prompt - 1, offset + length - 1))
        offset += length
    return places


def _times(sent: Sent, factor: int) -> Sent:
    return Sent({purpose: number * factor for purpose, number in sent.items()})


# -- the measurement


@dataclasses.dataclass
class LayoutCase(Case):
    """One phase; contestants are layouts, the baseline is one rank. ``sent``: what each layout's ranks sent together,
    per token and layer where it grows with both."""

    sent: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def speed(self, name: str) -> float:
        return self.timings[ONE_RANK].median / self.timings[name].median

    def record(self) -> dict[str, Any]:
        contestants = {
            name: {**dataclasses.asdict(timing), "median": timing.median, "per_second": self.work / timing.median}
            for name, timing in self.timings.items()
        }
        others = [name for name in self.timings if name != ONE_RANK]
        speeds = {name: self.speed(name) for name in others}
        cpu = {
            name + ", CPU seconds": float(np.median(self.timings[ONE_RANK].cpu_seconds))
            / float(np.median(self.timings[name].cpu_seconds))
            for name in others
        }
        body = {"case": self.name, "work": self.work, "unit": self.unit, "times": contestants, "speed": speeds | cpu}
        return body | ({"sent": dict(self.sent)} if self.sent else {})


@dataclasses.dataclass
class LayoutReport(Report):
    """``formula``: layout -> bytes per token and layer of all ranks."""

    formula: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def json(self) -> str:
        body = json.loads(super().json())
        return json.dumps(body | {"formula": dict(self.formula)}, indent=1) + "\n"

    def print(self, out: TextIO) -> None:
        out.write(f"{self.benchmark}: " + ", ".join(f"{key} {value}" for key, value in self.about.items()) + "\n")
        for case in self.cases:
            assert isinstance(case, LayoutCase)
            for name, timing in case.timings.items():
                cpu = float(np.median(timing.cpu_seconds))
                sent = case.sent.get(name)
                size = f", {sent['total'] / 1e6:.1f} MB sent" if sent else ""
                out.write(f"  {case.name:10} {name:24} {timing.median:.3f} s, {cpu:.3f} CPU s of all ranks{size}\n")


def _config(options: argparse.Namespace) -> ModelConfig:
    if options.model_root:
        return workload.shape(options)
    layers = options.layers or (8 if options.full else SHAPE.layers)
    return dataclasses.replace(SHAPE, layers=layers)


def possible(config: ModelConfig, layouts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The layouts that the model can be cut for."""
    found = []
    for tp, cp in layouts:
        try:
            Sharding(config, tp, 0)
        except LayoutRefused:
            continue
        found.append((tp, cp))
    return found


@dataclasses.dataclass(frozen=True)
class Task:
    """What every rank of a layout does."""

    config: ModelConfig
    model_root: Path | None
    tp: int
    cp: int
    gradients: str
    batch: int
    length: int
    threads: int
    provider: str
    folder: Path


def _weights(task: Task, mesh: Mesh) -> ModelWeights:
    sharding = Sharding(task.config, mesh.tp.size, mesh.tp.index)
    if task.model_root is not None:
        return load_weights(task.model_root, task.config, sharding)
    return random_weights(task.config, 0, sharding)


def _rank(index: int, task: Task) -> None:
    """Both sides of one rank, one after the other; a JSON file of seconds, CPU seconds and bytes by phase."""
    torch.set_num_threads(task.threads)
    if task.provider == "cpu":
        library.set_threads(task.threads)
    mesh = join_mesh(task.tp, task.cp, index, f"file://{task.folder}/store")
    clock = _Clock(mesh)
    if mesh.cp.index == 0:  # generation has no context parallelism
        _rollout(task, mesh, clock)
    mesh.world.barrier()
    _train(task, mesh, clock)
    mesh.world.barrier()
    leave_mesh()  # together: a rank that is gone early looks like a lost one
    body = {"seconds": clock.seconds, "cpu": clock.cpu, "sent": clock.sent}
    (task.folder / f"rank{index}.json").write_text(json.dumps(body))


def _rollout(task: Task, mesh: Mesh, clock: _Clock) -> None:
    alone = Group((mesh.world.ranks[mesh.world.index],), 0)
    tensor_parallel = Mesh(mesh.tp, alone, mesh.tp)
    operators = Operators(uniform(task.provider))
    weights = _weights(task, mesh)
    engine = RolloutEngine(weights, operators, task.length, RolloutSettings(), mesh=tensor_parallel)
    requests = workload.requests(task.config, task.batch, task.length // 2)
    sampling = SamplingSettings(1.0, 1.0, -1, min(16, task.length // 2), 0, ())
    engine.generate(requests[:1], 1, sampling)
    clock.start()
    engine.generate(requests, 0, sampling)
    clock.stop("rollout")


def _train(task: Task, mesh: Mesh, clock: _Clock) -> None:
    settings = dataclasses.replace(SETTINGS, gradients=task.gradients)
    operators = Operators(uniform(task.provider))
    trainer = TrainEngine(_weights(task, mesh), operators, task.length, settings, mesh=mesh)
    samples = workload.samples(task.config, task.batch, task.length)
    advantages = [1.0 if number % 2 else -1.0 for number in range(task.batch)]
    trainer.score(samples[:1])
    mesh.world.barrier()
    clock.start()
    old = trainer.score(samples)
    clock.stop("score")
    clock.start()
    backward = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal backward
        backward = time.process_time()

    result = trainer.step(samples, advantages, old, progress=progress)
    clock.stop("train")
    clock.seconds["train"], clock.seconds["optimizer"] = result.seconds_train, result.seconds_optimizer
    clock.cpu["optimizer"] = time.process_time() - backward
    clock.cpu["train"] -= clock.cpu["optimizer"]


class _Clock:
    """Seconds, CPU seconds and bytes of one phase after another."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.sent: dict[str, dict[str, int]] = {}

    def start(self) -> None:
        self._wall, self._used = time.perf_counter(), time.process_time()
        self._before = collections.Counter(self.mesh.sent())

    def stop(self, phase: str) -> None:
        self.seconds[phase] = time.perf_counter() - self._wall
        self.cpu[phase] = time.process_time() - self._used
        self.sent[phase] = dict(collections.Counter(self.mesh.sent()) - self._before)


def _measure(task: Task) -> list[dict[str, Any]]:
    """What every rank wrote."""
    torch.multiprocessing.spawn(_rank, (task,), nprocs=task.tp * task.cp)
    return [json.loads((task.folder / f"rank{index}.json").read_text()) for index in range(task.tp * task.cp)]


def _sent(ranks: list[dict[str, Any]], phase: str) -> dict[str, int]:
    total: Sent = collections.Counter()
    for rank in ranks:
        total.update(rank["sent"].get(phase, {}))
    return dict(sorted(total.items()))


def main(options: argparse.Namespace) -> LayoutReport:
    """Layouts take turns; every turn starts its ranks anew, warms them up and measures each phase once.

    With context parallelism, ``--gradients deterministic`` is a contestant of its own.
    """
    config = _config(options)
    provider = "cpu" if library.available() else "torch"
    layouts = possible(config, FULL_LAYOUTS if options.full else LAYOUTS)
    batch, length = (8, 1024) if options.full else (4, 256)
    threads = 1 if options.threads == len(os.sched_getaffinity(0)) else options.threads
    found: dict[str, list[list[dict[str, Any]]]] = collections.defaultdict(list)
    for _ in range(options.rounds):
        for tp, cp in layouts:
            for gradients in ("invariant", "deterministic")[: 2 if cp > 1 else 1]:
                with tempfile.TemporaryDirectory() as folder:
                    size = (batch, length, threads, provider, Path(folder))
                    task = Task(config, options.model_root, tp, cp, gradients, *size)
                    found[_name(tp, cp, gradients)].append(_measure(task))
    about = workload.about(options, provider, config) | {"threads": threads, "samples": batch, "tokens": length}
    about["model"] = str(options.model_root or "Qwen3-0.6B's heads, short vocabulary, random weights")
    tokens = batch * length
    cases: list[Case] = [_case(phase, tokens, config.layers, found) for phase in PHASES]
    formula = {_name(tp, cp): per_token(config, tp, cp) for tp, cp in layouts}
    return LayoutReport("parallel", about, cases, formula=formula)


def _case(phase: str, tokens: int, layers: int, found: Mapping[str, list[list[dict[str, Any]]]]) -> LayoutCase:
    """One phase of all layouts: the slowest rank's seconds, all ranks' CPU seconds and bytes."""
    timings, sent = {}, {}
    inside = {purpose for part in per_token(SHAPE, 1, 1).values() for purpose in part}
    for name, turns in found.items():
        timings[name] = Timing(
            [max(rank["seconds"].get(phase, 0.0) for rank in turn) for turn in turns],
            [sum(rank["cpu"].get(phase, 0.0) for rank in turn) for turn in turns],
        )
        counted = _sent(turns[0], phase)
        each = {purpose: number / tokens / layers for purpose, number in counted.items() if purpose in inside}
        if counted:
            sent[name] = {"total": sum(counted.values()), "by purpose": counted, "per token and layer": each}
    return LayoutCase(phase, tokens, "tokens", timings, sent)


def _name(tp: int, cp: int, gradients: str = "invariant") -> str:
    if tp * cp == 1:
        return ONE_RANK
    return f"TP{tp} CP{cp}" + (f" {gradients}" if gradients != "invariant" else "")
