"""What the pages show is run: commands of a run are planned, code and data blocks are executed and parsed."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from rl_engine.entrypoints.repro import main
from tests.helpers.checkpoints import write_config
from tests.helpers.synthetic_run import make_run
from tests.unit.test_readme import CASES, FENCE, PAGES, ROOT

PLANNED = ("plan", "run", "verify")
NOT_OF_PLAN = {"--wait", "--detach", "--dry-run", "--check", "--json"}  # how to run, not what
WITH_VALUE = {"--resume", "--matrix"}
BACKENDS = {"docs/guides/eight-gpus.md": "cuda", "docs/guides/rocm.md": "rocm"}
RUNS = sorted({(page, tuple(line)) for page, line in CASES if line and line[0] in PLANNED and "--help" not in line})


def planned(line: tuple[str, ...]) -> list[str]:
    """The ``plan`` command of a line that starts a run."""
    out, rest = ["plan"], list(line[1:])
    while rest:
        part = rest.pop(0)
        if part in WITH_VALUE:
            rest.pop(0)
        elif part not in NOT_OF_PLAN:
            out.append(part)
    return out


@pytest.mark.parametrize(("page", "line"), RUNS, ids=[f"{page}: {' '.join(line)}" for page, line in RUNS])
def test_every_shown_run_plans(
    page: str,
    line: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = BACKENDS.get(page)
    monkeypatch.setattr("rl_engine.config.host.gpu_kind", lambda: backend)
    monkeypatch.chdir(tmp_path)
    for name in ("RLK_REPRO_WORKSPACE", "RLK_REPRO_MODEL_ROOT", "RLK_REPRO_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    if backend == "cuda":
        monkeypatch.setenv("RLK_REPRO_MODEL_ROOT", "/models/Qwen3-8B")
    if backend == "rocm":
        profile = "configs/integrations/orchestrators/vime/rocm_attention/mi300x-qwen3-8b.json"
        monkeypatch.setenv("RLK_REPRO_PROFILE", str(ROOT / profile))
    # A model folder and a profile of the pages' own examples; of the model a plan needs the shape.
    write_config(tmp_path / "DIR", num_attention_heads=6, num_key_value_heads=3, vocab_size=256, head_dim=16)
    (tmp_path / "mine.json").write_text((ROOT / "configs/demo/cpu-smollm2.json").read_text())
    words = [word.replace("$RLK_REPRO_WORKSPACE", str(tmp_path / "ws")) for word in planned(line)]
    assert main(words) == 0, capsys.readouterr().err
    assert "plan " in capsys.readouterr().out


def _blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.relative_to(ROOT).as_posix(), block)
        for page in PAGES
        for found, block in FENCE.findall(page.read_text())
        if found == language
    ]


@pytest.mark.parametrize(("page", "block"), _blocks("python"))
def test_python_blocks_run(page: str, block: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, page, "exec"), {"path": make_run(tmp_path / "r", "native")})
    assert "rounding" in capsys.readouterr().out


@pytest.mark.parametrize(("page", "block"), _blocks("json"))
def test_json_blocks_are_json(page: str, block: str) -> None:
    for line in block.strip().splitlines():
        assert isinstance(json.loads(line), dict), page


@pytest.mark.parametrize(("page", "block"), _blocks("toml"))
def test_toml_blocks_are_toml(page: str, block: str) -> None:
    assert tomllib.loads(block), page


def test_blocks_name_their_language() -> None:
    """So that none escapes the tests above; ``text`` is output."""
    known = {"sh", "bash", "console", "python", "json", "toml", "text", "mermaid", "c"}
    for page in PAGES:
        named = {language for language, _ in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)}
        assert named <= known, f"{page.name}: {named - known}"
