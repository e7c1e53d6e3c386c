"""Any TP and CP of ranks on a GPU gives one rank's bits: tokens, logprobs, every gradient, norm, state and weight.

Ranks that share the one GPU exchange through host memory; where there are several, one rank on each does the same by
NCCL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")

from rl_engine.models.checkpoint import save_checkpoint
from rl_engine.models.config import ModelConfig
from rl_engine.models.weights import random_weights
from tests.helpers.gpu import needs_gpu
from tests.helpers.models import llama, qwen2, qwen2_weights, qwen3, sampling, train_settings
from tests.helpers.ranks import Rank, run_ranks
from tests.parallel.conftest import Baseline, make_baseline
from tests.parallel.controls import train_controls
from tests.parallel.scene import Layout, Scene, work
from tests.parallel.test_layouts import (  # noqa: F401 - two tests that take this module's controls
    check_equal,
    check_memory,
    check_traffic,
    samples_of,
    test_control_differs,
    test_without_the_fault_nothing_differs,
)

pytestmark = [pytest.mark.gpu, needs_gpu]

# Sizes that divide by 8 ranks' rows of 16 bytes, and a vocabulary that does not.
FAMILIES: dict[str, ModelConfig] = {
    "qwen3": qwen3(layers=2, intermediate=1536, head_dim=128, vocabulary=4997),
    "llama": llama(layers=2, intermediate=1536, vocabulary=5003, tied=True, kv_heads=4),
    "qwen2": qwen2(layers=2, intermediate=1536, vocabulary=4997),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {"sampling": {}, "train": {}},
    "qwen2": {"sampling": {}, "train": {}},
    "llama": {
        "sampling": {"temperature": 0.7, "top_p": 0.95, "top_k": 20},
        "train": {"temperature": 0.7, "kl_coef": 0.1},
    },
}
# Short samples are fold units of their own, in which ranks of CP 4 have no token; the long one crosses the KV split.
PROMPTS = ((1, 2), (3, 2), (50, 2), (1105, 1))
LAYOUTS = (
    ("qwen3", Layout(2, 1, rollout_tp=2, shuffled=True)),
    ("qwen3", Layout(1, 2, rollout_tp=1, max_tokens=1200)),
    ("qwen3", Layout(2, 2, rollout_tp=2, recompute=True)),
    ("qwen3", Layout(1, 4, rollout_tp=1)),
    ("qwen3", Layout(4, 2, rollout_tp=4, max_tokens=4096)),
    ("llama", Layout(4, 1, rollout_tp=2)),
    ("llama", Layout(2, 2, rollout_tp=2, max_tokens=1200)),
    ("qwen2", Layout(2, 2, rollout_tp=2)),
)


def make_scene(family: str, folder: Path, **changes: Any) -> Scene:
    settings = SETTINGS[family]
    folder.mkdir()
    make = qwen2_weights if family == "qwen2" else random_weights
    save_checkpoint(folder, make(FAMILIES[family], 3))
    stops = tuple(range(3, 600))
    return Scene(
        checkpoint=folder,
        prompts=PROMPTS,
        sampling=sampling(max_response_len=8, stop_tokens=stops, **settings["sampling"]),
        train=train_settings(fold_tokens=20, **settings["train"]),
        **{"compared": (1,), "providers": "triton", "device": "cuda:0", **changes},
    )


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """family -> what one rank computed; made when first asked for."""
    made: dict[str, Any] = {}
    yield made
    for _, steps in made.values():
        next(steps, None)


def one_rank(family: str, baselines: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    if family not in baselines:
        folder = tmp_path_factory.mktemp(family)
        steps = make_baseline(make_scene(family, folder / "model"), FAMILIES[family], folder / "one")
        baselines[family] = (next(steps), steps)
    return baselines[family][0]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_layout_equals_one_rank(
    family: str,
    layout: Layout,
    baselines: dict[str, Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    baseline = one_rank(family, baselines, tmp_path_factory)
    steps = baseline.facts["steps"]
    assert steps[0]["changed"] > 0.5 * steps[0]["elements"], "the update does nothing"
    assert steps[0]["logprobs"] == steps[0]["rollout logprobs"]
    ended = run_ranks(work, layout.size, tmp_path, baseline.scene, layout, baseline.folder)
    check_equal(ended, layout, baseline)
    check_memory(ended, layout, baseline.config)
    if not baseline.scene.train.kl_coef:  # the formula has no reference model
        check_traffic(ended, layout, baseline)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each of two ranks")
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", Layout(2, 1, rollout_tp=2)),
        ("qwen3", Layout(1, 2, rollout_tp=1, max_tokens=1200)),
        ("llama", Layout(2, 1, rollout_tp=2)),
        ("qwen3", Layout(2, 2, rollout_tp=4)),
    ],
    ids=str,
)
def test_a_gpu_for_each_rank(
    family: str,
    layout: Layout,
    baselines: dict[str, Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """By NCCL."""
    if layout.size > torch.cuda.device_count():
        pytest.skip(f"{layout.size} ranks, {torch.cuda.device_count()} GPUs")
    baseline = one_rank(family, baselines, tmp_path_factory)
    scene = dataclasses.replace(baseline.scene, own_gpus=True)
    ended = run_ranks(work, layout.size, tmp_path, scene, layout, baseline.folder)
    check_equal(ended, layout, baseline)


def quick_table(config: ModelConfig, tp_sizes: tuple[int, ...]) -> str:
    """A table of the products of TP slices: an algorithm of cuBLASLt that holds on a few rows, one tile for dW."""
    from rl_engine.ops import cublaslt, gemm_table, triton_gemm
    from rl_engine.ops.gemm_table import Choice, Table
    from rl_engine.qualify.gpu.data import Inputs
    from rl_engine.qualify.gpu.products import Products
    from rl_engine.qualify.gpu.run import shapes

    inputs, entries, proven = Inputs(), {}, {}
    for shape in shapes(config, tp_sizes):
        name = str(shape)
        if shape.kind == "fold":
            entries[name] = [(4096, Choice(triton_gemm.FOLD_HOPPER, None))]
            continue
        prover = Products(shape, inputs)
        a, b, old = prover.data("random", 64)
        out = torch.empty((64, shape.columns), dtype=prover.dtype, device="cuda")
        old = out if shape.kind == "dh" else old
        found = cublaslt.plan(cublaslt.describe(a, b, out, old), 0).search(8) if shape.columns % 8 == 0 else []
        sound = prover._sound([Choice(None, algorithm.hex()) for algorithm, _ in found], 64)
        tile = Choice(triton_gemm.default_tile(64, shape.columns, tma=True), None)
        entries[name] = [(8192, sound[0] if sound else tile)]
        proven[name] = sorted(choice.algorithm or "" for choice in sound)
    return Table(gemm_table.identity(), entries, proven=proven).json()


def work_by_table(rank: Rank, table: str, scene: Scene, layout: Layout, baseline: Path) -> dict[str, Any]:
    """The scene with the products of ``table``; also which operators asked for what is in it."""
    from rl_engine.ops import gemm_table

    held = gemm_table.Table.parse(Path(table).read_text())
    gemm_table.current = lambda: held
    report = work(rank, scene, layout, baseline)
    return report | {"prepared": sorted({form[0] for form in held.prepared})}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", Layout(2, 2, rollout_tp=2)),
        ("qwen3", Layout(4, 1, rollout_tp=4)),
        ("qwen2", Layout(2, 2, rollout_tp=2)),
    ],
    ids=str,
)
def test_products_by_the_table(
    family: str,
    layout: Layout,
    baselines: dict[str, Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """cuBLASLt on the slices of TP ranks, the proven tile on the rows of CP ranks: the bits of Triton on one rank."""
    baseline = one_rank(family, baselines, tmp_path_factory)
    table = tmp_path / "table.json"
    table.write_text(quick_table(baseline.config, (layout.tp, layout.rollout_tp)))
    scene = dataclasses.replace(baseline.scene, providers="gpu")
    ended = run_ranks(work_by_table, layout.size, tmp_path / "ranks", str(table), scene, layout, baseline.folder)
    check_equal(ended, layout, baseline)
    for rank in ended:
        assert rank.result["prepared"] == ["dh", "dx", "forward", "logits", "residual"]


@pytest.fixture(scope="module")
def controls(baselines: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    baseline = one_rank("qwen3", baselines, tmp_path_factory)
    folder = tmp_path_factory.mktemp("controls")
    ended = run_ranks(train_controls, 2, folder, baseline.scene, samples_of(baseline))
    return ended[0].result
