"""The verb: sources, prompts and demo model of a profile, and what it says is next."""

from __future__ import annotations

import json
import os

import pytest
from test_prepare_data import Server, row, write_parquet
from test_prepare_sources import Upstream, git

from rl_engine.config.paths import REPOSITORY
from rl_engine.entrypoints.repro import main

CUDA = REPOSITORY / "configs/integrations/orchestrators/vime/dense/qwen3-8b-tp4-cp2.json"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("RLK_REPRO_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_a_reference_profile_end_to_end(tmp_path, capsys):
    upstream = Upstream(tmp_path)
    body = json.loads(CUDA.read_text())
    pin = {"native": upstream.commits[1], "consistency": upstream.commits[1]}
    patches = [patch.model_dump() for patch in upstream.patches]
    body["repositories"]["vime"] = {"url": str(upstream.bare), "revisions": pin, "patches": patches}
    body["repositories"]["megatron"] = {"url": str(upstream.bare), "revisions": pin}
    (tmp_path / "mine.json").write_text(json.dumps(body))
    server = Server(write_parquet(tmp_path / "made.parquet", [row("1"), row("2"), row("1")]))
    argv = ["prepare", "--profile", "mine.json", "--workspace", "ws", "--download-data", "--data-url", server.url]
    for _ in range(2):
        assert main([*argv, "--json"]) == 0
        said = capsys.readouterr()
        body = json.loads(said.out)
        assert set(body["prepared"]) == {"vime_root", "megatron_root", "prompt_data"}
        assert "RLK_REPRO_MODEL_ROOT" in body["next"]
    server.close()
    assert git(tmp_path / "ws/vime", "rev-parse", "HEAD^{tree}") == upstream.patches[1].tree
    assert git(tmp_path / "ws/Megatron-LM", "rev-parse", "HEAD") == upstream.commits[1]
    assert (tmp_path / "ws/data/datasets/dapo-math-17k.vime.jsonl").read_text().count("\n") == 2
    (tmp_path / "ws/vime/a.txt").write_text("mine")
    assert main(argv) == 2
    assert "uncommitted changes" in capsys.readouterr().err.splitlines()[-1]


def test_checkpoint_conversion_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rl_engine.data.demo_model.ensure", lambda directory, progress: directory)
    assert main(["prepare", "--convert-checkpoint"]) == 2
    assert "reads the Hugging Face checkpoint itself" in capsys.readouterr().err.splitlines()[-1]
    body = json.loads(CUDA.read_text())
    body["repositories"] = {}
    (tmp_path / "mine.json").write_text(json.dumps(body))
    argv = [
        "prepare",
        "--profile",
        "mine.json",
        "--workspace",
        "ws",
        "--model-root",
        "Qwen3-8B",
        "--convert-checkpoint",
    ]
    assert main(argv) == 2
    assert "--ref-load" in capsys.readouterr().err.splitlines()[-1]
    done = tmp_path / "ws/checkpoints/Qwen3-8B_torch_dist"
    done.mkdir(parents=True)
    (done / "latest_checkpointed_iteration.txt").write_text("release")
    assert main(argv) == 0
    assert "rlk-repro doctor" in capsys.readouterr().err.splitlines()[-1]


def test_a_demo_profile_makes_its_model(tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(
        "rl_engine.data.demo_model.ensure", lambda directory, progress: made.append(directory) or directory
    )
    assert main(["prepare"]) == 0
    assert made == [tmp_path / ".rlk-workspace/models/SmolLM2-135M-Instruct"]
    assert capsys.readouterr().err.splitlines()[-1] == "next: ./rlk run"


def test_placeholders_are_named(capsys):
    profile = REPOSITORY / "configs/integrations/orchestrators/vime/rocm_attention/mi300x-qwen3-8b.json"
    assert main(["prepare", "--profile", str(profile)]) == 2
    assert "--vime-root PATH" in capsys.readouterr().err.splitlines()[-1]
