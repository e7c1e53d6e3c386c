"""Weights that a run leaves behind, and the steps that can be computed again from them.

Step 0 has the checkpoint that the run began with. A trainer state has those of the step that it goes on with. Where a
run keeps weights for this, ``kept/step-NNNNN.safetensors`` has the bf16 weights of one later step: which one is decided
by the digest of the records so far, once the step is over and recorded: nobody can know it while it is computed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rl_engine.records import paths
from rl_engine.records.checkpoints import checkpoint_folders
from rl_engine.records.files import require_folder
from rl_engine.records.private import FOLDER_MODE

FOLDER = "kept"
_NAME = re.compile(r"step-([0-9]{5,9})\.safetensors")
_RECORDS = (paths.SAMPLES_DIR, paths.WEIGHTS_DIR, paths.PASSES_DIR, paths.ROUTES_DIR)
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class WeightsPlace:
    """Where a step's weights are: a checkpoint's folder, a trainer state's, or a file of kept weights."""

    kind: Literal["start", "state", "kept"]
    path: Path


def places(run_dir: Path, model_root: Path) -> dict[int, WeightsPlace]:
    """Step -> its weights, where there are any; nothing is opened."""
    found = {step: WeightsPlace("state", folder) for step, folder in checkpoint_folders(run_dir).items()}
    for name in paths.list_folder(run_dir, FOLDER):
        if match := _NAME.fullmatch(name):
            found[int(match[1])] = WeightsPlace("kept", run_dir / FOLDER / name)
    if (model_root / "config.json").is_file():
        found[0] = WeightsPlace("start", model_root)
    return found


def records_digest(run_dir: Path) -> str:
    """SHA-256 (hex) over what the steps left: the plan, ``steps.jsonl``, samples, digests of weights, passes and
    counted calls. States, events, environments and validations, which a run gets later, do not enter.

    Raises:
        RecordError: a link or a special file among them.
    """
    names = [paths.PLAN, paths.STEPS]
    for folder in _RECORDS:
        names += [f"{folder}/{name}" for name in paths.list_folder(run_dir, folder) if not name.startswith(".")]
    return _digest(run_dir, names)


def _digest(run_dir: Path, names: list[str]) -> str:
    found = []
    for name in names:
        hasher = hashlib.sha256()
        with paths.open_regular(run_dir, name) as descriptor:
            while block := os.read(descriptor, _BLOCK):
                hasher.update(block)
        found.append([name, hasher.hexdigest()])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def choose(digest: str, count: int) -> int:
    """A number below ``count`` that follows from a digest (hex) and from nothing else."""
    return int(digest, 16) % count


def offer_weights(run_dir: Path, step: int, save: Callable[[Path], None]) -> None:
    """Before step ``step`` is computed: writes its weights, by ``save``, under a name that counts for nothing yet.

    Raises:
        OSError: the disk is full or failing; nothing of the file is left.
    """
    (run_dir / FOLDER).mkdir(FOLDER_MODE, exist_ok=True)
    require_folder(run_dir / FOLDER)
    offered = _offered(run_dir, step)
    offered.unlink(missing_ok=True)
    try:
        save(offered)
    except BaseException:
        offered.unlink(missing_ok=True)
        raise


def keep_or_drop(run_dir: Path, step: int) -> bool:
    """After step ``step`` is recorded: keeps its weights, if they were offered, in the place of those kept before, or
    drops them. In the end every offered step was as likely as any other. What decides is the digest of ``steps.jsonl``,
    where every step left its times too, and of the step's samples. Whether they were kept."""
    offered = _offered(run_dir, step)
    if not offered.exists():
        return False
    if choose(_digest(run_dir, [paths.STEPS, paths.samples_name(step, "safetensors")]), step) != 0:
        offered.unlink()
        return False
    for name in paths.list_folder(run_dir, FOLDER):
        if name != offered.name:
            (run_dir / FOLDER / name).unlink()
    os.replace(offered, offered.with_name(f"step-{step:05d}.safetensors"))
    return True


def _offered(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f".step-{step:05d}.safetensors.partial"
