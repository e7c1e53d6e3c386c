"""One way for the tests to resolve a command line on a made-up machine."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_engine.config.host import HostFacts
from rl_engine.config.resolve import Request, ResolvedPlan, resolve

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)
CPU = HostFacts(cores=2, gpu_kind=None, chain=True)

Resolve = Callable[..., list[ResolvedPlan]]


@pytest.fixture
def plan_for(tmp_path: Path) -> Resolve:
    """``plan_for(verb="plan", profile=None, paths={}, env={}, host=CPU, detach=False, **flags)``."""

    def build(
        verb: str = "plan",
        profile: str | Path | None = None,
        paths: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        host: HostFacts = CPU,
        detach: bool = False,
        **flags: str | bool,
    ) -> list[ResolvedPlan]:
        file = None if profile is None else str(profile)
        return resolve(Request(verb, flags, paths or {}, file, env or {}, tmp_path, host, NOW, detach))

    return build
