"""What pyproject.toml cannot say: a wheel carries the profiles of ``configs/`` as ``rl_engine/configs/``.

A checkout and an editable installation read ``configs/`` itself, so there is one copy to edit.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithProfiles(build_py):
    """The modules and data of the package, then the profiles; nothing more where the installation is editable."""

    def run(self) -> None:
        super().run()
        for target, source in self._profiles().items():
            self.mkpath(os.path.dirname(target))
            self.copy_file(source, target, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._profiles()]

    def get_output_mapping(self) -> dict[str, str]:
        return {**super().get_output_mapping(), **self._profiles()}

    def get_source_files(self) -> list[str]:
        """With the profiles, so that a source distribution has them."""
        return [*super().get_source_files(), *self._profiles().values()]

    def _profiles(self) -> dict[str, str]:
        """File in the build folder -> file below this one, both as setuptools spells paths."""
        if self.editable_mode:
            return {}
        files = sorted(path.relative_to(HERE).as_posix() for path in (HERE / "configs").rglob("*.json"))
        return {os.path.join(self.build_lib, "rl_engine", file): file for file in files}


setup(cmdclass={"build_py": BuildWithProfiles})
