"""CUDA C++ sources: the digest that stands beside their launch, and their compilation where a compiler is."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
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


def _disassembler() -> str | None:
    """``cuobjdump`` of a toolkit, or the one that Triton brings."""
    beside = importlib.util.find_spec("triton")
    folders = [] if beside is None else list(beside.submodule_search_locations or ())
    found = [path for folder in folders for path in Path(folder).glob("backends/nvidia/bin/cuobjdump")]
    return shutil.which("cuobjdump") or next((str(path) for path in found), None)


def _freed_unread(source: Path, names: dict[str, int], folder: Path, tool: str) -> int:
    """Arrivals on a barrier that stand behind an ``ldmatrix`` whose values no product has taken yet."""
    compiler, code = shutil.which("nvcc"), folder / "x.cubin"
    assert compiler is not None
    defines = [f"-D{key}={value}" for key, value in names.items()]
    call = [compiler, "-cubin", "-arch=sm_90a", "-std=c++17", "-fmad=false", *defines, str(source), "-o", str(code)]
    subprocess.run(call, check=True, capture_output=True)
    text = subprocess.run([tool, "-sass", str(code)], check=True, capture_output=True, text=True).stdout
    waiting: set[int] = set()
    found = loads = 0
    for operation in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", text):
        registers = [int(n) for n in re.findall(r"\bR(\d+)", operation)]
        if operation.startswith("LDSM"):
            waiting.add(registers[0])
            loads += 1
        elif operation.startswith("HMMA"):
            waiting -= set(registers[1:3])
        elif "SYNCS.ARRIVE" in operation:
            found += bool(waiting)
            waiting.clear()
    assert loads >= 20
    return found


@pytest.mark.parametrize("rows", [4, 8])
def test_a_slot_is_freed_only_behind_the_products_of_what_was_read_there(rows: int, tmp_path: Path) -> None:
    """The compiler puts an arrival behind the instructions that ask for values, not behind the values: where the
    multiprocessor's loads are busy, the slot could be filled again before they come. The control frees too early."""
    tool = _disassembler()
    if shutil.which("nvcc") is None or tool is None:
        pytest.skip("no compiler and disassembler of CUDA is here")
    names = hopper_pairs.macros(rows)
    assert _freed_unread(hopper_pairs.SOURCE.path, names, tmp_path, tool) == 0
    text, wrong = hopper_pairs.SOURCE.text().decode(), tmp_path / "wrong.cu"
    right = "return __float_as_uint(result) & zero;"
    assert text.count(right) == 1
    wrong.write_text(text.replace(right, "return 0;"))
    assert _freed_unread(wrong, names, tmp_path, tool) >= 4
