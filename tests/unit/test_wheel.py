"""A wheel holds every file that the package opens, and its command line works where there is no checkout."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_engine.config.profile import BUNDLED
from rl_engine.entrypoints.parser import VERBS

ROOT = Path(__file__).resolve().parents[2]
MADE = ("__pycache__", "_build", "*.egg-info")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
HELP = """
import sys
from rl_engine.entrypoints.repro import main
for verb in sys.argv[1:]:
    print("== " + verb, flush=True)
    try:
        code = main([verb, "--help"])
    except SystemExit as stop:
        code = stop.code
    if code:
        sys.exit(f"{verb} --help: exit {code}")
"""
PROVENANCE = """
import json
from rl_engine.config.host import dirty_sources
from rl_engine.config.paths import REPOSITORY
from rl_engine.records.sources import lies_in_sources, source_record
from pathlib import Path
def state():
    record = source_record("rl_kernel", REPOSITORY)
    return [record.revision, record.dirty, record.diff_hash]
before = state()
profile = next(Path(REPOSITORY, "rl_engine", "configs").rglob("cpu-smollm2.json"))
text = profile.read_bytes()
profile.write_bytes(text + b" ")
edited = state()
profile.write_bytes(text)
inside = lies_in_sources(profile.parent / "out", REPOSITORY)
print(json.dumps([before, edited, state(), dirty_sources(), inside]))
"""


def copied(folder: Path) -> Path:
    """What a wheel is built from, in a folder of its own: building leaves its products beside the sources."""
    for name in ("rl_engine", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*MADE))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclasses.dataclass(frozen=True)
class Installed:
    """An unpacked wheel, the sources it was made from, and a working directory outside both."""

    package: Path
    sources: Path
    cwd: Path

    def python(self, *words: str) -> str:
        """Standard output of a Python that finds the package in the wheel; it must succeed and show no traceback."""
        steering = ("RLK_", "RAY_", "PYTHON", "COLUMNS")
        env = {key: value for key, value in os.environ.items() if not key.startswith(steering)}
        env |= {"PYTHONPATH": str(self.package), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *words], cwd=self.cwd, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def rlk(self, *words: str) -> str:
        return self.python("-m", "rl_engine.entrypoints.repro", *words)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Built by setuptools alone: no network, no isolated environment, nothing installed."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools, which builds the wheel, is not installed")
    import setuptools

    if int(setuptools.__version__.split(".")[0]) < 71 and importlib.util.find_spec("wheel") is None:
        pytest.skip(f"setuptools {setuptools.__version__} builds wheels with the package wheel, which is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    sources, package, cwd = (folder / name for name in ("sources", "site", "elsewhere"))
    for made in (sources, package, cwd):
        made.mkdir()
    copied(sources)
    build = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(build, cwd=sources, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(package)
    yield Installed(package, sources, cwd)
    shutil.rmtree(folder, ignore_errors=True)


def test_wheel_has_every_file_of_the_package_and_the_profiles(wheel: Installed) -> None:
    wanted = {f"rl_engine/{name}": body for name, body in files(wheel.sources / "rl_engine").items()}
    wanted |= {f"rl_engine/configs/{name}": body for name, body in files(wheel.sources / "configs").items()}
    found = {name: body for name, body in files(wheel.package).items() if ".dist-info/" not in name}
    assert sorted(found) == sorted(wanted)
    assert found == wanted


def test_every_help(wheel: Installed) -> None:
    assert "plan" in wheel.rlk("--help")
    assert wheel.python("-c", HELP, *VERBS).count("usage: ") >= len(VERBS)


def test_plan_takes_the_wheels_profiles(wheel: Installed) -> None:
    """By itself, and by the name that a profile has in the repository."""
    shown = json.loads(wheel.rlk("plan", "--json", "--backend", "cpu"))
    assert str(wheel.package / "rl_engine" / BUNDLED["demo-cpu"]) in json.dumps(shown)
    text = wheel.rlk("plan", "--profile", BUNDLED["demo-gpu"])
    assert str(wheel.package / "rl_engine" / BUNDLED["demo-gpu"]) in text
    assert "under no version control" in text
    assert "[default: the installed package]" in text
    assert str(ROOT / "configs") not in text


def test_doctor_judges_the_wheel(wheel: Installed) -> None:
    text = wheel.rlk("doctor", "--profile", BUNDLED["demo-cpu"])
    assert f"[WARN] checkout rl_kernel: found {wheel.package}: an installed package" in text


def test_diagnose_a_log(wheel: Installed) -> None:
    values = [-0.7, -1.9, -0.25, -3.5]
    row = {"tokens": [5, 8, 13, 21, 3, 4], "prompt_length": 2, "rollout_logprobs": values, "train_logprobs": values}
    (wheel.cwd / "log.jsonl").write_text(json.dumps(row) + "\n")
    assert json.loads(wheel.rlk("diagnose", "log.jsonl", "--json"))


def test_profiles_of_a_wheel_are_source(wheel: Installed) -> None:
    before, edited, after, why, inside = json.loads(wheel.python("-c", PROVENANCE))
    assert before == after and before[:2] == [None, False] and before[2] != edited[2]
    assert why == "these sources are under no version control" and inside


def test_a_bundled_profile_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout too; a file of that name in the working directory comes first."""
    from rl_engine.config.host import HostFacts
    from rl_engine.config.profile import choose_profile
    from rl_engine.records.errors import UserError

    monkeypatch.chdir(tmp_path)
    name, host = BUNDLED["demo-cpu"], HostFacts(2, None, True, "", 0, "")
    for flag, env in ((name, {}), (None, {"RLK_REPRO_PROFILE": name})):
        assert choose_profile(flag, env, tmp_path, host, False).file == ROOT / name
    with pytest.raises(UserError, match="none"):
        choose_profile("configs/demo/none.json", {}, tmp_path, host, False)
    (tmp_path / name).parent.mkdir(parents=True)
    shutil.copy(ROOT / name, tmp_path / name)
    assert choose_profile(name, {}, tmp_path, host, False).file == (tmp_path / name).resolve()
