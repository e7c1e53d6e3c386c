"""CUDA C++ kernels of ``csrc``: compiled by NVRTC when first used, launched through the driver, both by ctypes.

For what Triton cannot say, such as two programs that reach each other's shared memory. Contraction is off for every
kernel (``-fmad=false``): a fused multiply-add exists where the source writes it. Sources include nothing, so neither a
CUDA toolkit nor a compiler has to be installed: torch's own wheels bring NVRTC.

A source is named with its digest, in the module that launches it: whatever tells one state of that module from another,
a proof's identity or a figure's, tells the source's states apart too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

SOURCES = Path(__file__).parent / "csrc"
SHARED_BYTES = 8  # attribute of a function: most bytes of shared memory asked for at launch
EARLY_START = 6  # attribute of a launch: it may start when the kernel ahead allows it
BFLOAT16, SWIZZLE_128, PROMOTION_128 = 9, 3, 2
_LOCK = threading.Lock()


class Refused(RuntimeError):
    """NVRTC or the driver is not there, or one of them refused."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A file and the SHA-256 (hex) that it must have; ``macros`` beside those of the launch are for a test of it."""

    path: Path
    digest: str
    macros: tuple[tuple[str, int], ...] = ()

    def text(self) -> bytes:
        """What it holds.

        Raises:
            Refused: its digest is another.
        """
        text = self.path.read_bytes()
        found = hashlib.sha256(text).hexdigest()
        if found != self.digest:
            raise Refused(f"{self.path.name} is not the source that its launcher names: its SHA-256 is {found}")
        return text


class Map(ctypes.Structure):
    """A tensor as the copy engine sees it (``CUtensorMap``): 128 opaque bytes at a multiple of 64."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _Value(ctypes.Union):
    _fields_ = (("flag", ctypes.c_int), ("padding", ctypes.c_uint8 * 64))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", _Value))


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA version.

    Raises:
        Refused: torch has no CUDA, or the library is not there.
    """
    if torch.version.cuda is None:
        raise Refused("this torch was built without CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    beside = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (beside.submodule_search_locations or ())] if beside else []
    found = [path for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
    for path in (name, *(str(path) for path in found)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise Refused(f"{name} is neither loaded nor beside torch")


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver.

    Raises:
        Refused: it is not installed.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Refused(f"the CUDA driver cannot be loaded: {error}") from error


@functools.cache
def nvrtc_available() -> bool:
    """Whether sources can be compiled here."""
    try:
        nvrtc()
    except Refused:
        return False
    return True


@functools.cache
def available() -> bool:
    """Whether kernels of this kind can be compiled and launched here."""
    try:
        driver()
    except Refused:
        return False
    return nvrtc_available()


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise Refused(f"{what}: CUDA error {status} ({(text.value or b'unknown').decode()})")


def compiled(source: Source, defines: Mapping[str, int], architecture: str = "sm_90a") -> bytes:
    """Machine code of a source with these macros.

    Raises:
        Refused: NVRTC is not there, or does not take the source (the message holds its words), or it is not the one.
    """
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    name = source.path.name
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-fmad=false"]
    options += [f"-D{key}={value}" for key, value in (*defines.items(), *source.macros)]
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if library.nvrtcCreateProgram(ctypes.byref(program), source.text(), name.encode(), 0, None, None):
        raise Refused(f"NVRTC makes no program of {name}")
    try:
        if library.nvrtcCompileProgram(program, len(options), words):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise Refused(f"NVRTC does not take {name}: {log.value.decode(errors='replace').strip()[-2000:]}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@dataclasses.dataclass(frozen=True)
class Function:
    """A kernel on one device.

    Attributes:
        handle: the driver's.
        shared: bytes of shared memory of a block.
        device: index of the device.
    """

    handle: ctypes.c_void_p
    shared: int
    device: int

    def launch(
        self, grid: tuple[int, int, int], threads: int, arguments: list[ctypes.Structure], *, early: bool
    ) -> None:
        """On torch's current stream; ``early``: it may start before the kernel ahead of it in the stream has ended, and
        waits itself before it reads what that one writes."""
        attribute = _Attribute(EARLY_START, 0, _Value(flag=1))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        call = _Launch(*grid, threads, 1, 1, self.shared, stream, ctypes.pointer(attribute), int(early))
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        with torch.cuda.device(self.device):
            _have_context(self.device)
            _check(driver().cuLaunchKernelEx(ctypes.byref(call), self.handle, places, None), "launch")


def _have_context(device: int) -> None:
    """A thread that has called nothing of CUDA yet has no context: it gets the device's own, which torch uses too."""
    cuda, context = driver(), ctypes.c_void_p()
    _check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "context")
    if not context:
        _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "context")
        _check(cuda.cuCtxSetCurrent(context), "context")


def function(source: Source, name: str, defines: Mapping[str, int], shared: int, device: torch.device) -> Function:
    """The kernel ``name`` of a source on a CUDA device; compiled when asked for the first time.

    Raises:
        Refused: as :func:`compiled`, or the driver does not take the code.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _LOCK:
        return _function(source, name, tuple(defines.items()), shared, index)


@functools.cache
def _code(source: Source, defines: tuple[tuple[str, int], ...]) -> bytes:
    return compiled(source, dict(defines))


@functools.cache
def _function(source: Source, name: str, defines: tuple[tuple[str, int], ...], shared: int, device: int) -> Function:
    module, handle, cuda, file = ctypes.c_void_p(), ctypes.c_void_p(), driver(), source.path.name
    cuda.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    with torch.cuda.device(device):
        _have_context(device)
        _check(cuda.cuModuleLoadData(ctypes.byref(module), _code(source, defines)), f"{file} does not load")
        _check(cuda.cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), f"{file} has no {name}")
        _check(cuda.cuFuncSetAttribute(handle, SHARED_BYTES, shared), f"{name} asks for {shared} bytes")
    return Function(handle, shared, device)


def rows_map(x: Tensor, width: int, box: tuple[int, int]) -> Map:
    """``x`` (bf16, contiguous) as rows of ``width`` values, from which the copy engine brings ``box`` (rows, columns of
    128 bytes) with the swizzle of 128 bytes.

    Raises:
        Refused: the driver does not take these sizes.
    """
    room = ctypes.create_string_buffer(ctypes.sizeof(Map) + 64)
    found = Map.from_buffer(room, -ctypes.addressof(room) % 64)
    sizes, strides = (ctypes.c_uint64 * 2)(width, x.numel() // width), (ctypes.c_uint64 * 1)(2 * width)
    boxes, ones = (ctypes.c_uint32 * 2)(box[1], box[0]), (ctypes.c_uint32 * 2)(1, 1)
    status = driver().cuTensorMapEncodeTiled(
        *(ctypes.byref(found), BFLOAT16, 2, ctypes.c_void_p(x.data_ptr()), sizes, strides, boxes, ones),
        *(0, SWIZZLE_128, PROMOTION_128, 0),
    )
    _check(status, "description of a tensor")
    return found
