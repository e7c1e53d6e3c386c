"""doctor: paths, checkouts, checkpoint, prompts and the record of qualification."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from rl_engine.checks.doctor_ask import ask, judged, passed
from rl_engine.checks.finding import Finding
from rl_engine.config.git import inspect
from rl_engine.config.model_facts import check_tensors, read_model_facts
from rl_engine.config.paths import INSTALLED, PATH_NAMES, PLACEHOLDER, REPOSITORY
from rl_engine.config.preflight import wants_demo_model
from rl_engine.config.profile import Repository
from rl_engine.config.resolve import ResolvedPlan
from rl_engine.records.errors import UserError
from rl_engine.records.sources import uncommitted

ASK_SECONDS = 60.0
EXPECTED = "a readable path"

_QUALIFICATION = """
import json, sys
try:
    from rl_engine.qualify.status import gpu_status, status
except ModuleNotFoundError:
    print(json.dumps({"state": "none"}))
else:
    print(json.dumps(gpu_status(sys.argv[2]) if sys.argv[2] else status(sys.argv[1])))
"""


def paths(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Paths that somebody named must exist and be readable; placeholders must be edited."""
    for value in resolved.values:
        if value.name not in PATH_NAMES or not isinstance(value.value, str):
            continue
        flag = "--" + value.name.replace("_", "-")
        override = f"{flag} PATH or RLK_REPRO_{value.name.upper()}"
        if PLACEHOLDER in value.value and value.source == "profile":
            yield Finding(f"path {value.name}", "FAIL", "edit me", "a path", override)
        elif value.source in ("flag", "env", "profile") and value.name not in _MADE_BY_US:
            if not os.path.exists(value.value):
                yield Finding(f"path {value.name}", "FAIL", f"{value.value} is missing", EXPECTED, override)
            elif not os.access(value.value, os.R_OK):
                yield Finding(f"path {value.name}", "FAIL", f"{value.value} is not readable", EXPECTED, override)


_MADE_BY_US = (
    "workspace",
    "data_root",
    "output_root",
    "prompt_data",
    "vime_root",
    "megatron_root",
    "vllm_root",
    "ref_load",
)


def checkouts(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Every source checkout of the run against the profile: revision, patch trees, uncommitted changes."""
    plan, pins = resolved.plan, resolved.profile.profile.repositories
    roots = dict(plan.paths)
    names = ("rl_kernel", "vime", "megatron", "vllm") if plan.stack == "vime" else ("rl_kernel",)
    for name in names:
        repository = getattr(pins, name)
        if repository is None and name != "rl_kernel":
            continue
        yield from _checkout(resolved, name, repository, roots.get(f"{name}_root", ""))


def _checkout(resolved: ResolvedPlan, name: str, repository: Repository | None, root: str) -> Iterator[Finding]:
    label = f"checkout {name}"
    flag = f"--{name.replace('_', '-')}-root"
    if not root or PLACEHOLDER in root:
        yield Finding(label, "FAIL", "no path", "a checkout", f"{flag} DIR")
        return
    if INSTALLED and Path(root) == REPOSITORY:
        found, hint = f"{root}: an installed package", "run it from a clone, so that a run's records name a revision"
        yield Finding(label, "WARN", found, "a git checkout", hint)
        return
    revision = None if repository is None else getattr(repository.revisions, resolved.plan.mode)
    state = inspect(Path(root), repository, revision)
    if state.kind != "git":
        status = "WARN" if name == "rl_kernel" else "FAIL"
        yield Finding(label, status, f"{root}: {state.kind}", "a git checkout", f"rlk-repro prepare, or {flag} DIR")
        return
    if revision is not None and repository is not None:
        count = len(repository.patches)
        found = state.head[:12] if state.patches is None else f"{revision[:12]} with {state.patches} patches"
        yield judged(label, state.patches == count, found, f"{revision[:12]} with {count} patches", "rlk-repro prepare")
    else:
        yield passed(label, state.head[:12], "any revision (the profile pins none)")
    allowed = resolved.plan.allow_dirty or resolved.plan.stack != "vime"
    own = uncommitted(Path(root)) if name == "rl_kernel" else None
    changes = state.changes if own is None else own
    shown = f"{len(changes)} uncommitted changes" if changes else "clean"
    hint = "commit or remove them; --allow-dirty for development runs"
    yield judged(f"{label} clean", not changes, shown, "clean", hint, "WARN" if allowed else "FAIL")


def checkpoint(resolved: ResolvedPlan) -> Iterator[Finding]:
    """The Hugging Face checkpoint: readable, every shard there, the shape that the profile names."""
    root = resolved.plan.model_root
    override = "--model-root DIR or RLK_REPRO_MODEL_ROOT"
    if not root or PLACEHOLDER in root:
        yield Finding("model", "FAIL", "none", "a local Hugging Face checkpoint", override)
        return
    if not os.path.isdir(root):
        if wants_demo_model(resolved) is not None:
            yield passed("model", f"{root} is not made yet", "there, or the demo model that run and prepare make")
        else:
            yield Finding("model", "FAIL", f"{root} is missing", "a local Hugging Face checkpoint", override)
        return
    missing = _missing_shards(Path(root))
    yield judged(
        "model files",
        not missing,
        "missing " + ", ".join(missing[:3]) if missing else "all there",
        "every shard",
        override,
    )
    try:
        facts = read_model_facts(Path(root))
    except UserError as error:
        yield Finding("model", "FAIL", error.found, error.expected, error.hint)
        return
    if not missing:
        try:
            yield passed(
                "model tensors", f"{check_tensors(Path(root))}, each of its type and shape", "those of the model"
            )
        except UserError as error:
            yield Finding("model tensors", "FAIL", error.found, error.expected, error.hint)
    wanted = resolved.profile.profile.model
    if wanted is None or resolved.plan.stack != "vime":
        yield passed("model", f"{facts.num_layers} layers, hidden {facts.hidden_size}", "a checkpoint")
        return
    shape = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    other = [name for name in shape if getattr(facts, name) != getattr(wanted, name)]
    yield judged("model", not other, "other " + ", ".join(other) if other else wanted.name, wanted.name, override)
    ref_load = dict(resolved.plan.paths).get("ref_load", "")
    good = os.path.isfile(os.path.join(ref_load, "latest_checkpointed_iteration.txt"))
    yield judged(
        "reference checkpoint", good, ref_load if good else f"{ref_load} is not complete", "complete", "--ref-load DIR"
    )


def _missing_shards(root: Path) -> list[str]:
    index = root / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(root.glob("*.safetensors")) else ["*.safetensors"]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return [f"a readable {index.name}"]
    return sorted(str(name) for name in names if not (root / str(name)).is_file())


def prompts(resolved: ResolvedPlan) -> Iterator[Finding]:
    """The prompt file, and that it is the one its manifest describes."""
    path = resolved.plan.data.path
    if path is None:
        yield passed("prompts", "generated arithmetic", "none needed")
        return
    file = Path(path)
    hint = "rlk-repro prepare --download-data, or --prompt-data FILE"
    if not file.is_file():
        yield Finding("prompts", "FAIL", f"{path} is missing", "a JSONL file", hint)
        return
    manifest = file.with_name(file.name + ".manifest.json")
    if not manifest.is_file():
        yield Finding(
            "prompts", "WARN", f"{path} without a manifest", "a file that prepare made", "its content is not proven"
        )
        return
    try:
        wanted = str(json.loads(manifest.read_text(encoding="utf-8"))["output_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        yield Finding("prompts", "FAIL", f"{manifest} that cannot be read", "the manifest as prepare wrote it", hint)
        return
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    yield judged("prompts", found == wanted, f"SHA-256 {found[:16]}", wanted[:16], "move it away and run prepare again")


def qualification(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Whether the providers of this plan were proven on this machine with these versions."""
    if resolved.plan.mode == "native":
        return
    plan = resolved.plan
    root = dict(plan.paths).get("rl_kernel_root", "")
    words = [plan.contract_digest, plan.model_root if plan.backend == "cuda" else ""]
    answer = ask(plan.python, _QUALIFICATION, ASK_SECONDS, words, {"PYTHONPATH": root})
    state, hint = answer.text("state"), "rlk-repro qualify"
    if answer.error or state in ("", "none"):
        found = answer.error or answer.text("detail") or "no record"
        yield Finding(
            "qualification", "WARN", found, "a record for this machine", "run proves the providers at its start"
        )
        return
    detail = answer.text("detail")
    yield judged("qualification", state == "fresh", f"{state} {detail}".strip(), "fresh", hint)
