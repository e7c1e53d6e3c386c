"""One model and one one-rank run, which every layout is compared with."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_engine.models.checkpoint import save_checkpoint
from rl_engine.models.config import ModelConfig
from rl_engine.models.weights import random_weights
from tests.helpers.models import llama, qwen3, sampling, train_settings
from tests.helpers.ranks import run_ranks
from tests.parallel.scene import Layout, Scene, work

# No size divides evenly: the last vocabulary tile and group are short, MLP shards are ragged at TP 2, 4 and 8.
QWEN3 = qwen3(layers=4, intermediate=301, vocabulary=2500)
STOPS = tuple(range(3, 400))


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What one rank computed: JSON facts, and tensors in ``folder``."""

    scene: Scene
    config: ModelConfig
    folder: Path
    facts: dict[str, Any]


def make_baseline(scene: Scene, config: ModelConfig, folder: Path, *, extra_step: bool = False) -> Iterator[Baseline]:
    """The one-rank run; its files, about a gigabyte, go afterwards."""
    (ended,) = run_ranks(work, 1, folder, scene, Layout(), None, extra_step)
    yield Baseline(scene, config, folder, ended.result)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel") / "qwen3"
    folder.mkdir()
    save_checkpoint(folder, random_weights(QWEN3, 3))
    return folder


@pytest.fixture(scope="session")
def qwen3_scene(qwen3_checkpoint: Path) -> Scene:
    """Samples of 2 to over 1,100 tokens: the short ones leave CP ranks without a token, the long one crosses pages,
    KV blocks and the KV split. Five fold units."""
    return Scene(
        checkpoint=qwen3_checkpoint,
        prompts=((1, 2), (3, 2), (50, 2), (1105, 1)),
        sampling=sampling(max_response_len=8, stop_tokens=STOPS),
        train=train_settings(fold_tokens=20),
    )


@pytest.fixture(scope="session")
def one_rank(qwen3_scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    yield from make_baseline(qwen3_scene, QWEN3, tmp_path_factory.mktemp("parallel") / "one", extra_step=True)


@pytest.fixture(scope="session")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    """A tied Llama at temperature 0.7 with retained sets and a KL term."""
    config = llama(
        layers=2, hidden=576, intermediate=301, heads=12, kv_heads=6, head_dim=48, vocabulary=2500, tied=True
    )
    folder = tmp_path_factory.mktemp("parallel") / "llama"
    folder.mkdir()
    save_checkpoint(folder, random_weights(config, 5))
    scene = Scene(
        checkpoint=folder,
        prompts=((2, 2), (30, 3)),
        sampling=sampling(temperature=0.7, top_p=0.95, top_k=20, max_response_len=8, stop_tokens=STOPS),
        train=train_settings(temperature=0.7, kl_coef=0.1, fold_tokens=64, lr=1e-4),
    )
    yield from make_baseline(scene, config, folder.with_name("llama-one"))
