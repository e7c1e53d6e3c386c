"""Rollout, scoring, update and weight exchange on any layout, compared rank by rank with what one rank left on disk.

A scene says what is computed; a layout says on how many ranks. Rank processes of both sides are the same ones: the
first ``rollout_tp`` hold rollout engines, the first ``tp * cp`` the trainer, each with groups of their own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_engine.engines.rollout.builtin.engine import RolloutEngine, RolloutSettings
from rl_engine.engines.snapshot import JoinedWeights, own_digests, row_digests
from rl_engine.engines.train.builtin import TrainEngine, TrainSettings
from rl_engine.engines.types import Request, Sample, SamplingSettings, TensorRows, WeightSnapshot, canonical
from rl_engine.models.checkpoint import load_weights
from rl_engine.models.config import ModelConfig, read_config
from rl_engine.models.sharding import Sharding
from rl_engine.models.weights import ModelWeights
from rl_engine.numerics.bits import compare_bits
from rl_engine.numerics.digest import map_digest
from rl_engine.ops import Operators, uniform
from rl_engine.ops.weight import CPU, Weight
from rl_engine.parallel import Mesh
from tests.helpers.ranks import Rank

RowsOf = dict[str, tuple[int, Tensor]]  # HF name -> (first row, rows of this rank)
TENSORS = ("gradient", "master", "m", "v", "weight")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ranks of both sides, and what else must not matter."""

    tp: int = 1
    cp: int = 1
    rollout_tp: int = 1
    engines: int = 1
    shuffled: bool = False
    max_tokens: int | None = None
    recompute: bool = False

    @property
    def size(self) -> int:
        return max(self.tp * self.cp, self.rollout_tp)

    def __str__(self) -> str:
        extra = f"-{self.engines}-engines" * (self.engines > 1) + "-shuffled" * self.shuffled
        return f"tp{self.tp}-cp{self.cp}-rollout{self.rollout_tp}{extra}"


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is computed.

    Attributes:
        checkpoint: folder of the starting weights.
        prompts: length and number of samples of every prompt.
        updates: how many; tensors are compared after those in ``compared``.
        train: settings; the layout decides ``max_tokens`` and ``recompute``.
        providers: set of operators (``uniform``).
        device: where every rank computes; with ``own_gpus`` rank n has the n-th GPU, and ranks exchange by NCCL.
        even_vocabulary: TP ranks cut it into even shares of the padded one.
    """

    checkpoint: Path
    prompts: tuple[tuple[int, int], ...]
    sampling: SamplingSettings
    train: TrainSettings
    updates: int = 2
    compared: tuple[int, ...] = (0, 1)
    providers: str = "cpu"
    device: str = "cpu"
    own_gpus: bool = False
    even_vocabulary: bool = False

    def sharding(self, config: ModelConfig, mesh: Mesh) -> Sharding:
        return Sharding(config, mesh.tp.size, mesh.tp.index, self.even_vocabulary)

    @property
    def positions(self) -> int:
        return max(length for length, _ in self.prompts) + self.sampling.max_response_len

    def device_of(self, rank: Rank) -> torch.device:
        return torch.device("cuda", rank.index) if self.own_gpus else torch.device(self.device)

    def operators(self) -> Operators:
        return Operators(uniform(self.providers))

    def requests(self, vocabulary: int, step: int) -> list[Request]:
        """Other prompts in every step, in canonical order."""
        asked = []
        for number, (length, samples) in enumerate(self.prompts):
            tokens = np.random.default_rng((step, number)).integers(3, vocabulary, size=length)
            asked += [Request(number, sample, tuple(tokens.tolist())) for sample in range(samples)]
        return asked


def advantages(samples: list[Sample]) -> list[float]:
    """None is zero; signs alternate within a group."""
    return [(1.0 + 0.25 * (s.prompt % 3)) * (-1.0 if s.sample % 2 else 1.0) for s in samples]


def state_rows(weight: Weight, values: Tensor) -> RowsOf:
    """HF name -> (first row, rows) of a tensor that covers the rows of ``weight.grad``, as optimizer state does."""
    start, end = weight.grad_rows
    found = {}
    for part in weight.parts:
        first, last = max(part.first, start), min(part.first + part.rows, end)
        if first < last:
            found[part.name] = (part.offset + first - part.first, values[first - start : last - start])
    return found


def tensors_of(engine: TrainEngine) -> dict[str, RowsOf]:
    """Everything that an update leaves on this rank, by quantity."""
    found: dict[str, RowsOf] = {name: {} for name in TENSORS}
    found["gradient"] = engine.gradient_rows()
    found["weight"] = {name: (first, rows.detach()) for name, (first, rows) in engine.weights.export_rows().items()}
    for weight in engine.weights:
        state = engine.state[weight.name]
        for name, values in (("master", state.master), ("m", state.m), ("v", state.v)):
            found[name].update(state_rows(weight, values))
    return found


class Judge:
    """Keeps one rank's tensors as the baseline, or compares a rank's rows with it.

    ``covered`` lists quantity, HF name, first and last + 1 row of everything compared: whoever reads it can prove that
    all ranks together compared every row.
    """

    def __init__(self, keep: Path | None, baseline: Path | None) -> None:
        self.keep, self.baseline = keep, baseline
        self.covered: list[tuple[str, str, int, int]] = []
        self.faults: list[str] = []

    def see(self, step: int, tensors: dict[str, RowsOf]) -> None:
        for quantity, rows in tensors.items():
            if self.keep is not None:
                whole = {name: values.contiguous() for name, (_, values) in rows.items()}
                save_file(whole, self.keep / f"{quantity}{step}.safetensors")
            if self.baseline is not None:
                self._compare(f"{quantity}{step}", rows)

    def _compare(self, quantity: str, rows: RowsOf) -> None:
        with safe_open(self.baseline / f"{quantity}.safetensors", framework="pt") as file:  # type: ignore[operator]
            for name, (first, values) in rows.items():
                last = first + len(values)
                result = compare_bits(values.cpu(), file.get_slice(name)[first:last])
                self.covered.append((quantity, name, first, last))
                if not result.equal:
                    self.faults.append(f"{quantity} of {name}, rows from {first}: {result.reason}")


def publish(folder: Path, index: int, snapshot: WeightSnapshot) -> None:
    """One trainer rank's rows as a flat file that every process can map."""
    for old in folder.glob(f"weights{snapshot.version - 1}-{index}.*"):
        old.unlink()  # loaded by all ranks, or they could not have drawn what this update learned from
    table, place = {}, 0
    with (folder / f"weights{snapshot.version}-{index}.bin").open("wb") as file:
        for name, rows in snapshot.tensors.items():
            table[name] = (rows.first, place, rows.bits.shape)
            file.write(np.ascontiguousarray(rows.bits).tobytes())
            place += rows.bits.size
    (folder / f"weights{snapshot.version}-{index}.json").write_text(json.dumps(table))


def collect(folder: Path, version: int, ranks: int) -> list[WeightSnapshot]:
    """What the trainer's ranks published."""
    found = []
    for index in range(ranks):
        bits = np.memmap(folder / f"weights{version}-{index}.bin", dtype=np.uint16, mode="r")
        table = json.loads((folder / f"weights{version}-{index}.json").read_text())
        tensors = {
            name: TensorRows(first, bits[place : place + math.prod(shape)].reshape(shape))
            for name, (first, place, shape) in table.items()
        }
        found.append(WeightSnapshot(version, tensors, {}))
    return found


def make_trainer(
    scene: Scene, layout: Layout, mesh: Mesh, provider: Operators | None = None, device: torch.device = CPU
) -> TrainEngine:
    config = read_config(scene.checkpoint)

    def weights() -> ModelWeights:
        return load_weights(scene.checkpoint, config, scene.sharding(config, mesh), device)

    settings = dataclasses.replace(scene.train, max_tokens=layout.max_tokens, recompute=layout.recompute)
    reference = weights() if settings.loss.kl_coef > 0 else None
    return TrainEngine(weights(), provider or scene.operators(), scene.positions, settings, reference, mesh=mesh)


class RolloutSide:
    """The rollout engines of one rank."""

    def __init__(self, scene: Scene, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        config = read_config(scene.checkpoint)
        self.scene, self.layout, self.config = scene, layout, config
        sharding = scene.sharding(config, mesh)
        self.engines = []
        for number in range(layout.engines):
            weights = load_weights(scene.checkpoint, config, sharding, device)
            settings = RolloutSettings(max_batch=3 if layout.shuffled else 64, chunk=512)
            engine = RolloutEngine(
                weights, scene.operators(), scene.positions, settings, f"rollout-{number}", mesh=mesh
            )
            self.engines.append(engine)
        self.rows = {name: sharding.rows(name) for name in config.tensor_shapes()}

    def generate(self, step: int) -> list[Sample]:
        """Samples in canonical order, whatever engine drew them and in which order they were asked for."""
        asked = self.scene.requests(self.config.vocabulary, step)
        if self.layout.shuffled:
            random.Random(step).shuffle(asked)
        samples = []
        for number, engine in enumerate(self.engines):
            samples += engine.generate(asked[number :: len(self.engines)], step, self.scene.sampling)
        return canonical(samples)

    def load(self, snapshots: list[WeightSnapshot]) -> bool:
        """Whether every engine holds exactly the exported bits of its rows."""
        source = JoinedWeights(snapshots)
        expected = row_digests(source, self.rows)
        return all([engine.load_weights(source) == expected for engine in self.engines])


def bits(values: list[np.ndarray]) -> list[int]:
    """fp32 arrays as one list of their bits."""
    return np.concatenate(values).view(np.int32).tolist()


def sample_facts(samples: list[Sample]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "lengths": [s.length for s in samples],
        "tokens": [s.response_tokens.tolist() for s in samples],
        "rollout logprobs": bits([s.logprobs for s in samples]),
    }
    if samples[0].retained is not None:
        facts["retained"] = [[row.tolist() for row in s.retained or ()] for s in samples]
    return facts


def train_facts(engine: TrainEngine, samples: list[Sample]) -> dict[str, Any]:
    """Scores, then one update."""
    old = engine.score(samples)
    reference = engine.score_reference(samples) if engine.settings.loss.kl_coef > 0 else None
    result = engine.step(samples, advantages(samples), old, reference)
    return {
        "logprobs": bits(old),
        "reference logprobs": bits(reference) if reference else [],
        "ratio mismatches": result.ratio_mismatches,
        "gradient norm": result.grad_norm.hex(),
        "loss": result.loss.hex(),
        "kl": result.kl_mean.hex(),
        "entropy": result.entropy_mean.hex(),
        "changed": result.changed_elements,
        "elements": result.elements,
    }


def bytes_of(engine: TrainEngine) -> dict[str, int]:
    """Bytes that one trainer rank holds, from the memory of its tensors."""

    def memory(values: Tensor | None) -> int:
        return 0 if values is None else values.untyped_storage().nbytes()

    weights = list(engine.weights)
    states = list(engine.state.values())
    return {
        "parameters": sum(memory(w.value) for w in weights),
        "stated": engine.weights.parameter_bytes,
        "copies": sum(memory(w.input_shard.value) for w in weights if w.input_shard is not None),
        "gradients": sum(memory(w.grad) for w in weights),
        "optimizer": sum(memory(t) for s in states for t in (s.master, s.m, s.v)),
    }


def work(rank: Rank, scene: Scene, layout: Layout, baseline: Path | None, extra_step: bool = False) -> dict[str, Any]:
    """The whole scene on one rank; JSON facts, the same on every rank that has them.

    ``extra_step``: also what step 1 would have drawn without the first update.
    """
    device = scene.device_of(rank)
    where: dict[str, Any] = {"device": device, "shared": not scene.own_gpus}
    if device.type == "cuda":  # memory that nobody writes shows
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    if rank.size > 1:
        rank.join(**where)
    train_mesh, rollout_mesh = rank.mesh(layout.tp, layout.cp, **where), rank.mesh(layout.rollout_tp, 1, **where)
    trainer = None if train_mesh is None else make_trainer(scene, layout, train_mesh, device=device)
    rollout = None if rollout_mesh is None else RolloutSide(scene, layout, rollout_mesh, device)
    judge = Judge(rank.folder if baseline is None else None, baseline)
    report: dict[str, Any] = {"steps": [], "held": []}
    if rollout is not None:
        report["rollout bytes"] = rollout.engines[0].weights.parameter_bytes
    if extra_step and rollout is not None:
        report["without update"] = [s.response_tokens.tolist() for s in rollout.generate(1)]
    for step in range(scene.updates):
        samples = None if rollout is None else rollout.generate(step)
        if rank.size > 1:
            shared = [samples]
            dist.broadcast_object_list(shared, src=0)
            samples = samples or shared[0]
        facts = sample_facts(samples)
        report["steps"].append(facts)
        if trainer is not None:
            facts.update(train_facts(trainer, samples))
            if step in scene.compared:
                judge.see(step, tensors_of(trainer))
            if train_mesh.cp.index == 0:
                publish(rank.folder, train_mesh.tp.index, trainer.export())
        if rank.size > 1:
            dist.barrier()
        snapshots = collect(rank.folder, step + 1, layout.tp)
        if rollout is not None:
            report["held"].append(rollout.load(snapshots))
        if rank.index == 0:
            whole = JoinedWeights(snapshots)
            report.setdefault("digests", []).append(map_digest(row_digests(whole, whole.held)))
    if trainer is not None:
        report["bytes"] = bytes_of(trainer)
        report["sent"] = train_mesh.sent()
        report["own digests"] = map_digest(own_digests(trainer.weights))
    report["covered"], report["faults"] = judge.covered, judge.faults
    return report


def whole_bytes(config: ModelConfig) -> tuple[int, int]:
    """(bf16 bytes of the model, of its norms, which every TP rank holds)."""
    sizes = {name: 2 * math.prod(shape) for name, shape in config.tensor_shapes().items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if "norm" in name)
