"""Fixtures of the end-to-end tests: one model and one copy of the sources for the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Cli, copy_sources, profile, save_model
from tests.e2e.kills import make_cli, reference_run, small_model


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def cli(sources: Path, model: Path, tmp_path: Path) -> Cli:
    """The command line in a folder of the test's own, with the small model and profile given."""
    return Cli(sources, tmp_path, ["--profile", str(profile(tmp_path)), "--model-root", str(model)])


@pytest.fixture(scope="session")
def quick_cli(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command line with a model whose steps take hundredths of a second, for tests of life cycle."""
    folder = tmp_path_factory.mktemp("quick")
    return make_cli(sources, small_model(folder / "model"), folder)


@pytest.fixture(scope="session")
def reference(quick_cli: Cli) -> Path:
    """The directory of a run of ``quick_cli`` that nobody disturbed."""
    return reference_run(quick_cli)
