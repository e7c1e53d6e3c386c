"""What must be there before a run starts, judged on this machine; the first thing missing is one line and exit 2."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rl_engine.config.engines import CUSTOM, HERE, SIDES, find_engine
from rl_engine.config.model_facts import check_tensors
from rl_engine.config.paths import PLACEHOLDER, REPOSITORY, bundled
from rl_engine.config.plan import Plan
from rl_engine.config.profile import BUNDLED, REFERENCE
from rl_engine.config.resolve import ResolvedPlan
from rl_engine.numerics.providers import is_stock
from rl_engine.records.errors import UserError
from rl_engine.records.sources import FOLDERS, lies_in_sources

_DEMOS = f"--profile {bundled(BUNDLED['demo-gpu'])} on a Hopper GPU, else cpu-smollm2.json beside it"


def refuse_unbuilt(resolved: Sequence[ResolvedPlan]) -> None:
    """Refuses what plans but cannot run yet, and runs that would write among the sources.

    Raises:
        UserError: a stack, backend or way of running that this version does not have, or such a folder.
    """
    plan = resolved[0].plan
    if not plan.local:
        chosen = resolved[0].profile
        by_default = chosen.why.startswith(REFERENCE)  # nobody asked for that stack: a workspace was given
        raise UserError(
            f"--stack {plan.stack}",
            "stack builtin: this version plans the others but does not run them",
            _DEMOS if by_default else "--stack builtin",
        )
    for side in SIDES:
        find_engine(side, plan.engines.of(side), f"--stack {plan.stack}: {side} engine")
    if plan.backend == "rocm":
        raise UserError(
            "--backend rocm", "backend cpu or cuda: this version's built-in engines run there", "--backend cpu"
        )
    if plan.engine.pd:
        raise UserError(
            "--pd", "engines that prefill and decode: the built-in stack does not split them", "leave --pd out"
        )
    _refuse_groups(resolved)
    _refuse_mixed_heads(resolved)
    _refuse_source_folders(resolved)
    _refuse_unused(resolved)
    for name, what in _NOT_HONOURED if plan.stack == CUSTOM else (*_NOT_BY_OURS, *_NOT_HONOURED):
        value = next((value for value in resolved[0].values if value.name == name), None)
        if value is not None and value.source == "flag":
            raise UserError(
                f"{value.origin} with the built-in engines",
                f"a run without it: {what}",
                f"leave {value.origin} out",
            )


_NOT_BY_OURS = (  # which an engine of another package may honour
    ("vllm_gpu_memory_utilization", "they take memory as they need it"),
    ("native_deterministic", "their stock operators have no determinism flags"),
)
_NOT_HONOURED = (
    ("ray_port", "their Ray head takes a free port"),
    ("ray_dashboard_port", "their Ray head takes a free port"),
)


def _refuse_groups(resolved: Sequence[ResolvedPlan]) -> None:
    """Rollout context parallelism is not built; the fallback of a C compiler runs on one rank."""
    for item in resolved:
        plan, shape = item.plan, item.plan.topology
        if shape.rollout_cp > 1:
            raise UserError(
                f"--rollout-cp {shape.rollout_cp}",
                "rollout CP 1: this version's built-in engines cut rollouts by TP only",
                "--rollout-cp 1",
            )
        ranks = max(shape.train_tp * shape.train_cp, shape.rollout_tp)
        if plan.contract_id.endswith("-chain256") and ranks > 1:
            raise UserError(
                f"{ranks} ranks without a C compiler",
                "one rank: the fallback's bits are proven for whole tensors only",
                "install a C compiler (cc, gcc or clang)",
            )


def _refuse_mixed_heads(resolved: Sequence[ResolvedPlan]) -> None:
    """A stock head has no proof beside contract products, and a stock logprob no gradient through a contract head."""
    for item in resolved:
        sides = {"train": dict(item.plan.providers.train), "rollout": dict(item.plan.providers.rollout)}
        for side, operator in (("train", "lm_head"), ("rollout", "lm_head"), ("train", "selected_logp")):
            if item.plan.mode == "consistency" and is_stock(sides[side].get(operator, "")):
                raise UserError(
                    f"--native {operator}@{side}",
                    "the contract's own head on both sides and its logprob on the trainer's",
                    "--native selected_logp@rollout shows a stock logprob",
                )


def _refuse_source_folders(resolved: Sequence[ResolvedPlan]) -> None:
    """What a run writes there would count as a change of its own sources."""
    for item in resolved:
        for value in item.values:
            place = str(value.value)
            if value.name in ("workspace", "data_root", "output_root") and lies_in_sources(Path(place), REPOSITORY):
                raise UserError(
                    f"{value.name.replace('_', ' ')} {place}, among the sources",
                    f"a folder outside {' and '.join(FOLDERS)}",
                    f"--{value.name.replace('_', '-')} DIR",
                )


def unused_paths(plan: Plan) -> set[str]:
    """Paths that the plan's engines and device have no use for."""
    unused = set() if plan.data.source == "jsonl" else {"prompt_data"}
    if plan.stack in HERE:
        unused |= {"ref_load", "vime_root", "megatron_root", "vllm_root"}
    return unused | ({"te_root", "cuda_python_site", "cuda_runtime_root"} if plan.backend == "cpu" else set())


def _refuse_unused(resolved: Sequence[ResolvedPlan]) -> None:
    """What somebody asked for by name must not be dropped in silence."""
    first = resolved[0]
    entries = first.profile.profile.runner_args
    if entries:
        raise UserError(
            f"runner_args {' '.join(entries[0])} in {first.profile.file} with the built-in engines",
            "a profile without them: they are flags of another stack's runner",
            "take runner_args out of the profile",
        )
    for value in first.values:
        if value.source == "flag" and value.name in unused_paths(first.plan):
            raise UserError(
                f"{value.origin} {value.value} with the built-in engines on {first.plan.backend}",
                "a run without it: nothing there reads that path",
                f"leave {value.origin} out",
            )


def wants_demo_model(resolved: ResolvedPlan) -> Path | None:
    """Where the demo model is to be made, or None when the profile has none or the user names a model."""
    facts = resolved.profile.profile.model
    value = next(value for value in resolved.values if value.name == "model_root")
    if facts is None or not facts.demo or value.source != "derived":
        return None
    return Path(str(value.value))


def check_inputs(resolved: Sequence[ResolvedPlan]) -> None:
    """Model, prompts and run directories of every plan.

    Raises:
        UserError: a model or prompt file that is missing, or a run directory that is already there.
    """
    for item in resolved:
        plan = item.plan
        check_files(plan)
        for taken in filter(
            None, (plan.run_dir, plan.pair_id and os.path.join(plan.output_root, f"{plan.pair_id}-pair.json"))
        ):
            if os.path.lexists(taken):
                raise UserError(
                    f"{taken} already there",
                    "a new run directory",
                    "choose another --run-id: runs are never overwritten",
                )
        _check_writable(Path(plan.output_root))


def check_files(plan: Plan) -> None:
    """Model and prompts of a plan, a new one or one that goes on.

    Raises:
        UserError: one of them is missing, or the model's tensors are not those that the engines compute with.
    """
    _check_model(plan.model_root)
    if plan.data.path is not None and not os.path.isfile(plan.data.path):
        raise UserError(
            f"no prompt file {plan.data.path}", "a JSONL file", "add --prompt-data FILE, or --data-source arithmetic"
        )


def _check_model(model_root: str) -> None:
    if not model_root or PLACEHOLDER in model_root:
        raise UserError(
            "no model", "a local Hugging Face checkpoint", "add --model-root DIR or set RLK_REPRO_MODEL_ROOT"
        )
    folder = Path(model_root)
    if not folder.is_dir():
        raise UserError(
            f"no model directory {model_root}",
            "a local Hugging Face checkpoint",
            "check --model-root and RLK_REPRO_MODEL_ROOT",
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"no config.json in {model_root}", "a local Hugging Face checkpoint", "check --model-root")
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"no *.safetensors in {model_root}",
            "weights as safetensors",
            "convert the checkpoint, or check --model-root",
        )
    check_tensors(folder)


def _check_writable(root: Path) -> None:
    existing = next((parent for parent in (root, *root.parents) if os.path.lexists(parent)), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"output root {root} that cannot be made ({existing} is not a writable folder)",
            "a writable folder",
            "add --output-root DIR",
        )
