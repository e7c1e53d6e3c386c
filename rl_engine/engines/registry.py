"""Engine classes by name, loaded from where ``config.engines`` found them."""

from __future__ import annotations

import importlib
from typing import Any, cast

from rl_engine.config.engines import BUILTIN, Installed, find_engine
from rl_engine.config.plan import Plan
from rl_engine.engines.protocol import Capabilities, RolloutEngine, TrainEngine
from rl_engine.records.errors import UserError
from rl_engine.records.types import Side

_BOTH = ("processes", "open", "evidence", "close")
CALLS: dict[Side, tuple[str, ...]] = {
    "train": (*_BOTH, "score", "score_reference", "step", "export", "load_weights", "save", "load"),
    "rollout": (*_BOTH, "generate", "load_weights", "held"),
}


def train_class(plan: Plan) -> type[TrainEngine]:
    """The class of the plan's train engine.

    Raises:
        UserError: it is not installed, cannot be imported, or is no train engine.
    """
    return cast(type[TrainEngine], _load(find_engine("train", plan.engines.train)))


def rollout_class(plan: Plan) -> type[RolloutEngine]:
    """The class of the plan's rollout engine.

    Raises:
        UserError: it is not installed, cannot be imported, or is no rollout engine.
    """
    return cast(type[RolloutEngine], _load(find_engine("rollout", plan.engines.rollout)))


def _load(engine: Installed) -> Any:
    module, _, name = engine.target.partition(":")
    what = f"{engine.side} engine {engine.name} ({engine.target})"
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        if engine.name == BUILTIN:
            raise
        text = " ".join(str(error).split())[:300]
        raise UserError(
            f"{what} that cannot be imported: {type(error).__name__}: {text}",
            "an engine that imports here",
            f"install what {engine.package or engine.name} needs",
        ) from error
    missing = [call for call in CALLS[engine.side] if not callable(getattr(found, call, None))]
    if missing or not isinstance(getattr(found, "capabilities", None), Capabilities):
        raise UserError(
            f"{what} without {', '.join(missing) or 'capabilities'}",
            f"a {engine.side} engine as rl_engine.engines.protocol describes it",
            f"install a version of {engine.package or engine.name} for this version of rl-kernel",
        )
    return found
