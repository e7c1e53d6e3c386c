"""The registry of faults: a name, the cause that should be named, base-run settings, a ladder of severities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from rl_engine.diagnose.log import TokenLog

from .runs import RunSpec, sample_run
from .scene import Scene, make_scene, render

Apply = Callable[[Scene, float], None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One injected fault.

    Attributes:
        name: unique name; ``cause`` the id that the doctor should rank first.
        apply: edits a scene in place for a severity.
        ladder: severities from small to large, in ``unit``; ``nominal`` is the first index that scoring draws from.
        spec: overrides of the base run for a severity.
        also: other causes that describe the same physics and count as right (empty for most).
    """

    name: str
    cause: str
    apply: Apply
    ladder: tuple[float, ...]
    unit: str
    nominal: int = 2
    spec: Callable[[float, int], dict[str, object]] = lambda severity, seed: {}
    also: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {}


def fault(
    name: str,
    cause: str,
    ladder: tuple[float, ...],
    unit: str,
    nominal: int = 2,
    spec: Callable[[float, int], dict[str, object]] = lambda severity, seed: {},
    also: tuple[str, ...] = (),
) -> Callable[[Apply], Apply]:
    """Register a function that edits a scene."""

    def register(apply: Apply) -> Apply:
        if name in FAULTS:
            raise ValueError(f"two faults named {name}")
        FAULTS[name] = Fault(name, cause, apply, ladder, unit, nominal, spec, also)
        return apply

    return register


def base_spec(seed: int) -> RunSpec:
    """The run of a seed: model, size, noise and logit spread vary."""
    rng = np.random.default_rng([seed, 7])
    return RunSpec(
        seed=seed,
        samples=int(rng.choice([40, 48, 64])),
        prompt=int(rng.choice([32, 48])),
        response=int(rng.choice([96, 128, 160])),
        noise=float(rng.choice([0.0005, 0.001, 0.0015])),
        gain=float(rng.choice([5.0, 6.0, 7.0])),
        offset=float(rng.choice([0.0, 4.0, 10.0])),
    )


def make_log(names: tuple[str, ...], seed: int, severities: tuple[float, ...]) -> TokenLog:
    """The log of a seed with the named faults applied together, in order."""
    settings: dict[str, object] = {}
    for name, severity in zip(names, severities, strict=True):
        settings.update(FAULTS[name].spec(severity, seed))
    run = sample_run(dataclasses.replace(base_spec(seed), **settings))
    scene = make_scene(run, seed)
    for name, severity in zip(names, severities, strict=True):
        FAULTS[name].apply(scene, severity)
    return render(scene)


def nominal_severity(name: str, seed: int) -> float:
    """The severity that scoring uses for a seed, drawn from the nominal part of the ladder."""
    item = FAULTS[name]
    choices = item.ladder[item.nominal :]
    return choices[int(np.random.default_rng([seed, 11]).integers(len(choices)))]
