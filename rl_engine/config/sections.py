"""Sections of a plan that a few values each decide, and the tables of limits and paths those values are held to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rl_engine.config import topology as rules
from rl_engine.config.amounts import Batch
from rl_engine.config.layout import read_backend
from rl_engine.config.model_facts import pad_vocab, read_model_facts
from rl_engine.config.options import stop_strings
from rl_engine.config.paths import PathResolver, Value
from rl_engine.config.plan import DataPlan, LossPlan, ModelFacts, OptimizerPlan, RayPlan, SamplingPlan
from rl_engine.config.values import Values
from rl_engine.records.errors import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*\Z")
DEFAULT_RAY_ADDRESS = "http://127.0.0.1:8265"


def check_limits(ask: Values) -> None:
    """Refuses what the backend or the stack cannot honour."""
    rules.check_limits(
        rules.Limits(
            ask.request.verb,
            read_backend(ask),
            ask.text("stack"),
            ask.whole("rollout_top_k"),
            ask.text("rollout_stop"),
            ask.switch("pd"),
            ask.switch("allow_dirty"),
            "ray_address" in ask.request.flags,
            ask.request.detach,
        )
    )


def read_paths(ask: Values, mode: str) -> dict[str, Value]:
    """Every path of an arm by name."""
    facts = ask.loaded.profile.model
    resolver = PathResolver(
        ask.request.path_flags,
        ask.request.env,
        ask.loaded.profile.paths,
        ask.loaded.file,
        ask.request.cwd,
        mode,
        facts.name if facts is not None and facts.demo else None,
        ask.text("stack") == "vime",
    )
    return resolver.resolve()


def read_model(ask: Values, model_root: str | None) -> tuple[ModelFacts, str]:
    """Facts from ``config.json`` where it is on disk, else from the profile; with the source in words.

    Raises:
        UserError: a name of the Hugging Face hub instead of a folder, or a model that the engines do not compute.
    """
    named = ask.request.path_flags.get("model_root") or ask.request.env.get("RLK_REPRO_MODEL_ROOT") or ""
    if HUB_ID.match(named) and model_root and not os.path.lexists(model_root):
        raise UserError(
            f"no folder {model_root}: --model-root takes a folder, and {named} looks like a Hugging Face id",
            "a local checkpoint",
            f"hf download {named} --local-dir {named.rpartition('/')[2]}, then --model-root that folder",
        )
    if model_root and os.path.isfile(os.path.join(model_root, "config.json")):
        return read_model_facts(Path(model_root)), "config.json"
    facts = ask.loaded.profile.model
    if facts is None:
        raise UserError(
            f"model root {model_root or '(none)'} without config.json and a profile without model facts",
            "one of the two",
            "add --model-root DIR of a Hugging Face checkpoint",
        )
    padded = facts.padded_vocab_size or pad_vocab(facts.vocab_size)
    body = facts.model_dump(exclude={"name", "demo", "padded_vocab_size"})
    return ModelFacts(padded_vocab_size=padded, **body), "profile"


def read_data(ask: Values, paths: Mapping[str, Value], batch: Batch) -> DataPlan:
    """Where prompts come from; a file that a flag or the environment names decides it."""
    prompt_data = paths["prompt_data"]
    if prompt_data.source in ("flag", "env"):
        asked = ask.request.flags.get("data_source")
        if asked not in (None, "jsonl"):
            raise UserError(
                f"--data-source {asked} with {prompt_data.origin}", "one of the two", "leave one of them out"
            )
        ask.derive("data_source", "jsonl", f"{prompt_data.origin} is given")
    source = ask.text("data_source")
    path = str(prompt_data.value) if source == "jsonl" else None
    return DataPlan(source, path, batch.prompts, batch.samples, ask.whole("seed"))


def read_sampling(ask: Values) -> SamplingPlan:
    """How a rollout draws tokens."""
    return SamplingPlan(
        ask.real("rollout_temperature"),
        ask.real("rollout_top_p"),
        ask.whole("rollout_top_k"),
        ask.whole("max_response_len"),
        ask.whole("rollout_seed"),
        stop_strings(ask.text("rollout_stop")),
    )


def read_optimizer(ask: Values) -> OptimizerPlan:
    """AdamW with the betas, epsilon and clipping that every run has."""
    return OptimizerPlan(ask.real("lr"), ask.real("weight_decay"), 0.9, 0.98, 1e-8, 1.0)


def read_loss(ask: Values) -> LossPlan:
    """GRPO with the epsilon and clipping that every run has."""
    return LossPlan(ask.real("kl_coef"), ask.text("grpo_std_normalization") == "enabled", 1e-6, 0.2, 0.2)


def read_ray(ask: Values, submits: bool) -> RayPlan:
    """Ray's ports, and its address where the run ``submits`` to a cluster that others own."""
    address: str | None = None
    if submits:
        address = ask.text("ray_address", (DEFAULT_RAY_ADDRESS, "Ray's own default"))
    else:
        ask.derive("ray_address", None, "our own Ray head on loopback")
    return RayPlan(address, ask.whole("ray_port"), ask.whole("ray_dashboard_port"))
