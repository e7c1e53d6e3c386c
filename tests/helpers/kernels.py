"""Compiling Triton kernels for machines that are not here: one table entry per kernel and configuration."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

TARGETS = {"cuda:90": ("cuda", 90, 32), "hip:gfx942": ("hip", "gfx942", 64)}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compilation.

    Attributes:
        module, name: where the kernel is.
        arguments: run-time parameter -> type: ``*bf16``, ``*fp32``, ``i32``, ``fp32``, ``tensordesc<bf16[128,64]>``.
        constants: every other parameter.
        unaligned: parameters that are not known to be multiples of 16.
        layouts: constant -> shape of a block in shared memory: its default layout, also as ``{constant}`` in an
            argument's type (Gluon kernels).
        targets: where it must compile.
        fma: whether the kernel writes fused multiply-adds; without, the code may hold none.
    """

    module: str
    name: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    unaligned: tuple[str, ...] = ()
    layouts: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    targets: tuple[str, ...] = tuple(TARGETS)
    fma: bool = False

    def __str__(self) -> str:
        sizes = "x".join(str(v) for v in self.constants.values() if isinstance(v, int) and not isinstance(v, bool))
        return f"{self.name}-{sizes}-{self.warps}w{self.stages}s"


def _layouts(kernel: Kernel) -> dict[str, Any]:
    if not kernel.layouts:
        return {}
    from triton.experimental.gluon import language as gl

    default = gl.NVMMASharedLayout.get_default_for
    return {name: default(list(shape), gl.bfloat16) for name, shape in kernel.layouts.items()}


def compiled(kernel: Kernel, target: str) -> Any:
    """The compiled kernel; contraction off, as every launch has it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(kernel.module), kernel.name)
    names = function.arg_names
    assert set(names) == {*kernel.arguments, *kernel.constants, *kernel.layouts}, (kernel.name, names)
    layouts, make = _layouts(kernel), ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as make
    arguments = {name: kind.format(**layouts) for name, kind in kernel.arguments.items()}
    kinds = {name: arguments.get(name, "constexpr") for name in names}
    aligned = [n for n, kind in kernel.arguments.items() if kind[0] in "*i" and n not in kernel.unaligned]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = make(function, kinds, {**kernel.constants, **layouts}, attributes)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
