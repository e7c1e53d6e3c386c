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
from rl_engine.config.engines import BUILTIN, SIDES, STACKS, Engines, find_engine, stack_of
from rl_engine.config.model_facts import pad_vocab, read_model_facts
from rl_engine.config.options import (
    OPERATORS,
    OPTIONS,
    native_override,
    stop_strings,
)
from rl_engine.config.paths import PathResolver, Value
from rl_engine.config.plan import (
    DEVICE_KINDS,
    DataPlan,
    EnginePlan,
    LossPlan,
    ModelFacts,
    OptimizerPlan,
    Plan,
    ProviderPlan,
    RayPlan,
    SamplingPlan,
    Topology,
)
from rl_engine.config.profile import LoadedProfile, choose_profile, profile_default
from rl_engine.config.values import Request, Values
from rl_engine.numerics.contract import Contract
from rl_engine.records.errors import UserError

PLAN_SCHEMA = "rlkernel.plan.v1"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*\Z")
MAX_CAPTURE = 512  # largest batch size captured as a graph
PROMPT_ROOM = 512  # tokens of a prompt that a derived micro-batch budget leaves room for
DEFAULT_RAY_ADDRESS = "http://127.0.0.1:8265"
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
    resolver = _Resolver(request, loaded)
    mode = str(resolver.get("mode").value)
    if mode != "paired":
        return [resolver.plan(mode, None)]
    _check_pairable(loaded)
    pair = resolver.run_id("paired")
    return [resolver.plan(arm, pair) for arm in ("native", "consistency")]


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


def _threads(cores: int, shape: Topology) -> int:
    """One thread count for every process: the cores shared by the ranks of the larger side, which run together."""
    train, rollout = shape.train_tp * shape.train_cp, shape.rollout_tp * shape.rollout_cp * shape.rollout_engines
    return max(1, cores // max(train, rollout))


class _Resolver(Values):
    """The plan of one request, group by group; each group asks for its values once."""

    def __init__(self, request: Request, loaded: LoadedProfile) -> None:
        super().__init__(request, loaded)
        self._run_id: str | None = None

    def run_id(self, mode: str) -> str:
        """The run id (the pair's in ``paired``), decided once."""
        if self._run_id is None:
            stamp = self.request.now.astimezone(datetime.UTC).strftime("%Y%m%dT%H%M%S%f") + "Z"
            shape = self.shape()
            self._run_id = self.text(
                "run_id", (f"{mode}-tp{shape.train_tp}cp{shape.train_cp}-{stamp}", "<mode>-tp<T>cp<C>-<UTC time>")
            )
            if not RUN_ID.match(self._run_id):
                raise UserError(
                    f"--run-id {self._run_id!r}",
                    "one path component of letters, digits, '.', '_' and '-', starting with a letter or digit",
                    "for example --run-id first-try",
                )
        return self._run_id

    def backend(self) -> str:
        kind = self.request.host.gpu_kind or "cpu"
        return self.text("backend", (kind, "the device of this machine"))

    def engines(self) -> tuple[str, Engines]:
        """The stack, and the engine of each side: a flag or a profile names one, otherwise the stack has it."""
        asked = self.text("stack")
        pair = STACKS[asked]
        train, rollout = (
            self.text(name, (own, f"of stack {asked}"))
            for name, own in (("train_engine", pair.train), ("rollout_engine", pair.rollout))
        )
        chosen = Engines(train, rollout)
        if chosen == pair:
            return asked, pair
        if asked == "vime":
            found = f"--stack vime with engines {train} and {rollout}"
            raise UserError(found, "its own engines", "leave --stack out: any pair may run")
        for side in SIDES:
            if chosen.of(side) != pair.of(side):
                find_engine(side, chosen.of(side), self.values[f"{side}_engine"].origin)
        return stack_of(chosen), chosen

    def devices(self) -> rules.Devices:
        gpus = self.loaded.profile.requirements.gpus or 0
        backend = self.backend()
        return rules.Devices(
            gpus=0 if backend == "cpu" else max(gpus, 1),
            fixed=self.text("stack") == "vime",
            oversubscribe=self.switch("oversubscribe"),
        )

    def shape(self) -> Topology:
        """Training and rollout topology."""
        tp = self.whole("tp_size")
        devices = self.devices()
        if "cp_size" not in self.values:
            explicit = "cp_size" in self.request.flags
            keeps = self.given("cp_size") is not None and "tp_size" not in self.request.flags
            if explicit or keeps:
                self.get("cp_size")
            else:
                profile_tp, profile_cp = (
                    profile_default(self.loaded, "tp_size"),
                    profile_default(self.loaded, "cp_size"),
                )
                ranks = cast(int, profile_tp[0] if profile_tp else 1) * cast(int, profile_cp[0] if profile_cp else 1)
                cp = rules.derive_cp(tp, max(ranks, devices.gpus), devices)
                self.values["cp_size"] = Value("cp_size", cp, "derived", "training ranks / TP")
        cp, rollout = self.whole("cp_size"), (self.whole("rollout_tp_size"), self.whole("rollout_cp_size"))
        if devices.gpus and not devices.fixed:  # as many GPUs as the larger side asks for, where the machine has them
            asked = max(tp * cp, math.prod(rollout))
            devices = dataclasses.replace(devices, gpus=max(devices.gpus, min(asked, self.request.host.gpus)))
        return rules.build_topology(tp, cp, *rollout, devices)

    def batch(self) -> tuple[int, int, int]:
        """Prompts, samples per prompt and their product; a flag on a factor discards the profile's product."""
        prompts, samples = self.whole("rollout_batch_size"), self.whole("samples_per_prompt")
        product = prompts * samples
        factor_flag = bool({"rollout_batch_size", "samples_per_prompt"} & set(self.request.flags))
        if factor_flag and "global_batch_size" not in self.request.flags:
            self.values["global_batch_size"] = Value("global_batch_size", product, "derived", "prompts x samples")
        total = self.whole("global_batch_size", (product, "prompts x samples"))
        if total != product:
            raise UserError(
                f"--global-batch-size {total} with {prompts} prompts x {samples} samples = {product}",
                "their product: one update per rollout",
                f"leave --global-batch-size out, or set it to {product}",
            )
        if product > 2**20:
            raise UserError(
                f"{prompts} prompts x {samples} samples = {product}",
                "at most 1048576 samples per update",
                "lower one of them",
            )
        return prompts, samples, total

    def budget(self, shape: Topology, fold: int, response: int) -> int:
        """Tokens of a micro-batch per rank. Our trainer cuts neither a fold unit nor a sample, so both must fit.

        A flag on the response length discards a profile's budget that the response would not fit.
        """
        cp = shape.train_cp
        if self.text("stack") == "vime":
            return self.whole("max_tokens_per_gpu", (max(1, 1024 // cp), "1024 // CP"))
        longest = max(fold, response + PROMPT_ROOM)
        derived = -(-max(1024, longest) // cp)
        given = self.given("max_tokens_per_gpu")
        flagged = bool({"max_response_len", "fold_tokens"} & set(self.request.flags))
        if given is not None and given.source == "profile" and flagged and cast(int, given.value) * cp < longest:
            rule = "longest fold unit or sample / CP"
            self.values["max_tokens_per_gpu"] = Value("max_tokens_per_gpu", derived, "derived", rule)
        tokens = self.whole("max_tokens_per_gpu", (derived, "longest fold unit or sample / CP"))
        for flag, value, size in (("--fold-tokens", fold, fold), ("--max-response-len", response, response + 1)):
            if size > tokens * cp:
                raise UserError(
                    f"{flag} {value} with a budget of {tokens} x CP {cp} tokens",
                    "a micro-batch that holds it whole",
                    f"--max-tokens-per-gpu {derived}",
                )
        return tokens

    def providers(self, mode: str) -> ProviderPlan:
        """Provider per operator and side."""
        backend, stack = self.backend(), self.text("stack")
        ours = ("cpu" if self.request.host.chain else "torch") if backend == "cpu" else "triton"
        table = {operator: ours for operator in OPERATORS}
        if backend == "cuda":
            table.update(dict.fromkeys(PRODUCTS, "cublaslt"))
        if mode == "native":
            kept = () if stack == "vime" else KEPT_OURS
            table = {operator: ours if operator in kept else "stock" for operator in OPERATORS}
        sides = {"train": dict(table), "rollout": dict(table)}
        arm = getattr(self.loaded.profile.modes, mode)
        sides["train"].update(arm.providers.train)
        sides["rollout"].update(arm.providers.rollout)
        override = self.text("native")
        if override and mode == "consistency":
            for side, operators in zip(("train", "rollout"), native_override(override), strict=True):
                sides[side].update(dict.fromkeys(operators, "stock"))
        elif override and self.text("mode") == "native":
            raise UserError(
                "--native with --mode native",
                "--mode consistency or paired",
                "in native mode every operator is stock already",
            )
        return ProviderPlan(tuple(sorted(sides["train"].items())), tuple(sorted(sides["rollout"].items())))

    def model(self, model_root: str | None) -> tuple[ModelFacts, str]:
        """Facts from ``config.json`` where it is on disk, else from the profile; with the source in words.

        Raises:
            UserError: a name of the Hugging Face hub instead of a folder, or a model that the engines do not compute.
        """
        named = self.request.path_flags.get("model_root") or self.request.env.get("RLK_REPRO_MODEL_ROOT") or ""
        if HUB_ID.match(named) and model_root and not os.path.lexists(model_root):
            raise UserError(
                f"no folder {model_root}: --model-root takes a folder, and {named} looks like a Hugging Face id",
                "a local checkpoint",
                f"hf download {named} --local-dir {named.rpartition('/')[2]}, then --model-root that folder",
            )
        if model_root and os.path.isfile(os.path.join(model_root, "config.json")):
            return read_model_facts(Path(model_root)), "config.json"
        facts = self.loaded.profile.model
        if facts is None:
            raise UserError(
                f"model root {model_root or '(none)'} without config.json and a profile without model facts",
                "one of the two",
                "add --model-root DIR of a Hugging Face checkpoint",
            )
        padded = facts.padded_vocab_size or pad_vocab(facts.vocab_size)
        body = facts.model_dump(exclude={"name", "demo", "padded_vocab_size"})
        return ModelFacts(padded_vocab_size=padded, **body), "profile"

    def ray(self, mode_needs_address: bool) -> RayPlan:
        address: str | None = None
        if mode_needs_address:
            address = self.text("ray_address", (DEFAULT_RAY_ADDRESS, "Ray's own default"))
        else:
            self.values["ray_address"] = Value("ray_address", None, "derived", "our own Ray head on loopback")
        return RayPlan(address, self.whole("ray_port"), self.whole("ray_dashboard_port"))

    def paths(self, mode: str) -> dict[str, Value]:
        facts = self.loaded.profile.model
        resolver = PathResolver(
            self.request.path_flags,
            self.request.env,
            self.loaded.profile.paths,
            self.loaded.file,
            self.request.cwd,
            mode,
            facts.name if facts is not None and facts.demo else None,
            self.text("stack") == "vime",
        )
        return resolver.resolve()

    def limits(self) -> None:
        rules.check_limits(
            rules.Limits(
                self.request.verb,
                self.backend(),
                self.text("stack"),
                self.whole("rollout_top_k"),
                self.text("rollout_stop"),
                self.switch("pd"),
                self.switch("allow_dirty"),
                "ray_address" in self.request.flags,
                self.request.detach,
            )
        )

    def data(self, paths: Mapping[str, Value], prompts: int, samples: int) -> DataPlan:
        prompt_data = paths["prompt_data"]
        if prompt_data.source in ("flag", "env"):
            asked = self.request.flags.get("data_source")
            if asked not in (None, "jsonl"):
                raise UserError(
                    f"--data-source {asked} with {prompt_data.origin}", "one of the two", "leave one of them out"
                )
            self.values["data_source"] = Value("data_source", "jsonl", "derived", f"{prompt_data.origin} is given")
        source = self.text("data_source")
        path = str(prompt_data.value) if source == "jsonl" else None
        return DataPlan(source, path, prompts, samples, self.whole("seed"))

    def sampling(self) -> SamplingPlan:
        return SamplingPlan(
            self.real("rollout_temperature"),
            self.real("rollout_top_p"),
            self.whole("rollout_top_k"),
            self.whole("max_response_len"),
            self.whole("rollout_seed"),
            stop_strings(self.text("rollout_stop")),
        )

    def engine(self, mode: str, shape: Topology, samples: int) -> EnginePlan:
        pd = self.switch("pd")
        memory = self.real("vllm_gpu_memory_utilization", rules.derived_memory_share(shape, pd))
        if pd:
            rules.check_pd(shape, self.text("stack"), memory)
        largest = min(math.ceil(samples / shape.rollout_engines), MAX_CAPTURE)
        eager = self.backend() == "cpu"
        if (
            self.engines()[1].rollout == BUILTIN
        ):  # which captures passes of the contract's own operators on one rank alone
            stock = "stock" in dict(self.providers(mode).rollout).values()
            eager = eager or stock or shape.rollout_tp * shape.rollout_cp > 1
        return EnginePlan(
            memory,
            () if eager else tuple(range(1, largest + 1)),
            self.switch("oversubscribe"),
            pd,
            self.switch("native_deterministic"),
            tuple(tuple(entry) for entry in self.loaded.profile.runner_args),
        )

    # -- the whole

    def plan(self, mode: str, pair: str | None) -> ResolvedPlan:
        """The plan of one arm."""
        self.limits()
        shape = self.shape()
        prompts, samples, total = self.batch()
        paths = self.paths(mode)
        facts, facts_source = self.model(cast("str | None", paths["model_root"].value))
        sampling = self.sampling()
        rules.check_model(shape, facts, sampling.top_k)
        backend, (stack, engines) = self.backend(), self.engines()
        kind = DEVICE_KINDS[backend]
        gemm = "chain256" if backend == "cpu" and not self.request.host.chain else "chain"
        fold = self.whole("fold_tokens", (Contract().fold_tokens, "the contract's"))
        contract = Contract(device_kind=kind, gemm=gemm, fold_tokens=fold)
        run_id = f"{pair}-{mode}" if pair else self.run_id(mode)
        output_root = str(paths["output_root"].value)
        evidence, why = rules.evidence_of(
            shape,
            backend,
            stack,
            self.switch("pd"),
            self.switch("oversubscribe"),
            self.switch("allow_dirty"),
            self.request.host.dirty,
        )
        plan = Plan(
            schema_version=PLAN_SCHEMA,
            profile=self.loaded.profile.name,
            mode=mode,
            backend=backend,
            stack=stack,
            run_id=run_id,
            run_dir=os.path.join(output_root, run_id),
            model_root=str(paths["model_root"].value or ""),
            python=str(paths["python"].value or ""),
            rollouts=self.whole("rollouts"),
            seed=self.whole("seed"),
            global_batch_size=total,
            max_tokens_per_gpu=self.budget(shape, fold, sampling.max_response_len),
            fold_tokens=fold,
            threads=self.whole("threads", (_threads(self.request.host.cores, shape), "cores / ranks of a side")),
            require_updates=self.switch("require_updates"),
            checkpoint_every=self.whole("checkpoint_every"),
            gradients=self.text("gradients"),
            contract_id=contract.id,
            contract_digest=contract.digest(),
            evidence=evidence,
            topology=shape,
            sampling=sampling,
            optimizer=OptimizerPlan(self.real("lr"), self.real("weight_decay"), 0.9, 0.98, 1e-8, 1.0),
            loss=LossPlan(self.real("kl_coef"), self.text("grpo_std_normalization") == "enabled", 1e-6, 0.2, 0.2),
            data=self.data(paths, prompts, samples),
            providers=self.providers(mode),
            model=facts,
            engine=self.engine(mode, shape, total),
            ray=self.ray(stack == "vime" and backend == "cuda"),
            pair_id=pair,
            output_root=output_root,
            paths=tuple(sorted((name, str(value.value)) for name, value in paths.items() if value.value is not None)),
            allow_dirty=self.switch("allow_dirty"),
            require_control=self.switch("require_control"),
            train_engine="" if stack in STACKS else engines.train,
            rollout_engine="" if stack in STACKS else engines.rollout,
        )
        notes = (f"evidence {evidence}: {why}", f"model facts from {facts_source}")
        ordered = tuple(self.values[option.name] for option in OPTIONS if option.name in self.values)
        return ResolvedPlan(plan, (*ordered, *paths.values()), notes, self.loaded)
