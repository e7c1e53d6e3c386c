"""Collection of :class:`EnvironmentRecord`: what a process runs on, with secrets removed."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from typing import Literal

from rl_engine.records.redact import redact_variables
from rl_engine.records.types import EnvironmentRecord, SourceRecord, ThreadSettings

_DISTRIBUTIONS: tuple[str, ...] = (
    "torch",
    "numpy",
    "ray",
    "transformers",
    "safetensors",
    "tokenizers",
    "triton",
    "vllm",
)
_DISTRIBUTIONS += ("megatron-core", "transformer-engine", "math-verify", "rl-kernel")


def utc_now() -> str:
    """The current time, UTC, ISO 8601 with microseconds and ``Z``."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def installed_versions() -> dict[str, str]:
    """Versions of the distributions that can change numbers, of those installed; nothing is imported."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def collect_environment(
    *,
    phase: Literal["start", "end"],
    role: Literal["driver", "train", "rollout"],
    engine: str,
    rank: int,
    device: str,
    contract_id: str,
    contract_digest: str,
    qualification_digest: str | None,
    threads: ThreadSettings | None,
    sources: tuple[SourceRecord, ...] = (),
    driver: str | None = None,
) -> EnvironmentRecord:
    """The record of the calling process; only what it cannot know itself is passed in."""
    return EnvironmentRecord(
        time=utc_now(),
        phase=phase,
        role=role,
        engine=engine,
        rank=rank,
        host=platform.node(),
        device=device,
        driver=driver,
        python=sys.version.split()[0],
        platform=platform.platform(),
        versions=installed_versions(),
        threads=threads,
        contract_id=contract_id,
        contract_digest=contract_digest,
        qualification_digest=qualification_digest,
        sources=sources,
        variables=redact_variables(),
    )
