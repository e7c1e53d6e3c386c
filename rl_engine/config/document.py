"""``plan --json`` and the text of ``plan``: every value with its source, built from a resolved plan."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence

from rl_engine.config.codec import plan_digest
from rl_engine.config.command import rollout_engine_arguments, submission
from rl_engine.config.engines import HERE
from rl_engine.config.memory import RankMemory, rollout_memory, train_memory
from rl_engine.config.options import BY_NAME
from rl_engine.config.paths import PATH_NAMES, PLACEHOLDER, Value
from rl_engine.config.preflight import unused_paths, wants_demo_model
from rl_engine.config.resolve import ResolvedPlan
from rl_engine.records.codec import encode

MADE = ("workspace", "data_root", "output_root")


def plan_document(resolved: Sequence[ResolvedPlan]) -> dict[str, object]:
    """The JSON object of ``plan --json``: profile, notes, values with sources, and each plan with its digest."""
    first = resolved[0]
    return {
        "profile": {"name": first.profile.profile.name, "file": str(first.profile.file), "why": first.profile.why},
        "notes": list(first.notes),
        "values": [dataclasses.asdict(value) for value in first.values],
        "plans": [_plan_object(item) for item in resolved],
    }


def _plan_object(item: ResolvedPlan) -> dict[str, object]:
    train, rollout = _memory(item)
    sent = submission(item.plan, given_arguments(item))
    return {
        "digest": plan_digest(item.plan),
        "plan": encode(item.plan),
        "memory": {
            "train_rank": {**dataclasses.asdict(train), "total": train.total},
            "rollout_rank": {**dataclasses.asdict(rollout), "total": rollout.total},
        },
        "rollout_engine": dict(rollout_engine_arguments(item.plan)),
        "command": list(sent.command),
        "environment": dict(sent.environment),
    }


def _memory(item: ResolvedPlan) -> tuple[RankMemory, RankMemory]:
    return train_memory(item.plan), rollout_memory(item.plan, item.profile.profile.requirements.gpu_model)


def profile_line(resolved: ResolvedPlan) -> str:
    """Which profile, and why: the first line of every command that resolves one."""
    return f"profile {resolved.profile.profile.name} ({resolved.profile.file}): {resolved.profile.why}"


def given_arguments(item: ResolvedPlan) -> tuple[str, ...]:
    """Profile, workspace, and what flags or the environment gave: with these the launcher resolves the same plan."""
    parts = ["--profile", str(item.profile.file)]
    for value in item.values:
        outside = value.source in ("flag", "env")
        if value.name == "run_id" or value.value is None or not (outside or value.name == "workspace"):
            continue
        flag = BY_NAME[value.name].flag if value.name in BY_NAME else "--" + value.name.replace("_", "-")
        if value.value is not False:
            parts += [flag] if value.value is True else [f"{flag}={value.value}"]
    return tuple(parts)


def plan_text(resolved: Sequence[ResolvedPlan]) -> str:
    """The page that ``plan`` prints."""
    first = resolved[0]
    lines = [profile_line(first), ""]
    lines += ["options", *_table([_option_row(value) for value in first.values if value.name in BY_NAME]), ""]
    lines += ["paths", *_table([_path_row(value, first) for value in first.values if value.name in PATH_NAMES]), ""]
    for item in resolved:
        lines += [*_plan_lines(item), ""]
    return "\n".join(lines).rstrip() + "\n"


def _option_row(value: Value) -> tuple[str, str, str]:
    return BY_NAME[value.name].flag, _shown(value.value), _source(value)


def _path_row(value: Value, item: ResolvedPlan) -> tuple[str, str, str]:
    flag = "--" + value.name.replace("_", "-")
    if value.source in ("default", "derived") and value.name in unused_paths(item.plan):
        return flag, "not used by this run", _source(value)
    if value.value is None:
        return flag, f"not set ({flag} or RLK_REPRO_{value.name.upper()})", _source(value)
    text = str(value.value)
    if PLACEHOLDER in text:
        return flag, f"edit me: {flag} or RLK_REPRO_{value.name.upper()}", _source(value)
    if os.path.exists(text):
        return flag, text, _source(value)
    made = value.name in MADE or (value.name == "model_root" and wants_demo_model(item) is not None)
    absent = "run makes it" if made and item.plan.stack in HERE else f"missing, {flag}"
    return flag, f"{text} ({absent})", _source(value)


def _source(value: Value) -> str:
    return f"{value.source}: {value.origin}" if value.origin else value.source


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None or value == "" else f"{value}"


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  [{row[2]}]" for row in rows]


def _plan_lines(item: ResolvedPlan) -> list[str]:
    plan, shape = item.plan, item.plan.topology
    lines = [
        f"plan {plan.mode}",
        f"  run directory   {plan.run_dir}",
        f"  digest          {plan_digest(plan)}",
        f"  contract        {plan.contract_id} ({plan.contract_digest[:16]})",
        f"  engines         train {plan.engines.train}, rollout {plan.engines.rollout}",
        f"  training        TP {shape.train_tp} x CP {shape.train_cp} = {shape.train_tp * shape.train_cp} rank(s)",
        f"  rollout         {shape.rollout_engines} engine(s) of TP {shape.rollout_tp} x CP {shape.rollout_cp}",
    ]
    if plan.model is not None:
        model = plan.model
        lines.append(
            f"  model           {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} query and "
            f"{model.num_kv_heads} KV heads of {model.head_dim}, vocabulary {model.vocab_size} "
            f"(padded {model.padded_vocab_size})"
        )
    rollout = dict(plan.providers.rollout)
    lines += [
        f"  provider        {name:<14}train {provider:<8}rollout {rollout[name]}"
        for name, provider in plan.providers.train
    ]
    lines += [
        f"  {side:<14}  {_memory_line(memory)}"
        for side, memory in zip(("train rank", "rollout rank"), _memory(item), strict=True)
    ]
    arguments = ", ".join(f"{name} {value}" for name, value in rollout_engine_arguments(plan))
    sent = submission(plan, given_arguments(item))
    lines += [f"  rollout engine  {arguments}", f"  command         {shlex.join(sent.command)}"]
    lines += [f"  environment     {name}={value}" for name, value in sent.environment]
    return lines + [f"  note            {note}" for note in item.notes]


def _memory_line(memory: RankMemory) -> str:
    parts = dataclasses.asdict(memory)
    shown = ", ".join(f"{name.replace('_', ' ')} {size / 2**30:.2f}" for name, size in parts.items() if size)
    return f"{memory.total / 2**30:.2f} GiB expected ({shown})"
