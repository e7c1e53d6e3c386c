"""Where a run stands: its kind of device, the engine of each side, and the ranks of training and rollout."""

from __future__ import annotations

import dataclasses
import math
from typing import cast

from rl_engine.config import topology as rules
from rl_engine.config.engines import SIDES, STACKS, Engines, find_engine, stack_of
from rl_engine.config.plan import Topology
from rl_engine.config.profile import profile_default
from rl_engine.config.values import Values
from rl_engine.records.errors import UserError


def read_backend(ask: Values) -> str:
    """The kind of device, this machine's own where nothing names one."""
    kind = ask.request.host.gpu_kind or "cpu"
    return ask.text("backend", (kind, "the device of this machine"))


def read_engines(ask: Values) -> tuple[str, Engines]:
    """The stack, and the engine of each side: a flag or a profile names one, otherwise the stack has it."""
    asked = ask.text("stack")
    pair = STACKS[asked]
    train, rollout = (
        ask.text(name, (own, f"of stack {asked}"))
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
            find_engine(side, chosen.of(side), ask.values[f"{side}_engine"].origin)
    return stack_of(chosen), chosen


def _devices(ask: Values) -> rules.Devices:
    """What the profile lets a run take, before anybody asked for more."""
    gpus = ask.loaded.profile.requirements.gpus or 0
    backend = read_backend(ask)
    return rules.Devices(
        gpus=0 if backend == "cpu" else max(gpus, 1),
        fixed=ask.text("stack") == "vime",
        oversubscribe=ask.switch("oversubscribe"),
    )


def _decide_cp(ask: Values, tp: int, devices: rules.Devices) -> None:
    """Context parallel ranks of training: a flag, or what the profile says beside its own TP; otherwise they follow."""
    explicit = "cp_size" in ask.request.flags
    keeps = ask.given("cp_size") is not None and "tp_size" not in ask.request.flags
    if explicit or keeps:
        ask.get("cp_size")
        return
    profile_tp, profile_cp = (profile_default(ask.loaded, name) for name in ("tp_size", "cp_size"))
    ranks = cast(int, profile_tp[0] if profile_tp else 1) * cast(int, profile_cp[0] if profile_cp else 1)
    ask.derive("cp_size", rules.derive_cp(tp, max(ranks, devices.gpus), devices), "training ranks / TP")


def read_topology(ask: Values) -> Topology:
    """Training and rollout topology."""
    tp = ask.whole("tp_size")
    devices = _devices(ask)
    if "cp_size" not in ask.values:
        _decide_cp(ask, tp, devices)
    cp, rollout = ask.whole("cp_size"), (ask.whole("rollout_tp_size"), ask.whole("rollout_cp_size"))
    if devices.gpus and not devices.fixed:  # as many GPUs as the larger side asks for, where the machine has them
        asked = max(tp * cp, math.prod(rollout))
        devices = dataclasses.replace(devices, gpus=max(devices.gpus, min(asked, ask.request.host.gpus)))
    return rules.build_topology(tp, cp, *rollout, devices)


def read_threads(ask: Values, shape: Topology) -> int:
    """One thread count for every process: the cores shared by the ranks of the larger side, which run together."""
    train, rollout = shape.train_tp * shape.train_cp, shape.rollout_tp * shape.rollout_cp * shape.rollout_engines
    return ask.whole("threads", (max(1, ask.request.host.cores // max(train, rollout)), "cores / ranks of a side"))
