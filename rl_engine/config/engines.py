"""Engines by name: which a plan may name for each side, what a stack stands for, and which are installed.

An engine of another package is an entry point of the group ``rl_kernel.engines`` whose name is the side and the
engine's own name, ``rollout.vllm`` or ``train.megatron``, and whose object is a class as ``rl_engine.engines.protocol``
describes it. Names are read from the metadata of installed packages; nothing is imported here, and a plan never names
a module, so that reading a stranger's plan runs none of their code.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Literal, get_args

from rl_engine.config.options import nearest
from rl_engine.records.errors import UserError
from rl_engine.records.types import Side

GROUP = "rl_kernel.engines"
SIDES: tuple[Side, ...] = get_args(Side)
BUILTIN = "builtin"
CUSTOM = "custom"  # a pair of engines that no stack has
HERE = ("builtin", CUSTOM)  # stacks that run from installed packages alone, without a workspace of checkouts

# What an engine may declare that it records. A gate asks for what was declared, and says what was not. ``draws`` of a
# rollout engine: noise is keyed by identity, as the contract has it; of a train engine: it can draw a step again.
EvidenceKind = Literal["contract", "threads", "routes", "draws", "passes", "graphs", "weights"]
_OF_BOTH: tuple[EvidenceKind, ...] = ("contract", "threads", "routes", "draws")
EVIDENCE: dict[Side, tuple[EvidenceKind, ...]] = {"train": _OF_BOTH, "rollout": get_args(EvidenceKind)}


@dataclasses.dataclass(frozen=True)
class Engines:
    """The engine of each side, by name."""

    train: str
    rollout: str

    def of(self, side: Side) -> str:
        return self.train if side == "train" else self.rollout


STACKS: dict[str, Engines] = {
    "builtin": Engines(BUILTIN, BUILTIN),
    "megatron-vllm": Engines("megatron", "vllm"),
    "vime": Engines("megatron", "vllm"),
}


@dataclasses.dataclass(frozen=True)
class Installed:
    """One installed engine: ``target`` is ``module:Class``; ``package`` and ``version`` are its distribution's."""

    side: Side
    name: str
    target: str
    package: str
    version: str


# Known without metadata: what is installed beside a checkout may be older than its sources, and may not replace these.
OWN: tuple[Installed, ...] = (
    Installed("train", BUILTIN, "rl_engine.engines.builtin:BuiltinTrainEngine", "rl-kernel", ""),
    Installed("rollout", BUILTIN, "rl_engine.engines.builtin:BuiltinRolloutEngine", "rl-kernel", ""),
)


def installed(side: Side) -> dict[str, Installed]:
    """Engines of ``side`` by name: our own, then those of other packages in the order of their names."""
    found = {engine.name: engine for engine in OWN if engine.side == side}
    points = importlib.metadata.entry_points(group=GROUP)
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        own_side, _, name = point.name.partition(".")
        if own_side != side or not name or name in found:
            continue
        package = point.dist
        words = ("", "") if package is None else (package.name, package.version)
        found[name] = Installed(side, name, point.value, *words)
    return found


def find_engine(side: Side, name: str, origin: str = "") -> Installed:
    """The installed engine ``name`` of ``side``; ``origin`` is how a user spelled the choice.

    Raises:
        UserError: no such engine is installed.
    """
    engines = installed(side)
    if name not in engines:
        known = ", ".join(engines)
        otherwise = f"install a package with the entry point {side}.{name} in the group {GROUP}"
        raise UserError(
            f"{origin or f'{side} engine'} {name}", f"an installed engine: {known}", nearest(name, engines, otherwise)
        )
    return engines[name]


def stack_of(engines: Engines) -> str:
    """The short name of a pair that runs here, ``custom`` where it has none."""
    return next((stack for stack, pair in STACKS.items() if pair == engines), CUSTOM)
