"""Every path of a run: flag, variable, profile key and default in one table, resolved with its source.

Standard library only. A path that does not exist is still resolved: plan shows it, run and doctor judge it.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from rl_engine.records.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parent  # the checkout, or the folder in which a wheel was installed
INSTALLED = (PACKAGE / "configs").is_dir()  # a wheel carries the profiles inside the package, a checkout beside it
PLACEHOLDER = "edit me"
SITE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class PathOption:
    """One path: ``name`` with underscores is its profile key; ``default`` in words, for help and the reference page."""

    name: str
    help: str
    default: str

    @property
    def flag(self) -> str:
        """``--model-root``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """``RLK_REPRO_MODEL_ROOT``."""
        return "RLK_REPRO_" + self.name.upper()


PATHS: tuple[PathOption, ...] = (
    PathOption("workspace", "folder for sources, data, models and runs", ".rlk-workspace in the working directory"),
    PathOption("data_root", "data and runs", "<workspace>/data"),
    PathOption("output_root", "run directories", "<data-root>/runs/convergence"),
    PathOption("prompt_data", "prompts (JSONL)", "<data-root>/datasets/dapo-math-17k.vime.jsonl"),
    PathOption("model_root", "Hugging Face checkpoint", "none; demo profiles: the demo model"),
    PathOption("ref_load", "Megatron checkpoint", "<workspace>/checkpoints/<model folder>_torch_dist"),
    PathOption("runtime_root", "prefix of the run's interpreter", "prefix of the running interpreter"),
    PathOption("python", "the run's interpreter", "<runtime-root>/bin/python"),
    PathOption("ray", "Ray's command", "ray beside the interpreter"),
    PathOption("runtime_site", "site-packages of the run's interpreter", "asked of the interpreter"),
    PathOption("te_root", "Transformer Engine outside the environment", "none"),
    PathOption("cuda_python_site", "CUDA Python outside the environment", "none"),
    PathOption("cuda_runtime_root", "CUDA runtime package", "<runtime-site>/nvidia/cuda_runtime"),
    PathOption("rl_kernel_root", "RL-Kernel checkout", "this checkout"),
    PathOption("vime_root", "VIME checkout", "<workspace>/vime"),
    PathOption("megatron_root", "Megatron-LM checkout", "<workspace>/Megatron-LM"),
    PathOption("vllm_root", "vLLM source checkout (ROCm)", "<workspace>/vllm"),
)

PATH_NAMES: tuple[str, ...] = tuple(path.name for path in PATHS)
PER_MODE_KEYS: tuple[str, ...] = ("te_root_native", "te_root_consistency")


@dataclasses.dataclass(frozen=True)
class Value:
    """A resolved value: ``source`` is flag, env, profile, derived or default; ``origin`` names it exactly."""

    name: str
    value: str | int | float | bool | None
    source: str
    origin: str


def bundled(name: str) -> Path:
    """The file of a bundled profile, in a checkout and in a wheel; ``name`` is its path in the repository."""
    return (PACKAGE if INSTALLED else REPOSITORY) / name


def absolute(text: str, base: Path) -> str:
    """``text`` as an absolute path with ``~`` expanded; links are kept as they are."""
    return os.path.normpath(base / os.path.expanduser(text))


def site_packages(python: str) -> str | None:
    """site-packages of ``python``, asked in a child process; None when it cannot answer in time."""
    if python == sys.executable:
        return sysconfig.get_paths()["purelib"]
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    try:
        answer = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, timeout=SITE_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


class PathResolver:
    """Resolves the path table for one run; flags, environment and profile values are asked in that order.

    Args:
        flags: values given on the command line, by name.
        env: the environment.
        profile: the profile's ``paths``.
        profile_file: its file, against whose folder relative profile paths are taken.
        cwd: the working directory, against which flags and variables are taken.
        mode: selects ``te_root_native`` or ``te_root_consistency``.
        demo_model: folder name of the demo model, or None when the profile is not a demo profile.
        needs_workspace: True for a stack that has no default workspace.
    """

    def __init__(
        self,
        flags: Mapping[str, str],
        env: Mapping[str, str],
        profile: Mapping[str, str],
        profile_file: Path,
        cwd: Path,
        mode: str,
        demo_model: str | None,
        needs_workspace: bool,
    ) -> None:
        self._flags, self._env, self._profile = flags, env, profile
        self._profile_file, self._cwd, self._mode = profile_file, cwd, mode
        self._demo_model, self._needs_workspace = demo_model, needs_workspace
        self._done: dict[str, Value] = {}

    def resolve(self) -> dict[str, Value]:
        """Every path of the table, by name.

        Raises:
            UserError: an empty path, or no workspace where one is required.
        """
        for option in PATHS:
            self._done[option.name] = self._given(option) or self._default(option)
        return self._done

    def _given(self, option: PathOption) -> Value | None:
        raw = self._flags.get(option.name)
        if raw is not None:
            if not raw.strip() or "\0" in raw:
                raise UserError(
                    f"{option.flag} with an empty path", "a path", f"leave {option.flag} out for its default"
                )
            return Value(option.name, absolute(raw, self._cwd), "flag", option.flag)
        raw = self._env.get(option.variable)
        if raw:
            return Value(option.name, absolute(raw, self._cwd), "env", option.variable)
        for key in (f"{option.name}_{self._mode}", option.name):
            raw = self._profile.get(key)
            if raw:
                text = raw if PLACEHOLDER in raw else absolute(raw, self._profile_file.parent)
                return Value(option.name, text, "profile", f"paths.{key}")
        return None

    def _default(self, option: PathOption) -> Value:
        value, origin = self._default_of(option.name)
        return Value(option.name, value, "derived" if "<" in origin else "default", origin)

    def _text(self, name: str) -> str:
        value = self._done[name].value
        return value if isinstance(value, str) else ""

    def _default_of(self, name: str) -> tuple[str | None, str]:
        if name == "workspace":
            return self._default_workspace()
        under = {
            "data_root": ("workspace", "data"),
            "output_root": ("data_root", "runs/convergence"),
            "prompt_data": ("data_root", "datasets/dapo-math-17k.vime.jsonl"),
            "vime_root": ("workspace", "vime"),
            "megatron_root": ("workspace", "Megatron-LM"),
            "vllm_root": ("workspace", "vllm"),
            "python": ("runtime_root", "bin/python"),
        }
        if name in under and not (name == "python" and self._done["runtime_root"].source == "default"):
            parent, tail = under[name]
            return os.path.join(self._text(parent), tail), f"<{parent.replace('_', '-')}>/{tail}"
        return self._default_runtime(name)

    def _default_workspace(self) -> tuple[str | None, str]:
        if self._needs_workspace:
            raise UserError(
                "no workspace", "a folder for sources, data and runs", "add --workspace DIR or set RLK_REPRO_WORKSPACE"
            )
        return str(self._cwd / ".rlk-workspace"), ".rlk-workspace in the working directory"

    def _default_runtime(self, name: str) -> tuple[str | None, str]:
        workspace, python = self._text("workspace"), self._done["python"].value if "python" in self._done else None
        if name == "runtime_root":
            return sys.prefix, "the running interpreter"
        if name == "python":
            return sys.executable, "the running interpreter"
        if name in ("ray", "runtime_site") and PLACEHOLDER in str(python):
            return str(python), "<python>"
        if name == "ray":
            return os.path.join(os.path.dirname(str(python)), "ray"), "<folder of python>/ray"
        if name == "runtime_site":
            return site_packages(str(python)), "asked of <python>"
        if name == "cuda_runtime_root":
            site = self._done["runtime_site"].value
            return (
                os.path.join(str(site), "nvidia", "cuda_runtime") if site else None
            ), "<runtime-site>/nvidia/cuda_runtime"
        if name == "rl_kernel_root":
            return str(REPOSITORY), "the installed package" if INSTALLED else "this checkout"
        if name == "model_root" and self._demo_model:
            return os.path.join(workspace, "models", self._demo_model), f"<workspace>/models/{self._demo_model}"
        if name == "ref_load" and self._done["model_root"].value:
            folder = os.path.basename(self._text("model_root"))
            return os.path.join(
                workspace, "checkpoints", f"{folder}_torch_dist"
            ), "<workspace>/checkpoints/<model>_torch_dist"
        return None, "none"
