"""The trainer's state on disk: every layout's files hold one rank's bits, and every layout goes on from them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.engines.train.state import KINDS, StateMismatch, load_state, save_state
from rl_engine.models.checkpoint import save_checkpoint
from rl_engine.models.weights import random_weights
from rl_engine.numerics.bits import compare_bits
from rl_engine.parallel import single_mesh
from tests.helpers.models import llama, random_samples, sampling, train_settings
from tests.helpers.numeric import assert_bitwise
from tests.helpers.ranks import Rank, run_ranks
from tests.parallel.scene import Layout, Scene, make_trainer, train_facts

# No size divides evenly among ranks, so that merged weights (q, k, v; gate, up) are cut inside their parts.
CONFIG = llama(layers=2, hidden=192, intermediate=101, heads=6, kv_heads=2, head_dim=32, vocabulary=1301, tied=True)
SAMPLES = random_samples(CONFIG.vocabulary, (3, 7), (5, 2, 9, 4))
UPDATES = 3


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("state")
    save_checkpoint(folder, random_weights(CONFIG, 3))
    return Scene(folder, ((3, 2), (7, 2)), sampling(max_response_len=9), train_settings(fold_tokens=20))


def update(engine: TrainEngine, times: int) -> list[dict[str, Any]]:
    return [train_facts(engine, SAMPLES) for _ in range(times)]


def everything(engine: TrainEngine) -> dict[str, Tensor]:
    """Weights and optimizer state of one rank that holds them all."""
    found = {f"weight {weight.name}": weight.value.detach() for weight in engine.weights}
    for name, state in engine.state.items():
        found |= {f"{kind} {name}": getattr(state, kind) for kind in KINDS}
    return found


@dataclasses.dataclass(frozen=True)
class Uninterrupted:
    """One rank's three updates: facts of each, the files saved after the first, and the tensors at the end."""

    facts: list[dict[str, Any]]
    saved: Path
    end: dict[str, Tensor]


@pytest.fixture(scope="module")
def uninterrupted(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    engine, saved = make_trainer(scene, Layout(), single_mesh()), tmp_path_factory.mktemp("saved")
    facts = update(engine, 1)
    save_state(engine, saved)
    facts += update(engine, UPDATES - 1)
    return Uninterrupted(facts, saved, everything(engine))


def test_a_restored_trainer_goes_on_with_the_same_bits(scene: Scene, uninterrupted: Uninterrupted) -> None:
    engine = make_trainer(scene, Layout(), single_mesh())
    load_state(engine, uninterrupted.saved)
    assert engine.version == 1
    assert update(engine, UPDATES - 1) == uninterrupted.facts[1:]
    for name, values in everything(engine).items():
        assert_bitwise(values, uninterrupted.end[name], name)


@pytest.mark.parametrize("lost", ["master", "m", "v", "version"])
def test_each_part_of_the_state_matters(scene: Scene, uninterrupted: Uninterrupted, lost: str) -> None:
    """The control: without it, what follows differs."""
    engine = make_trainer(scene, Layout(), single_mesh())
    fresh = {name: values.clone() for name, values in everything(engine).items()}
    load_state(engine, uninterrupted.saved)
    if lost == "version":
        engine.version = 0
    else:
        for name, values in everything(engine).items():
            if name.startswith(f"{lost} "):
                values.copy_(fresh[name])
    update(engine, UPDATES - 1)
    end = everything(engine)
    assert any(not compare_bits(values, uninterrupted.end[name]).equal for name, values in end.items())


def save_and_restore(rank: Rank, scene: Scene, layout: Layout, saved: Path, folder: Path) -> dict[str, Any]:
    """Goes on from one rank's files on this layout, and saves its own after the same first update."""
    rank.join()
    mesh = rank.mesh(layout.tp, layout.cp)
    assert mesh is not None
    engine = make_trainer(scene, layout, mesh)
    update(engine, 1)
    save_state(engine, folder)
    restored = make_trainer(scene, layout, mesh)
    load_state(restored, saved)
    return {"facts": update(restored, UPDATES - 1)}


@pytest.mark.parametrize(
    "layout", [Layout(2, 2), *(pytest.param(Layout(*shape), marks=pytest.mark.slow) for shape in ((2, 1), (1, 3)))]
)
def test_any_layout_reads_and_writes_it(
    scene: Scene, uninterrupted: Uninterrupted, tmp_path: Path, layout: Layout
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    arguments = (scene, layout, uninterrupted.saved, folder)
    for ended in run_ranks(save_and_restore, layout.size, tmp_path / "ranks", *arguments):
        assert ended.result["facts"] == uninterrupted.facts[1:], f"rank {ended.index}"
    assert len(list(folder.iterdir())) == layout.size
    engine = make_trainer(scene, Layout(), single_mesh())
    load_state(engine, folder)
    assert update(engine, UPDATES - 1) == uninterrupted.facts[1:]
    whole = sum(rows.numel() for file in uninterrupted.saved.iterdir() for rows in load_file(file).values())
    assert sum(rows.numel() for file in folder.iterdir() for rows in load_file(file).values()) == whole


def test_a_state_of_another_model_is_refused(scene: Scene, uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    (file,) = uninterrupted.saved.iterdir()
    for damage, message in (
        (lambda path: path.write_bytes(file.read_bytes()[:-5]), "state-0000"),
        (lambda path: path.write_bytes(b"junk"), "state-0000"),
        (lambda path: path.unlink(), "versions"),
        (lambda path: path.write_bytes(file.read_bytes().replace(b"/0/model.norm", b"/9/model.norm", 1)), "rows 0"),
        (lambda path: path.write_bytes(file.read_bytes().replace(b"train_state.v1", b"train_state.v7", 1)), "v7"),
    ):
        folder = tmp_path / message.replace(" ", "")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(uninterrupted.saved, folder)
        damage(folder / file.name)
        with pytest.raises(StateMismatch, match=message):
            load_state(make_trainer(scene, Layout(), single_mesh()), folder)
