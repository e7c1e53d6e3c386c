"""Builds and loads the C provider of the CPU (``csrc/``): the system's C compiler or the ``ziglang`` package's, ctypes.

The shared object is cached under a name that hashes the sources, the flags, the compiler and the processor, so a copy
made for another machine is never loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from rl_engine.numerics.contract import Contract

SOURCES = Path(__file__).parent / "csrc"
# -fno-fast-math comes after whatever a user's $CC brings along.
COMMON_FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-pthread", "-std=gnu11"),
    *("-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"),
)
# gemm.c multiplies bf16 values only: their products are exact in fp32, so a fused multiply-add has the same bits.
CONTRACT_FLAGS = {"gemm.c": "-ffp-contract=fast"}

I64, F32, PTR, INT, U32 = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
SIGNATURES: dict[str, tuple[type, ...]] = {
    "rlk_set_threads": (INT,),
    "rlk_constants": (PTR,),
    "rlk_flushed": (),
    "rlk_pack": (I64, I64, PTR, I64, I64, PTR),
    "rlk_gemm": (I64, I64, I64, PTR, I64, I64, PTR, I64, I64, INT, PTR, I64, PTR, I64),
    "rlk_rms_norm": (I64, I64, I64, PTR, I64, PTR, F32, PTR),
    "rlk_rms_norm_backward": (I64, I64, I64, PTR, I64, PTR, F32, PTR, I64, PTR, PTR),
    "rlk_unit_sums": (I64, I64, I64, PTR, PTR, PTR),
    "rlk_rope": (I64, I64, I64, PTR, I64, PTR, PTR, PTR, F32, PTR),
    "rlk_swiglu": (I64, I64, PTR, PTR),
    "rlk_swiglu_backward": (I64, I64, PTR, PTR, PTR),
    "rlk_exp_array": (I64, PTR, PTR),
    "rlk_log_array": (I64, PTR, PTR),
    "rlk_log1p_array": (I64, PTR, PTR),
    "rlk_attention_tile": (I64, I64),
    "rlk_attention": (I64, I64, I64, I64, PTR, I64, PTR, PTR, PTR, I64, PTR, PTR, I64, PTR, F32, PTR, PTR),
    "rlk_kv_store": (I64, I64, I64, I64, PTR, I64, PTR, I64, PTR, PTR, PTR),
    "rlk_attention_delta": (I64, I64, I64, PTR, I64, PTR, I64, PTR),
    "rlk_attention_backward": (
        *(I64, I64, I64, PTR, I64, PTR, I64, PTR, I64, PTR, I64),
        *(PTR, PTR, PTR, I64, PTR, F32, PTR, PTR, PTR),
    ),
    "rlk_logp_merge": (I64, I64, PTR, PTR, PTR, PTR, PTR, PTR),
    "rlk_logp_groups": (I64, I64, I64, I64, I64, PTR, I64, F32, PTR, I64, PTR, PTR, PTR, PTR, PTR),
    "rlk_logp_finish": (I64, PTR, PTR, PTR, PTR, PTR, PTR),
    "rlk_logits_gradient": (I64, I64, I64, PTR, I64, F32, PTR, I64, PTR, PTR, PTR, PTR, PTR),
    "rlk_sample": (I64, I64, I64, PTR, I64, F32, PTR, I64, U32, U32, PTR, PTR, PTR),
    "rlk_lookup_gradient": (I64, I64, PTR, PTR, PTR),
    "rlk_square_bins": (I64, I64, PTR, PTR),
    "rlk_adamw": (I64, I64, PTR, PTR, PTR, PTR, PTR, PTR, F32, F32, F32, F32, F32, F32, F32, F32, F32),
}


class BuildError(RuntimeError):
    """The C provider could not be compiled; the message holds the compiler's own words."""


def compiler() -> list[str] | None:
    """Command of the C compiler to use, or None: ``$CC``, cc, gcc, clang, then the ``ziglang`` package."""
    named = os.environ.get("CC", "").split()
    if named and shutil.which(named[0]):
        return named
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def available() -> bool:
    """Whether the C provider can be built here (a compiler was found); it is proven by ``qualify``, not here."""
    return compiler() is not None


def _processor() -> str:
    """Instruction set of this processor, as the compiler's ``-march=native`` will see it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine() + " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:
        pass
    return platform.machine() + platform.processor()


@functools.cache
def build_key() -> str:
    """SHA-256 (hex) over sources, flags, compiler version and processor: the identity of the compiled kernels."""
    command = compiler()
    if command is None:
        raise BuildError("no C compiler: neither cc, gcc, clang nor the ziglang package was found")
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    digest = hashlib.sha256()
    for part in (*command, *COMMON_FLAGS, repr(sorted(CONTRACT_FLAGS.items())), version, _processor()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".c", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(target: Path) -> None:
    command = compiler()
    assert command is not None
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        jobs = []
        for source in sorted(SOURCES.glob("*.c")):
            output = Path(folder) / f"{source.stem}.o"
            contraction = CONTRACT_FLAGS.get(source.name, "-ffp-contract=off")
            call = [*command, *COMMON_FLAGS, contraction, "-c", str(source), "-o", str(output)]
            jobs.append(
                (source.name, subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            )
            objects.append(str(output))
        for name, job in jobs:
            output_text, _ = job.communicate(timeout=300)
            if job.returncode:
                raise BuildError(f"{' '.join(command)} failed on {name}: {output_text.strip()[-2000:]}")
        built = Path(folder) / "library.so"
        link = [*command, "-shared", "-pthread", *objects, "-o", str(built), "-lm"]
        done = subprocess.run(link, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise BuildError(f"{' '.join(command)} could not link: {done.stderr.strip()[-2000:]}")
        os.replace(built, target)


def cache_folder() -> Path:
    """Where compiled kernels and proofs are kept: beside the sources, or in the user's cache where that cannot be
    written. What lies there is loaded and believed, so nobody may write there but who may write the sources.

    Raises:
        BuildError: others may write to both.
    """
    beside = Path(__file__).parent / "_build"
    try:
        beside.mkdir(exist_ok=True)
        if _ours(beside):
            with tempfile.TemporaryFile(dir=beside):
                return beside
    except OSError:
        pass
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-kernel"
    base.mkdir(parents=True, exist_ok=True)
    if not _ours(base):
        raise BuildError(f"{base} may be written by everyone, or is another user's: its contents would be loaded")
    return base


def _ours(folder: Path) -> bool:
    """Whether a folder is this user's, root's or the sources' owner's, and not open to everyone."""
    found, owner = os.stat(folder), os.stat(__file__).st_uid
    trusted = found.st_uid in (os.geteuid(), 0, owner)
    return stat.S_ISDIR(found.st_mode) and trusted and not found.st_mode & stat.S_IWOTH


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled provider, built on first use (a few seconds).

    Raises:
        BuildError: no compiler, or the compiler failed.
    """
    target = cache_folder() / f"rlk-{build_key()[:32]}.so"
    if not target.exists():
        _compile(target)
    library = ctypes.CDLL(str(target))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = list(arguments)
        function.restype = I64 if name in ("rlk_attention_tile", "rlk_flushed") else None
    _check_constants(library)
    return library


def loaded_digest() -> str:
    """SHA-256 of the library that this process has loaded.

    Where its file was replaced since (two processes compiled at once), or the system does not say what is loaded, the
    answer names this process and equals nobody else's.
    """
    path = Path(load()._name)
    try:
        lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
        place = [str(path.stat().st_ino), str(path)]
        if any(words[4:] == place for words in lines):
            return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        pass
    return f"unknown, of process {os.getpid()}"


def _check_constants(library: ctypes.CDLL) -> None:
    """What is compiled in must be what the contract says."""
    contract = Contract()
    expected = (
        contract.kv_block,
        contract.kv_split,
        contract.logp_tile,
        contract.fold_axis,
        contract.gain_block,
    )
    compiled = (I64 * len(expected))()
    library.rlk_constants(compiled)
    if tuple(compiled) != expected:
        raise BuildError(f"the C provider was compiled for {tuple(compiled)}, the contract says {expected}")


def set_threads(count: int) -> None:
    """Number of threads of every kernel of this process; the bits do not depend on it.

    Raises:
        BuildError: a thread flushes subnormal numbers to zero, which the contract forbids.
    """
    load().rlk_set_threads(count)
    if load().rlk_flushed():
        raise BuildError("a thread of this process flushes subnormal numbers to zero; unset that mode (FTZ, DAZ)")
