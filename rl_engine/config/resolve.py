"""Flags, environment and profile to Plans: one value at a time, each with where it came from."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from rl_engine.config import topology as rules
from rl_engine.config.amounts import Batch, read_batch, read_budget
from rl_engine.config.engines import BUILTIN, STACKS, Engines
from rl_engine.config.layout import read_backend, read_engines, read_threads, read_topology
from rl_engine.config.options import OPERATORS, OPTIONS, native_override
from rl_engine.config.paths import PathResolver, Value
from rl_engine.config.plan import DEVICE_KINDS, EnginePlan, ModelFacts, Plan, ProviderPlan, SamplingPlan, Topology
from rl_engine.config.profile import LoadedProfile, choose_profile
from rl_engine.config.sections import (
    check_limits,
    read_data,
    read_loss,
    read_model,
    read_optimizer,
    read_paths,
    read_ray,
    read_sampling,
)
from rl_engine.config.values import Request, Values
from rl_engine.numerics.contract import Contract
from rl_engine.records.errors import UserError

PLAN_SCHEMA = "rlkernel.plan.v1"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
MAX_CAPTURE = 512  # largest batch size captured as a graph
KEPT_OURS = (
    "sample",
    "adamw",
    "grad_norm",
)  # same noise and optimizer in both arms: only the model's arithmetic differs
PRODUCTS = ("linear", "lm_head")  # on an NVIDIA GPU by the proven table


@dataclasses.dataclass(frozen=True)
class ResolvedPlan:
    """A Plan with the source of every value, in the order they are shown, and remarks for the reader."""

    plan: Plan
    values: tuple[Value, ...]
    notes: tuple[str, ...]
    profile: LoadedProfile


def resolve(request: Request) -> list[ResolvedPlan]:
    """One plan for ``native`` or ``consistency``, two (native first) for ``paired``.

    Raises:
        UserError: any value, combination or profile that cannot be run as asked.
    """
    workspace_given = bool(request.path_flags.get("workspace") or request.env.get("RLK_REPRO_WORKSPACE"))
    backend = request.flags.get("backend")
    asked = backend if isinstance(backend, str) else None
    loaded = choose_profile(request.profile, request.env, request.cwd, request.host, workspace_given, asked)
    ask = Values(request, loaded)
    mode = ask.text("mode")
    if mode != "paired":
        return [_resolve_arm(ask, mode, None)]
    _check_pairable(loaded)
    pair = _read_run_id(ask, "paired")
    return [_resolve_arm(ask, arm, pair) for arm in ("native", "consistency")]


def output_root(request: Request) -> Path:
    """Where runs of these paths and this profile are, for a run that is named by its id alone.

    Raises:
        UserError: an empty path, or a profile that cannot be read.
    """
    loaded = choose_profile(request.profile, request.env, request.cwd, request.host, False)
    flags, paths = request.path_flags, loaded.profile.paths
    resolver = PathResolver(flags, request.env, paths, loaded.file, request.cwd, "consistency", None, False)
    return Path(str(resolver.resolve()["output_root"].value))


def _check_pairable(loaded: LoadedProfile) -> None:
    for name in ("rl_kernel", "vime", "megatron", "vllm"):
        repository = getattr(loaded.profile.repositories, name)
        if repository is None:
            continue
        pins = repository.revisions
        if pins.native and pins.consistency and pins.native != pins.consistency:
            raise UserError(
                f"--mode paired with {name} pinned to {pins.native[:12]} and {pins.consistency[:12]}",
                "one revision for both modes",
                "run --mode native and --mode consistency one after the other",
            )


@dataclasses.dataclass(frozen=True)
class _Arm:
    """What of one arm is decided before its plan is put together."""

    mode: str
    pair: str | None
    run_id: str
    backend: str
    stack: str
    engines: Engines
    topology: Topology
    batch: Batch
    paths: Mapping[str, Value]
    model: ModelFacts
    sampling: SamplingPlan
    contract: Contract
    evidence: str


def _read_run_id(ask: Values, mode: str) -> str:
    """The run id, the pair's where ``mode`` is ``paired``."""
    stamp = ask.request.now.astimezone(datetime.UTC).strftime("%Y%m%dT%H%M%S%f") + "Z"
    shape = read_topology(ask)
    made = f"{mode}-tp{shape.train_tp}cp{shape.train_cp}-{stamp}"
    run_id = ask.text("run_id", (made, "<mode>-tp<T>cp<C>-<UTC time>"))
    if not RUN_ID.match(run_id):
        raise UserError(
            f"--run-id {run_id!r}",
            "one path component of letters, digits, '.', '_' and '-', starting with a letter or digit",
            "for example --run-id first-try",
        )
    return run_id


def _read_providers(ask: Values, mode: str) -> ProviderPlan:
    """Provider per operator and side."""
    backend, stack = read_backend(ask), ask.text("stack")
    ours = ("cpu" if ask.request.host.chain else "torch") if backend == "cpu" else "triton"
    table = {operator: ours for operator in OPERATORS}
    if backend == "cuda":
        table.update(dict.fromkeys(PRODUCTS, "cublaslt"))
    if mode == "native":
        kept = () if stack == "vime" else KEPT_OURS
        table = {operator: ours if operator in kept else "stock" for operator in OPERATORS}
    sides = {"train": dict(table), "rollout": dict(table)}
    arm = getattr(ask.loaded.profile.modes, mode)
    sides["train"].update(arm.providers.train)
    sides["rollout"].update(arm.providers.rollout)
    override = ask.text("native")
    if override and mode == "consistency":
        for side, operators in zip(("train", "rollout"), native_override(override), strict=True):
            sides[side].update(dict.fromkeys(operators, "stock"))
    elif override and ask.text("mode") == "native":
        raise UserError(
            "--native with --mode native",
            "--mode consistency or paired",
            "in native mode every operator is stock already",
        )
    return ProviderPlan(tuple(sorted(sides["train"].items())), tuple(sorted(sides["rollout"].items())))


def _read_engine(ask: Values, arm: _Arm) -> EnginePlan:
    """Memory, graphs and switches of a rollout engine, which captures passes on a GPU.

    Our own captures passes of the contract's own operators alone, on one rank.
    """
    shape, pd = arm.topology, ask.switch("pd")
    memory = ask.real("vllm_gpu_memory_utilization", rules.derived_memory_share(shape, pd))
    if pd:
        rules.check_pd(shape, arm.stack, memory)
    largest = min(math.ceil(arm.batch.total / shape.rollout_engines), MAX_CAPTURE)
    eager = arm.backend == "cpu"
    if arm.engines.rollout == BUILTIN:
        stock = "stock" in dict(_read_providers(ask, arm.mode).rollout).values()
        eager = eager or stock or shape.rollout_tp * shape.rollout_cp > 1
    return EnginePlan(
        memory,
        () if eager else tuple(range(1, largest + 1)),
        ask.switch("oversubscribe"),
        pd,
        ask.switch("native_deterministic"),
        tuple(tuple(entry) for entry in ask.loaded.profile.runner_args),
    )


def _read_contract(ask: Values, backend: str) -> Contract:
    """The contract of the kind of device; the fold's length is the only value a user has in it."""
    gemm = "chain256" if backend == "cpu" and not ask.request.host.chain else "chain"
    fold = ask.whole("fold_tokens", (Contract().fold_tokens, "the contract's"))
    return Contract(device_kind=DEVICE_KINDS[backend], gemm=gemm, fold_tokens=fold)


def _read_evidence(ask: Values, shape: Topology, backend: str, stack: str) -> tuple[str, str]:
    """What the run may prove, and why."""
    pd, oversubscribe, dirty = ask.switch("pd"), ask.switch("oversubscribe"), ask.switch("allow_dirty")
    return rules.evidence_of(shape, backend, stack, pd, oversubscribe, dirty, ask.request.host.dirty)


def _resolve_arm(ask: Values, mode: str, pair: str | None) -> ResolvedPlan:
    """The plan of one arm. Of several mistakes the first in this order is the one refused."""
    check_limits(ask)
    shape, batch = read_topology(ask), read_batch(ask)
    paths = read_paths(ask, mode)
    model, model_source = read_model(ask, cast("str | None", paths["model_root"].value))
    sampling = read_sampling(ask)
    rules.check_model(shape, model, sampling.top_k)
    backend, (stack, engines) = read_backend(ask), read_engines(ask)
    contract = _read_contract(ask, backend)
    run_id = f"{pair}-{mode}" if pair else _read_run_id(ask, mode)
    evidence, why = _read_evidence(ask, shape, backend, stack)
    arm = _Arm(mode, pair, run_id, backend, stack, engines, shape, batch, paths, model, sampling, contract, evidence)
    plan = _build_plan(ask, arm)
    notes = (f"evidence {evidence}: {why}", f"model facts from {model_source}")
    ordered = tuple(ask.values[option.name] for option in OPTIONS if option.name in ask.values)
    return ResolvedPlan(plan, (*ordered, *paths.values()), notes, ask.loaded)


def _build_plan(ask: Values, arm: _Arm) -> Plan:
    """The plan of a decided arm; the values that stand alone are asked for here, in the order of their refusals."""
    paths, fold = arm.paths, arm.contract.fold_tokens
    output_root = str(paths["output_root"].value)
    return Plan(
        schema_version=PLAN_SCHEMA,
        profile=ask.loaded.profile.name,
        mode=arm.mode,
        backend=arm.backend,
        stack=arm.stack,
        run_id=arm.run_id,
        run_dir=os.path.join(output_root, arm.run_id),
        model_root=str(paths["model_root"].value or ""),
        python=str(paths["python"].value or ""),
        rollouts=ask.whole("rollouts"),
        seed=ask.whole("seed"),
        global_batch_size=arm.batch.total,
        max_tokens_per_gpu=read_budget(ask, arm.topology.train_cp, fold, arm.sampling.max_response_len),
        fold_tokens=fold,
        threads=read_threads(ask, arm.topology),
        require_updates=ask.switch("require_updates"),
        checkpoint_every=ask.whole("checkpoint_every"),
        gradients=ask.text("gradients"),
        contract_id=arm.contract.id,
        contract_digest=arm.contract.digest(),
        evidence=arm.evidence,
        topology=arm.topology,
        sampling=arm.sampling,
        optimizer=read_optimizer(ask),
        loss=read_loss(ask),
        data=read_data(ask, paths, arm.batch),
        providers=_read_providers(ask, arm.mode),
        model=arm.model,
        engine=_read_engine(ask, arm),
        ray=read_ray(ask, arm.stack == "vime" and arm.backend == "cuda"),
        pair_id=arm.pair,
        output_root=output_root,
        paths=tuple(sorted((name, str(value.value)) for name, value in paths.items() if value.value is not None)),
        allow_dirty=ask.switch("allow_dirty"),
        require_control=ask.switch("require_control"),
        train_engine="" if arm.stack in STACKS else arm.engines.train,
        rollout_engine="" if arm.stack in STACKS else arm.engines.rollout,
    )
