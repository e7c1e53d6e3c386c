"""Kernels whose warps sleep before they wait: what a race needs by chance, a delay gives it each time.

A kernel of ``csrc`` is compiled with macros of its own for this. A Gluon kernel is built again with another ``wait``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from rl_engine.ops import cuda_source
from rl_engine.ops.attention import hopper_pairs, triton_decode
from rl_engine.qualify.gpu_attention import replaced

ALL_WAITS, ALL_GROUPS = 63, 15  # every bit of PAUSES and of SLEEPERS in decode_pairs.cu
# Faults that decode_pairs once had, as edits of its source. ``unseen``: a wait for a turn of a slot while the turn
# before it may still go on. ``unread``: a slot is freed by an arrival that may overtake the last reads of it.
FAULTS = {
    "unseen": (
        ("const bool unseen = RING % 4 != 0 && 2 * pair >= RING;", "const bool unseen = false;"),
        ("before >= 0 && before < 2 * w.own() && before & 2", "false"),
    ),
    "unread": (("return __float_as_uint(result) & zero;", "return 0;"),),
}


@triton.jit
def trigger_and_sleep():
    """The kernel behind may start, and has 20 us before this one goes on."""
    gdc_launch_dependents()
    tl.inline_asm_elementwise(
        "{ nanosleep.u32 20000; mov.u32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@functools.cache
def slow_store_and_merge() -> dict[str, Any]:
    """Decode's kernels ahead and behind, by name: each lets its follower start long before it has done its work."""
    kernels = (triton_decode.kv_store_kernel, triton_decode.attention_merge_kernel)
    return {k.fn.__name__: replaced(k, gdc_launch_dependents=trigger_and_sleep) for k in kernels}


@gluon.jit
def sleepy_wait(barrier, phase):
    """Sleeps for up to 4 us, told by the clock, then waits."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 t; mov.u32 t, %clock; mul.lo.u32 t, t, 0x85ebca6b; shr.u32 t, t, 20; nanosleep.u32 t; "
        "mov.u32 $0, 0; }",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    mbarrier.wait(barrier, phase)


def _sleepy() -> types.ModuleType:
    made = types.ModuleType("sleepy_mbarrier")
    made.__dict__.update(vars(mbarrier), wait=sleepy_wait)
    return made


@functools.cache
def sleepy_kernels(module: types.ModuleType) -> dict[str, Any]:
    """Every Gluon function of a module, by name, as it is but for its waits."""
    space = dict(vars(module))
    space["mbarrier"] = _sleepy()
    own = {name: f for name, f in vars(module).items() if getattr(f, "is_gluon", bool)() and _of(f, module)}
    for name, kernel in own.items():
        old = kernel.fn
        new = types.FunctionType(old.__code__, space, old.__name__, old.__defaults__)
        new.__kwdefaults__, new.__annotations__ = old.__kwdefaults__, old.__annotations__
        new.__module__, new.__qualname__ = old.__module__, f"{old.__qualname__}_sleepy"
        space[name] = gluon.jit(new, do_not_specialize=kernel.do_not_specialize)
    return {name: space[name] for name in own}


def _of(kernel: Any, module: types.ModuleType) -> bool:
    return bool(kernel.fn.__module__ == module.__name__)


@contextlib.contextmanager
def instead(module: types.ModuleType, kernels: Mapping[str, Any]) -> Iterator[None]:
    """What the module launches by these names are these kernels."""
    before = {name: vars(module)[name] for name in kernels}
    vars(module).update(kernels)
    try:
        yield
    finally:
        vars(module).update(before)


def sleepy(module: types.ModuleType) -> contextlib.AbstractContextManager[None]:
    """The module's own kernels sleep before their waits."""
    return instead(module, sleepy_kernels(module))


def pairs_source(*, pauses: int = 0, sleepers: int = ALL_GROUPS, held: int = -1, fault: str = "") -> cuda_source.Source:
    """``decode_pairs.cu`` with sleeping warps, with a unit of the ring whose copy comes at the last moment, or with a
    fault that is kept as a control."""
    source = _wrong(fault) if fault else hopper_pairs.SOURCE
    return dataclasses.replace(source, macros=(("PAUSES", pauses), ("SLEEPERS", sleepers), ("HELD", held)))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Private, and gone with the process."""
    return tempfile.TemporaryDirectory(prefix="rlk-control-")


@functools.cache
def _wrong(fault: str) -> cuda_source.Source:
    text = hopper_pairs.SOURCE.text().decode()
    for right, wrong in FAULTS[fault]:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    path = Path(_folder().name) / f"{fault}.cu"
    path.write_text(text)
    return cuda_source.Source(path, hashlib.sha256(text.encode()).hexdigest())
