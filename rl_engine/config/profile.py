"""The profile file (JSON, ``rlkernel.repro.profile.v1``): schema, lookup and messages that name the nearest key."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field, StringConstraints

from rl_engine.config.host import HostFacts
from rl_engine.config.options import BY_NAME, OPERATORS, OPTIONS, Scalar, nearest
from rl_engine.config.paths import PATH_NAMES, PER_MODE_KEYS, REPOSITORY, bundled
from rl_engine.numerics.contract import CONTRACT_VERSION
from rl_engine.records.errors import UserError

SCHEMA = "rlkernel.repro.profile.v1"
LOCAL_PROFILE = ".rlk-profile.json"
BUNDLED = {
    "cuda": "configs/integrations/orchestrators/vime/dense/qwen3-8b-tp4-cp2.json",
    "rocm": "configs/integrations/orchestrators/vime/rocm_attention/mi300x-qwen3-8b.json",
    "demo-gpu": "configs/demo/one-gpu.json",
    "demo-cpu": "configs/demo/cpu-smollm2.json",
}

REFERENCE = "bundled reference profile"

Text = Annotated[str, StringConstraints(min_length=1)]
Revision = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
MOST = 2**31 - 1  # no shape or count of a model or machine is larger
Count = Annotated[int, Field(ge=1, le=MOST)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class Requirements(_Strict):
    """What the profile was proven on; versions are compared by the parts given."""

    backend: Literal["cpu", "cuda", "rocm"] | None = None
    gpus: Annotated[int, Field(ge=0, le=MOST)] | None = None
    gpu_model: Text | None = None
    tensor_parallel: Count | None = None
    context_parallel: Count | None = None
    python: Text | None = None
    torch: Text | None = None
    vllm: Text | None = None
    ray: Text | None = None
    transformer_engine: Text | None = None


class SideProviders(_Strict):
    """Provider per operator on each side, where a mode departs from the backend's own table."""

    train: dict[str, Text] = Field(default_factory=dict)
    rollout: dict[str, Text] = Field(default_factory=dict)


class Mode(_Strict):
    """One arm of the experiment."""

    description: str = ""
    providers: SideProviders = Field(default_factory=SideProviders)


class Modes(_Strict):
    """Both arms."""

    native: Mode = Field(default_factory=Mode)
    consistency: Mode = Field(default_factory=Mode)


class Revisions(_Strict):
    """Pinned commit per mode."""

    native: Revision | None = None
    consistency: Revision | None = None


class Patch(_Strict):
    """A patch file, its hash, and the git tree that must stand after it; one without a record is never applied."""

    file: Text
    sha256: Sha256 | None = None
    tree: Revision | None = None


class Repository(_Strict):
    """A source checkout: where it comes from, what is pinned, which patches follow in which order."""

    url: Text | None = None
    revisions: Revisions = Field(default_factory=Revisions)
    recorded_base: Revision | None = None
    patches: list[Patch] = Field(default_factory=list)


class Repositories(_Strict):
    """The companion checkouts."""

    rl_kernel: Repository | None = None
    vime: Repository | None = None
    megatron: Repository | None = None
    vllm: Repository | None = None


class Model(_Strict):
    """Facts of the model, used by plan where the checkpoint is not on this machine."""

    name: Text
    demo: bool = False
    num_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    tied: bool = False
    padded_vocab_size: Count | None = None


class Profile(_Strict):
    """A whole profile file."""

    schema_version: Literal["rlkernel.repro.profile.v1"]
    name: Text
    description: str = ""
    requirements: Requirements = Field(default_factory=Requirements)
    modes: Modes = Field(default_factory=Modes)
    paths: dict[str, Text] = Field(default_factory=dict)
    repositories: Repositories = Field(default_factory=Repositories)
    defaults: dict[str, str | int | float | bool] = Field(default_factory=dict)
    runner_args: list[Annotated[list[Text], Field(min_length=1, max_length=2)]] = Field(default_factory=list)
    ray_address: Text | None = None
    stack: Literal["builtin", "megatron-vllm", "vime"] | None = None
    model: Model | None = None
    contract: Text | None = None


@dataclasses.dataclass(frozen=True)
class LoadedProfile:
    """A profile with its file and the reason it was chosen."""

    profile: Profile
    file: Path
    why: str


def choose_profile(
    flag: str | None,
    env: Mapping[str, str],
    cwd: Path,
    host: HostFacts,
    workspace: bool,
    backend: str | None = None,
) -> LoadedProfile:
    """The profile of a command: flag, RLK_REPRO_PROFILE, ``.rlk-profile.json``, then a bundled one.

    On a machine with a GPU the bundled demo is that of the ``backend`` asked for; of neither, the CPU's where the GPU
    would be refused.

    Raises:
        UserError: no such file, not JSON, or a profile that breaks the schema.
    """
    if flag:
        named = _named(flag)
        return LoadedProfile(read_profile(named), named.resolve(), "--profile")
    variable = env.get("RLK_REPRO_PROFILE")
    if variable:
        named = _named(variable)
        return LoadedProfile(read_profile(named), named.resolve(), "RLK_REPRO_PROFILE")
    for folder, why in ((cwd, "working directory"), (REPOSITORY, "repository")):
        local = folder / LOCAL_PROFILE
        if local.is_file():
            return LoadedProfile(read_profile(local), local, f"{LOCAL_PROFILE} in the {why}")
    if workspace and host.gpu_kind is not None:
        name, why = (
            host.gpu_kind,
            f"{REFERENCE}: a workspace is given and this machine has a {host.gpu_kind} device",
        )
    elif host.gpu_kind is None:
        name, why = "demo-cpu", "bundled demo profile: this machine has no GPU"
    elif backend == "cpu":
        name, why = "demo-cpu", "bundled demo profile: --backend cpu"
    elif backend is None and host.refused:
        asked = f"--backend {host.gpu_kind} asks for the GPU all the same"
        name, why = "demo-cpu", f"bundled demo profile of a CPU: {host.refused}; {asked}"
    else:
        name, why = "demo-gpu", "bundled demo profile: this machine has a GPU"
    file = bundled(BUNDLED[name])
    return LoadedProfile(read_profile(file), file, why)


def _named(text: str) -> Path:
    """The file that somebody named; ``configs/...`` names a bundled profile from any folder, in a wheel too."""
    file = Path(text)
    return bundled(text) if text in BUNDLED.values() and not os.path.lexists(file) else file


def read_profile(file: Path) -> Profile:
    """The checked profile in ``file``.

    Raises:
        UserError: unreadable, not JSON, an unknown key, a wrong type, or a default that its option refuses.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # an editor may have put a byte order mark first
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(
            f"profile {file} ({reason})", "a readable profile file", "check --profile and RLK_REPRO_PROFILE"
        ) from None
    try:
        body = json.loads(text, object_pairs_hook=_no_duplicates)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"profile {file} that is not JSON ({error})", "a JSON object", "see configs/ for examples"
        ) from None
    return check_profile(body, str(file))


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise UserError(f"key {twice[0]!r} twice in the profile", "every key once", f"remove one {twice[0]!r}")
    return dict(pairs)


def check_profile(body: object, where: str) -> Profile:
    """``body`` as a :class:`Profile`; ``where`` names it in messages."""
    if not isinstance(body, dict):
        raise UserError(f"profile {where} with a {type(body).__name__}", "a JSON object", "see configs/ for examples")
    if body.get("schema_version") != SCHEMA:
        raise UserError(
            f"schema_version {body.get('schema_version')!r} in {where}", SCHEMA, "copy a profile from configs/"
        )
    try:
        profile = Profile.model_validate(body)
    except pydantic.ValidationError as error:
        raise _explained(error, where) from None
    _check_keys(profile.paths, (*PATH_NAMES, *PER_MODE_KEYS), "paths", where)
    _check_keys(profile.defaults, tuple(BY_NAME), "defaults", where)
    for key, value in profile.defaults.items():
        BY_NAME[key].convert(value, f"defaults.{key} of {where}:")
    if profile.contract not in (None, CONTRACT_VERSION):
        raise UserError(
            f"contract {profile.contract!r} in {where}", CONTRACT_VERSION, "this version computes another contract"
        )
    for mode in (profile.modes.native, profile.modes.consistency):
        for table in (mode.providers.train, mode.providers.rollout):
            _check_keys(table, OPERATORS, "modes.*.providers", where)
    _check_stack(profile, where)
    _check_runner_args(profile, where)
    return profile


def _check_stack(profile: Profile, where: str) -> None:
    for key, top in (
        ("stack", profile.stack),
        ("ray_address", profile.ray_address),
        ("backend", profile.requirements.backend),
    ):
        inner = profile.defaults.get(key)
        if top is not None and inner is not None and top != inner:
            raise UserError(
                f"{key} {top!r} and defaults.{key} {inner!r} in {where}", "one of the two", f"remove defaults.{key}"
            )


def _check_keys(found: Mapping[str, object], known: tuple[str, ...], section: str, where: str) -> None:
    for key in found:
        if key not in known:
            raise UserError(
                f"unknown key {section}.{key} in {where}",
                "a known key",
                nearest(key, known, "known: " + ", ".join(known)),
            )


def _check_runner_args(profile: Profile, where: str) -> None:
    owners = {flag: option for option in OPTIONS for flag in option.flags}
    owners.update(RUNNER_SPELLINGS)
    for entry in profile.runner_args:
        flag = entry[0].split("=", 1)[0]
        if not flag.startswith("--"):
            raise UserError(
                f"runner_args entry {entry[0]!r} in {where}", "a flag that starts with --", 'write ["--flag", "value"]'
            )
        option = owners.get(flag)
        if option is not None:
            raise UserError(
                f"runner_args {flag} in {where}, which option {option.flag} also sets",
                "one place for the value",
                f"put it under defaults.{option.name} or pass {option.flag}",
            )


# Spellings that the external runner uses for what our options set.
RUNNER_SPELLINGS = {
    "--tensor-model-parallel-size": BY_NAME["tp_size"],
    "--context-parallel-size": BY_NAME["cp_size"],
    "--rollout-max-response-len": BY_NAME["max_response_len"],
    "--n-samples-per-prompt": BY_NAME["samples_per_prompt"],
    "--rollout-num-gpus-per-engine": BY_NAME["rollout_tp_size"],
    "--kl-loss-coef": BY_NAME["kl_coef"],
    "--disable-grpo-std-normalization": BY_NAME["grpo_std_normalization"],
}


def _explained(error: pydantic.ValidationError, where: str) -> UserError:
    first = error.errors()[0]
    location = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _known_at(first["loc"][:-1])
        return UserError(
            f"unknown key {location} in {where}",
            "a known key",
            nearest(str(first["loc"][-1]), known, "known: " + ", ".join(known)),
        )
    if first["type"] == "missing":
        return UserError(f"no key {location} in {where}", "it to be given", "copy a profile from configs/")
    shown = repr(first.get("input"))
    return UserError(f"{location} = {shown[:80]} in {where}", first["msg"].lower(), "correct the profile")


def _known_at(path: tuple[int | str, ...]) -> tuple[str, ...]:
    """Keys of the section at ``path``."""
    model: type[pydantic.BaseModel] = Profile
    for part in path:
        if isinstance(part, int):
            continue
        found = _models_in(model.model_fields[part].annotation) if part in model.model_fields else []
        if not found:
            return ()
        model = found[0]
    return tuple(model.model_fields)


def _models_in(annotation: object) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]


def profile_default(loaded: LoadedProfile, name: str) -> tuple[Scalar, str] | None:
    """The profile's value of option ``name`` with the key that holds it, or None."""
    profile = loaded.profile
    if name in profile.defaults:
        return profile.defaults[name], f"defaults.{name}"
    top: dict[str, Scalar | None] = {
        "stack": profile.stack,
        "backend": profile.requirements.backend,
        "ray_address": profile.ray_address,
        "tp_size": profile.requirements.tensor_parallel,
        "cp_size": profile.requirements.context_parallel,
    }
    value = top.get(name)
    if value is None:
        return None
    section = "requirements." if name in ("backend", "tp_size", "cp_size") else ""
    key = {"tp_size": "tensor_parallel", "cp_size": "context_parallel"}.get(name, name)
    return value, f"{section}{key}"
