"""Our own Ray head on loopback: started before a run, ended after it. A foreign Ray is never touched."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

OBJECT_STORE_BYTES = 1 << 30


def _set_environment(threads: int) -> None:
    """Everything that Ray's processes inherit; Ray reads its token when it is imported."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    os.environ.pop("RAY_ADDRESS", None)


@contextlib.contextmanager
def ray_head(threads: int, model_bytes: int) -> Iterator[Any]:
    """The ``ray`` module, connected to a head of our own; its processes and its folder are gone afterwards.

    Args:
        threads: ``OMP_NUM_THREADS`` of every worker.
        model_bytes: size of one weight snapshot; the object store holds two and some samples.
    """
    _set_environment(threads)
    import ray

    # Unix socket paths are short: the folder cannot lie inside the run directory.
    folder = tempfile.mkdtemp(prefix="rlk-ray-")
    try:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, 4),
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=max(OBJECT_STORE_BYTES, 2 * model_bytes + (256 << 20)),
            log_to_driver=False,
            logging_level="error",
            _temp_dir=folder,
        )
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def start(ray: Any, worker: type, *arguments: Any) -> Any:
    """An actor of ``worker``; ``progress`` can be asked while another method runs."""
    return ray.remote(num_cpus=1, max_concurrency=2, max_restarts=0)(worker).remote(*arguments)


def stop(ray: Any, actors: list[Any]) -> None:
    """Ends our actors; a dead one is no error."""
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)
