"""doctor: interpreter, versions, torch, Ray and engine plugins, each asked in a child process."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator

from rl_engine.checks.doctor_ask import Answer, ask, judged, passed, version_at_least, version_matches
from rl_engine.checks.finding import Finding
from rl_engine.config.engines import BUILTIN, HERE, SIDES, find_engine
from rl_engine.config.resolve import ResolvedPlan

ASK_SECONDS = 20.0
IMPORT_SECONDS = 120.0

LOWER_BOUNDS = {"torch": "2.9", "ray": "2.50", "transformers": "4.56", "numpy": "1.26", "safetensors": "0.4"}
DISTRIBUTIONS = {"transformer_engine": "transformer_engine", "vllm": "vllm"}

_VERSIONS = """
import json, sys
try:
    from importlib import metadata
except ImportError:
    metadata = None
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except Exception:
        found[name] = None
print(json.dumps(found))
"""

_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = {"version": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda, "devices": count}
print(json.dumps(found))
"""

_RAY = "import json, ray; print(json.dumps({'version': ray.__version__}))"

_RAY_CLUSTER = """
import json, sys
from ray.job_submission import JobSubmissionClient
client = JobSubmissionClient(sys.argv[1])
found = {"version": client._do_request("GET", "/api/version").json().get("ray_version")}
def totals(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "resourcesTotal" and isinstance(inner, dict):
                yield inner
            else:
                yield from totals(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from totals(inner)
try:
    nodes = list(totals(client._do_request("GET", "/nodes?view=summary").json()))
    found["gpus"] = sum(node.get("GPU", 0) for node in nodes)
    found["object_store"] = sum(float(node.get("object_store_memory", 0)) for node in nodes)
except Exception as error:
    found["not_told"] = str(error)
print(json.dumps(found))
"""

_PLUGINS = """
import json
from importlib import metadata
found = [point.value for point in metadata.entry_points(group="vllm.general_plugins")]
print(json.dumps({"ours": [value for value in found if value.startswith("rl_engine")]}))
"""


@functools.lru_cache(maxsize=8)
def _versions(python: str) -> Answer:
    names = ["torch", "ray", "transformers", "numpy", "safetensors", *DISTRIBUTIONS.values(), "rl-kernel"]
    return ask(python, _VERSIONS, ASK_SECONDS, names)


def interpreter(resolved: ResolvedPlan) -> Iterator[Finding]:
    """The run's interpreter answers and has the version that is asked for."""
    python, wanted = resolved.plan.python, resolved.profile.profile.requirements.python
    hint = "activate the environment, or set RLK_REPRO_RUNTIME_ROOT or --python"
    answer = _versions(python)
    if answer.error:
        yield Finding("interpreter", "FAIL", f"{python}: {answer.error}", "an interpreter that answers", hint)
        return
    found = answer.text("python")
    if wanted is not None:
        yield judged("interpreter", version_matches(found, wanted), f"Python {found}", f"Python {wanted}", hint)
    else:
        good = version_at_least(found, "3.11") and not version_at_least(found, "3.13")
        yield judged("interpreter", good, f"Python {found}", "Python 3.11 or 3.12", hint)


def versions(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Installed distributions against the profile's pins, or the package's lower bounds where it pins nothing."""
    answer, requirements = _versions(resolved.plan.python), resolved.profile.profile.requirements
    if answer.error:
        return
    pins = {name: getattr(requirements, name) for name in ("torch", "vllm", "ray", "transformer_engine")}
    for name, wanted in pins.items():
        if wanted is None:
            continue
        found = answer.text(DISTRIBUTIONS.get(name, name)) or "none"
        hint = (
            f"install {name} {wanted} into {resolved.plan.python}, or --{'te-root' if 'engine' in name else 'python'}"
        )
        yield judged(f"version {name}", version_matches(found, wanted), found, wanted, hint)
    for name, least in LOWER_BOUNDS.items():
        if pins.get(name) is not None:
            continue
        found = answer.text(name)
        good = bool(found) and version_at_least(found, least)
        yield judged(
            f"version {name}", good, found or "none", f"at least {least}", "./rlk makes an environment that has it"
        )


def torch_works(resolved: ResolvedPlan) -> Iterator[Finding]:
    """torch imports in the run's interpreter and is a build for the run's devices."""
    plan = resolved.plan
    answer = ask(plan.python, _TORCH, IMPORT_SECONDS)
    hint = "install torch into the run's interpreter, or name another with --python"
    if answer.error:
        yield Finding("torch", "FAIL", answer.error, "a torch that imports", hint)
        return
    found = f"torch {answer.text('version')}, {answer.text('devices')} devices"
    kind = {"cuda": "cuda", "rocm": "hip"}.get(plan.backend)
    if kind is None:
        yield passed("torch", found, "a torch that imports")
        return
    needs = resolved.profile.profile.requirements.gpus or 1
    good = bool(answer.text(kind)) and int(answer.text("devices") or 0) >= needs
    yield judged("torch", good, found, f"a {plan.backend} build that sees {needs} devices", hint)


def ray_works(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Ray: the user's cluster where we submit to one, else that our own head can be started."""
    plan = resolved.plan
    if plan.ray.address is not None:
        yield from _ray_cluster(resolved, plan.ray.address)
        return
    answer = ask(plan.python, _RAY, IMPORT_SECONDS)
    if answer.error:
        yield Finding("ray", "FAIL", answer.error, "a Ray that imports", 'python -m pip install "ray[default]"')
        return
    yield passed("ray", f"Ray {answer.text('version')}, own head on loopback", "a Ray that imports")
    for name, port in (("--ray-port", plan.ray.port), ("--ray-dashboard-port", plan.ray.dashboard_port)):
        if port:
            hint = f"give another {name}; what runs there is left alone"
            yield judged(f"port {port}", _port_is_free(port), "free" if _port_is_free(port) else "in use", "free", hint)


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _ray_cluster(resolved: ResolvedPlan, address: str) -> Iterator[Finding]:
    plan, requirements = resolved.plan, resolved.profile.profile.requirements
    answer = ask(plan.python, _RAY_CLUSTER, IMPORT_SECONDS, [address])
    hint = "ray start --head --include-dashboard=true, or --ray-address http://host:port"
    if answer.error:
        yield Finding("ray", "FAIL", f"{address}: {answer.error}", "a Ray dashboard that answers", hint)
        return
    found, wanted = answer.text("version"), requirements.ray or _versions(plan.python).text("ray")
    yield judged(
        "ray",
        version_matches(found, wanted),
        f"Ray {found} at {address}",
        f"Ray {wanted}",
        "start Ray from the run's environment",
    )
    needs = requirements.gpus or 0
    if "gpus" in answer.body:
        count = float(answer.text("gpus"))
        yield judged("ray gpus", count >= needs, f"{count:g}", f"at least {needs}", f"ray start --num-gpus={needs}")
    else:
        yield Finding("ray gpus", "WARN", "not told by the cluster", f"at least {needs}", "look at `ray status`")
    store = float(answer.text("object_store") or 0)
    if store:
        expected = "at least 10 GB"
        yield judged(
            "ray object store",
            store >= 10e9,
            f"{store / 1e9:.0f} GB",
            expected,
            "ray start --object-store-memory=...",
            "WARN",
        )


def plugins(resolved: ResolvedPlan) -> Iterator[Finding]:
    """The package is importable where the engines run; vLLM's plugin is registered where vLLM is used."""
    plan = resolved.plan
    answer = _versions(plan.python)
    if answer.error:
        return
    if plan.stack in HERE:
        root = dict(plan.paths).get("rl_kernel_root", "")
        good = bool(answer.text("rl-kernel")) or os.path.isdir(os.path.join(root, "rl_engine"))
        yield judged("engines", good, f"rl_engine from {root or 'nowhere'}", "importable", "python -m pip install -e .")
        for side in SIDES:
            engine = find_engine(side, plan.engines.of(side))
            if engine.name != BUILTIN:
                yield passed(
                    f"{side} engine", f"{engine.name} of {engine.package} {engine.version}", "an installed one"
                )
        return
    registered = ask(plan.python, _PLUGINS, ASK_SECONDS)
    ours = registered.body.get("ours")
    found = registered.error or (", ".join(str(value) for value in ours) if isinstance(ours, list) else "")
    yield judged(
        "vllm plugin",
        bool(ours),
        found or "none",
        "rl_engine's",
        "python -m pip install -e . there",
    )
