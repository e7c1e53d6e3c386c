"""Topology, backend and stack rules. Each rule stands here once; every refusal says what would be right."""

from __future__ import annotations

import dataclasses

from rl_engine.config.engines import CUSTOM, HERE
from rl_engine.config.plan import ModelFacts, Topology
from rl_engine.records.errors import UserError

# Training TP, CP -> rollout TP, CP that the reference matrix covers.
GUIDE_MATRIX: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = (
    ((1, 8), (1, 8)),
    ((1, 8), (4, 1)),
    ((2, 4), (4, 1)),
    ((8, 1), (4, 1)),
    *(((4, 2), shape) for shape in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))),
)


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where ranks go: ``gpus`` devices (0: CPU, any number of ranks); ``fixed`` when training uses all of them."""

    gpus: int
    fixed: bool
    oversubscribe: bool


def derive_cp(tp: int, profile_ranks: int, devices: Devices) -> int:
    """Context parallel ranks that follow from ``tp``.

    Raises:
        UserError: TP does not divide the ranks of a machine that must be filled.
    """
    ranks = devices.gpus if devices.gpus and not devices.oversubscribe else profile_ranks
    if ranks % tp == 0:
        return ranks // tp
    if devices.fixed:
        raise UserError(f"--tp {tp}", f"a divisor of the {ranks} training ranks", f"--tp {_divisors(ranks)}")
    return 1


def build_topology(tp: int, cp: int, rollout_tp: int, rollout_cp: int, devices: Devices) -> Topology:
    """The checked topology with its engine count.

    Raises:
        UserError: ranks that do not fit or do not fill the devices, or an engine size that does not divide them.
    """
    ranks, size = tp * cp, rollout_tp * rollout_cp
    bound = devices.gpus and not devices.oversubscribe
    if devices.fixed and bound and ranks != devices.gpus:
        raise UserError(
            f"training TP {tp} x CP {cp} = {ranks} ranks",
            f"{devices.gpus} ranks",
            "leave --cp out: it follows from --tp",
        )
    if bound and ranks > devices.gpus:
        raise UserError(
            f"training TP {tp} x CP {cp} = {ranks} ranks", f"at most {devices.gpus}, one per GPU", "add --oversubscribe"
        )
    if bound:
        if devices.gpus % size:
            raise UserError(
                f"rollout TP {rollout_tp} x CP {rollout_cp} = {size} ranks per engine",
                f"a divisor of the {devices.gpus} rollout GPUs",
                f"--rollout-tp {_divisors(devices.gpus)} with --rollout-cp 1",
            )
        engines = devices.gpus // size
    else:
        engines = ranks // size if ranks % size == 0 else 1
    return Topology(tp, cp, rollout_tp, rollout_cp, engines)


def _divisors(number: int) -> str:
    small = [str(d) for d in range(1, min(number, 64) + 1) if number % d == 0]
    return ", ".join(small[:-1]) + (" or " if len(small) > 1 else "") + small[-1]


def check_model(topology: Topology, model: ModelFacts, top_k: int) -> None:
    """Heads must divide among TP ranks, and top-k cannot exceed the vocabulary.

    Raises:
        UserError: as said.
    """
    for flag, tp in (("--tp", topology.train_tp), ("--rollout-tp", topology.rollout_tp)):
        if model.num_heads % tp or model.num_kv_heads % tp:
            fits = [
                str(n)
                for n in range(1, model.num_kv_heads + 1)
                if model.num_kv_heads % n == 0 and model.num_heads % n == 0
            ]
            raise UserError(
                f"{flag} {tp} with {model.num_heads} query and {model.num_kv_heads} KV heads",
                "a divisor of both",
                f"{flag} {' or '.join(fits)}",
            )
    if top_k > model.vocab_size:
        raise UserError(
            f"--top-k {top_k}", f"-1 or 1 to {model.vocab_size} (the vocabulary)", "-1 turns the filter off"
        )


@dataclasses.dataclass(frozen=True)
class Limits:
    """What of a command line the backend limits look at."""

    verb: str
    backend: str
    stack: str
    top_k: int
    stop: str
    pd: bool
    allow_dirty: bool
    ray_address_given: bool
    detach: bool


def check_limits(ask: Limits) -> None:
    """The backend limits table.

    Raises:
        UserError: the backend or stack cannot honour the verb or flag.
    """
    if ask.stack == "vime" and ask.backend == "cpu":
        raise UserError("--stack vime on backend cpu", "backend cuda or rocm", "use --stack builtin on a CPU")
    if ask.stack == "vime" and ask.stop:
        raise UserError("--rollout-stop on stack vime", "its own settings", "leave it out, or use --stack builtin")
    if ask.backend == "cpu" and ask.ray_address_given:
        raise UserError("--ray-address on backend cpu", "a local run with its own Ray head", "leave --ray-address out")
    if ask.backend == "rocm":
        refused = (
            ("verify", ask.verb == "verify", "it is not proven there"),
            ("--detach", ask.detach, "a run there owns its Ray cluster and waits for it"),
            ("--ray-address", ask.ray_address_given, "a run there owns its Ray cluster"),
            ("--allow-dirty", ask.allow_dirty, "it is not proven there"),
            ("--pd", ask.pd, "it is not proven there"),
        )
        for what, asked, why in refused:
            if asked:
                raise UserError(
                    f"{what} on backend rocm", f"a command without it ({why})", "see the limits table in the reference"
                )
        if ask.stack == "vime" and ask.top_k != -1:
            raise UserError(
                f"--top-k {ask.top_k} on rocm with stack vime", "-1", "leave --top-k out, or use --stack builtin"
            )
    if ask.ray_address_given and ask.stack in HERE:
        raise UserError(
            f"--ray-address with stack {ask.stack}", "our own Ray head", "leave --ray-address out, or use --stack vime"
        )


def check_pd(topology: Topology, stack: str, memory: float) -> None:
    """``--pd`` on vime: training TP4/CP2 and one prefill and one decode engine of TP4 at a memory share of 0.25.

    Raises:
        UserError: another topology or share.
    """
    if stack != "vime":
        return
    shape = (topology.train_tp, topology.train_cp, topology.rollout_tp, topology.rollout_cp)
    if shape != (4, 2, 4, 1):
        raise UserError(
            f"--pd with training TP{shape[0]}/CP{shape[1]} and rollout TP{shape[2]}/CP{shape[3]}",
            "training TP4/CP2 and rollout TP4/CP1",
            "--tp 4 --cp 2 --rollout-tp 4 --rollout-cp 1",
        )
    if memory != 0.25:
        raise UserError(
            f"--vllm-gpu-memory-utilization {memory:g} with --pd", "0.25", "leave it out: 0.25 follows from --pd"
        )


def derived_memory_share(topology: Topology, pd: bool) -> tuple[float, str]:
    """Share of device memory of a rollout engine, with the rule that gave it."""
    if pd:
        return 0.25, "0.25 with --pd"
    if topology.train_tp == 1 and topology.rollout_tp != 1:
        return 0.2, "0.2: training TP is 1 and rollout TP is not"
    return 0.4, "0.4"


def evidence_of(
    topology: Topology, backend: str, stack: str, pd: bool, oversubscribe: bool, allow_dirty: bool, dirty: str
) -> tuple[str, str]:
    """``formal``, ``experimental`` or ``development`` with the reason.

    Local runs of sources that are no clean checkout (``dirty`` says why) are development; other stacks refuse those
    unless ``allow_dirty``.
    """
    if allow_dirty:
        return "development", "--allow-dirty"
    if dirty and stack in HERE:
        return "development", dirty
    if stack == CUSTOM:
        return "experimental", "a pair of engines that no stack has"
    if pd or oversubscribe:
        return "experimental", "--pd" if pd else "--oversubscribe"
    if backend == "rocm" and topology.rollout_cp > 1:
        return "experimental", "rollout CP above 1 is unvalidated on rocm"
    shape = ((topology.train_tp, topology.train_cp), (topology.rollout_tp, topology.rollout_cp))
    if stack == "vime" and shape not in GUIDE_MATRIX:
        return "experimental", "a topology outside the tested matrix"
    return "formal", "tested topology"
