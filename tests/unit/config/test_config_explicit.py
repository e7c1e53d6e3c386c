"""What somebody asks for by name is honoured or refused, never dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_engine.config.paths import REPOSITORY
from rl_engine.config.preflight import refuse_unbuilt
from rl_engine.records.errors import UserError
from tests.helpers.checkpoints import write_config
from tests.unit.config.conftest import Resolve

DEMO = REPOSITORY / "configs/demo/cpu-smollm2.json"


@pytest.mark.parametrize("source", ["arithmetic", "gsm8k"])
def test_a_source_and_a_file(source: str, plan_for: Resolve, tmp_path: Path) -> None:
    """Only ``arithmetic`` was refused; another source lost against the file."""
    for given in ({"paths": {"prompt_data": "p.jsonl"}}, {"env": {"RLK_REPRO_PROMPT_DATA": "p.jsonl"}}):
        with pytest.raises(UserError, match=rf"--data-source {source} with .*, expected one of the two"):
            plan_for(data_source=source, **given)
        (plan, _) = plan_for(data_source="jsonl", **given)
        assert plan.plan.data.path == str(tmp_path / "p.jsonl")


def test_flags_of_another_stack_s_runner(plan_for: Resolve, tmp_path: Path) -> None:
    body = json.loads(DEMO.read_text())
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(body))
    refuse_unbuilt(plan_for(profile=file))
    file.write_text(json.dumps({**body, "runner_args": [["--save-interval", "50"]]}))
    with pytest.raises(UserError, match=r"runner_args --save-interval 50 in .* with the built-in engines"):
        refuse_unbuilt(plan_for(profile=file))


@pytest.mark.parametrize("name", ["vime_root", "megatron_root", "vllm_root", "ref_load"])
def test_a_path_that_nothing_reads(name: str, plan_for: Resolve) -> None:
    refuse_unbuilt(plan_for(env={f"RLK_REPRO_{name.upper()}": "x"}))  # the environment speaks to every command
    with pytest.raises(UserError, match="nothing there reads that path"):
        refuse_unbuilt(plan_for(paths={name: "x"}))


def test_a_hugging_face_id_is_told_how_to_download(plan_for: Resolve, tmp_path: Path) -> None:
    for given in ({"paths": {"model_root": "Qwen/Qwen3-0.6B"}}, {"env": {"RLK_REPRO_MODEL_ROOT": "Qwen/Qwen3-0.6B"}}):
        with pytest.raises(UserError) as caught:
            plan_for(**given)
        assert "Qwen/Qwen3-0.6B looks like a Hugging Face id" in caught.value.found
        assert caught.value.hint.startswith("hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B")
    write_config(tmp_path / "Qwen/Qwen3-0.6B")  # a folder of that name is a folder
    plan_for(paths={"model_root": "Qwen/Qwen3-0.6B"})
    plan_for(paths={"model_root": "/models/Qwen3-0.6B"})
