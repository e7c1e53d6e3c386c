"""``prepare``: gets what the profile needs, and says the next step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rl_engine.config.engines import HERE
from rl_engine.config.paths import PLACEHOLDER
from rl_engine.config.preflight import wants_demo_model
from rl_engine.config.resolve import ResolvedPlan
from rl_engine.prepare.dapo import DEFAULT_URL, prepare_dapo
from rl_engine.prepare.sources import prepare_source
from rl_engine.records.errors import UserError

Talk = Callable[[str], None]
SOURCES = ("vime", "megatron", "vllm")


def main(
    resolved: ResolvedPlan,
    *,
    download_data: bool,
    data_url: str | None,
    data_sha256: str | None,
    convert_checkpoint: bool,
    json_output: bool,
    talk: Talk,
) -> int:
    """Sources, prompts and the demo model of one resolved plan; returns 0.

    Raises:
        UserError: the first thing that cannot be had, with the way out.
    """
    paths = {value.name: str(value.value or "") for value in resolved.values}
    done: dict[str, str] = {}
    if resolved.plan.stack == "vime":
        done.update(_sources(resolved, paths, talk))
    directory = wants_demo_model(resolved)
    if directory is not None:
        from rl_engine.data.demo_model import ensure

        done["model"] = str(ensure(directory, talk))
    if download_data:
        output = Path(_usable(paths, "prompt_data"))
        prepare_dapo(output, data_url or DEFAULT_URL, data_sha256, talk)
        done["prompt_data"] = str(output)
    if convert_checkpoint:
        _convert_checkpoint(resolved, paths, talk)
    talk(f"next: {_next_step(resolved, paths)}")
    if json_output:
        sys.stdout.write(
            json.dumps({"status": "prepared", "prepared": done, "next": _next_step(resolved, paths)}) + "\n"
        )
    return 0


def _usable(paths: dict[str, str], name: str) -> str:
    value = paths.get(name, "")
    if not value or PLACEHOLDER in value:
        flag = "--" + name.replace("_", "-")
        raise UserError(f"no {name.replace('_', ' ')}", "a path", f"add {flag} PATH or set RLK_REPRO_{name.upper()}")
    return value


def _sources(resolved: ResolvedPlan, paths: dict[str, str], talk: Talk) -> dict[str, str]:
    done = {}
    for name in SOURCES:
        repository = getattr(resolved.profile.profile.repositories, name)
        revision = None if repository is None else getattr(repository.revisions, resolved.plan.mode)
        if repository is None or revision is None:
            continue
        root = Path(_usable(paths, f"{name}_root"))
        prepare_source(name, repository, revision, root, resolved.profile.file.parent, talk)
        done[f"{name}_root"] = str(root)
    return done


def _convert_checkpoint(resolved: ResolvedPlan, paths: dict[str, str], talk: Talk) -> None:
    if resolved.plan.stack in HERE:
        raise UserError(
            f"--convert-checkpoint with stack {resolved.plan.stack}",
            "stack vime",
            "the built-in trainer reads the Hugging Face checkpoint itself",
        )
    ref_load = Path(_usable(paths, "ref_load"))
    if (ref_load / "latest_checkpointed_iteration.txt").is_file():
        talk(f"checkpoint: {ref_load} is complete")
        return
    raise UserError(
        f"no Megatron checkpoint {ref_load}",
        "one made by Megatron's own converter: this version has none yet",
        "convert it there, then pass it as --ref-load; sources and prompts are prepared",
    )


def _next_step(resolved: ResolvedPlan, paths: dict[str, str]) -> str:
    if resolved.plan.stack in HERE:
        return "./rlk run"
    workspace = paths.get("workspace", "")
    if not paths.get("model_root") or PLACEHOLDER in paths["model_root"]:
        return "put the checkpoint on this machine and set RLK_REPRO_MODEL_ROOT, then rlk-repro doctor"
    return f"start Ray, then rlk-repro doctor --workspace {workspace}"
