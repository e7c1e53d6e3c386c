"""CUDA C++ sources: the digest that stands beside their launch, and their compilation where a compiler is."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_engine.ops import cuda_source
from rl_engine.ops.attention import hopper_pairs

COMPILATIONS = [(hopper_pairs.SOURCE, hopper_pairs.macros(rows)) for rows in (4, 8)]


def test_every_source_has_the_digest_that_its_launcher_names() -> None:
    for source, _ in COMPILATIONS:
        source.text()
    named = {source.path for source, _ in COMPILATIONS}
    assert named == set(cuda_source.SOURCES.glob("*.cu")), "a source without an entry here"


def test_another_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decode_pairs.cu"
    path.write_bytes(hopper_pairs.SOURCE.path.read_bytes() + b"\n")
    with pytest.raises(cuda_source.Refused, match=r"decode_pairs\.cu is not the source"):
        dataclasses.replace(hopper_pairs.SOURCE, path=path).text()


@pytest.mark.parametrize("rows", [4, 8])
def test_two_programs_fit_a_multiprocessor(rows: int) -> None:
    names = hopper_pairs.macros(rows)
    assert 2 * (names["BYTES"] + 1024) <= 228 << 10, "a block has 1 KiB of the system's"
    assert 2 * (names["BYTES"] + 1024 + hopper_pairs.UNIT + 16) > 228 << 10, "another unit would fit"


@pytest.mark.parametrize(("source", "names"), COMPILATIONS, ids=lambda x: getattr(x, "path", Path("")).name)
def test_a_source_compiles_for_hopper_without_a_gpu_and_spills_nothing(
    source: cuda_source.Source, names: dict[str, int], tmp_path: Path
) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        if not cuda_source.nvrtc_available():
            pytest.skip("neither nvcc nor NVRTC is here")
        assert len(cuda_source.compiled(source, names)) > 1000
        return
    defines = [f"-D{key}={value}" for key, value in names.items()]
    call = [compiler, "-cubin", "-arch=sm_90a", "-fmad=false", "-Xptxas", "-v", "-Werror", "all-warnings", *defines]
    done = subprocess.run([*call, str(source.path), "-o", str(tmp_path / "x.cubin")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
