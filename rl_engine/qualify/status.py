"""The last proof of this machine's operators, kept for ``doctor``. Runs prove their own shapes again at every start."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import time
from pathlib import Path

from rl_engine.ops.library import BuildError, build_key, cache_folder

NAME = "qualification.json"


def _identity() -> dict[str, str]:
    """What a proof holds for: the kernels (sources, flags, compiler, processor) and torch."""
    try:
        kernels = build_key()
    except BuildError:
        kernels = "no C compiler"
    return {"kernels": kernels, "torch": importlib.metadata.version("torch")}


def remember(contract_id: str, digest: str, failed: int) -> None:
    """Keeps the result of a proof beside the compiled kernels; a read-only machine keeps none."""
    body = {
        "contract": contract_id,
        "digest": digest,
        "failed": failed,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **_identity(),
    }
    with contextlib.suppress(OSError):
        (cache_folder() / NAME).write_text(json.dumps(body, indent=1))


def gpu_status(model_root: str) -> dict[str, str]:
    """The same of this GPU's proof, for the model in ``model_root``; ``none`` where it must be made."""
    from rl_engine.models.config import read_config
    from rl_engine.qualify.proof import gpu_table

    digest, missing = gpu_table(read_config(Path(model_root)))
    if missing:
        return {"state": "none", "detail": missing[0].what}
    return {"state": "fresh", "detail": f"digest {digest[:16]}"}


def status(contract_digest: str) -> dict[str, str]:
    """``state`` (``fresh``, ``stale`` or ``none``) and ``detail`` in words.

    ``contract_digest`` also covers the run's fold units, which no kernel depends on: it is only shown.
    """
    path: Path = cache_folder() / NAME
    try:
        body = json.loads(path.read_text())
        found = {name: str(body[name]) for name in ("contract", "digest", "failed", "time", "kernels", "torch")}
    except (OSError, ValueError, KeyError, TypeError):
        return {"state": "none", "detail": ""}
    if found["failed"] != "0":
        return {"state": "stale", "detail": f"{found['failed']} cases failed on {found['time']}"}
    changed = [name for name, value in _identity().items() if found[name] != value]
    if changed:
        return {"state": "stale", "detail": f"other {' and '.join(changed)} than on {found['time']}"}
    detail = f"{found['contract']} proven {found['time']}, digest {found['digest'][:16]}, plan {contract_digest[:16]}"
    return {"state": "fresh", "detail": detail}
