"""Every GPU kernel compiles for both targets on a machine without a GPU, with contraction off, products on the matrix
unit. A new kernel adds its entries to ``KERNELS``; a kernel without one fails ``test_no_kernel_is_left_out``."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest

from tests.helpers.kernels import TARGETS, Kernel, compiled
from tests.helpers.row_kernels import ROW_KERNELS

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
OPS = Path(__file__).resolve().parents[2] / "rl_engine" / "ops"

INT, LONG_ROWS = "i32", ("M",)
GEMM_ARGUMENTS = {"a": "*bf16", "b": "*bf16", "c": "*bf16", "r": "*bf16", "M": INT, "N": INT, "K": INT}
GEMM_ARGUMENTS |= {name: INT for name in ("sam", "sbn", "scm", "srm")}
GEMM_CONSTANTS = {"sak": 1, "sbk": 1, "scn": 1, "srn": 1, "GROUP": 8, "RESIDUAL": False, "EVEN": True}
FOLD_ARGUMENTS = {"g": "*fp32", "steps": "*i32", "COUNT": INT, "M": INT, "N": INT, "sg": INT}


def _gemm(rows: int, columns: int, depth: int, warps: int, stages: int, **changes: object) -> Kernel:
    constants = {**GEMM_CONSTANTS, "BM": rows, "BN": columns, "BK": depth, **changes}
    return Kernel(
        "rl_engine.ops.triton_gemm", "gemm_kernel", GEMM_ARGUMENTS, constants, warps, stages, unaligned=LONG_ROWS
    )


def _swapped(rows: int, columns: int, depth: int, warps: int, stages: int) -> Kernel:
    arguments = {name: kind for name, kind in GEMM_ARGUMENTS.items() if name not in ("scm", "srm")}
    constants = {name: value for name, value in GEMM_CONSTANTS.items() if name not in ("scn", "srn")}
    return Kernel(
        *("rl_engine.ops.triton_gemm", "swapped_kernel", {**arguments, "scn": INT, "srn": INT}),
        {**constants, "scm": 1, "srm": 1, "BM": rows, "BN": columns, "BK": depth},
        *(warps, stages),
        unaligned=("N",),
    )


def _tma(
    rows: int, columns: int, depth: int, warps: int, stages: int, a: bool, b: bool, name: str, **on: int
) -> Kernel:
    def tiles(outer: int, along: bool) -> str:
        return f"tensordesc<bf16[{outer},{depth}]>" if along else f"tensordesc<bf16[{depth},{outer}]>"

    arguments = {"a": tiles(rows, a), "b": tiles(columns, b), "c": "*bf16", "r": "*bf16"}
    arguments |= {key: INT for key in ("M", "N", "K", "scm", "srm")}
    constants = {"scn": 1, "srn": 1, "GROUP": 8, "RESIDUAL": True, "A_ROWS": a, "B_ROWS": b, "BM": rows, "BN": columns}
    constants |= {"BK": depth, "PROGRAMS": 0, "SPECIALIZE": False, **on}
    return Kernel(
        *("rl_engine.ops.triton_gemm", name, arguments, constants, warps, stages),
        unaligned=("M", "N"),
        targets=("cuda:90",),
    )


def _fold(rows: int, columns: int, depth: int, warps: int, stages: int, *, tma: bool) -> Kernel:
    sizes = {"BM": rows, "BN": columns, "BK": depth, "GROUP": 8}
    if tma:
        pair = {"dy": f"tensordesc<bf16[{depth},{rows}]>", "x": f"tensordesc<bf16[{depth},{columns}]>"}
        arguments, name, targets = {**pair, **FOLD_ARGUMENTS}, "fold_tma_kernel", ("cuda:90",)
    else:
        pointers = {"dy": "*bf16", "x": "*bf16", "sdy": INT, "sx": INT}
        arguments, name, targets = {**pointers, **FOLD_ARGUMENTS}, "fold_kernel", tuple(TARGETS)
    return Kernel(
        *("rl_engine.ops.triton_gemm", name, arguments, sizes, warps, stages), unaligned=("COUNT",), targets=targets
    )


def _bias_fold() -> Kernel:
    """The gradient of a bias: one column, whose strides are 1."""
    whole = _fold(128, 64, 64, 8, 3, tma=False)
    ones = {"N": 1, "sx": 1, "sg": 1}
    arguments = {name: kind for name, kind in whole.arguments.items() if name not in ones}
    return dataclasses.replace(whole, arguments=arguments, constants={**whole.constants, **ones})


LOGP = "rl_engine.ops.selected_logp.triton"
STATE = {"T": INT}
LOGP_ROWS = {"bits": "*u8", "targets": "*i64", "T": INT, "first": INT, "n": INT, "sbits": INT, "inv_t": "fp32"}
LOGP_UNALIGNED = ("T", "first", "sbits")
LOGP_KERNELS = [
    Kernel(
        *(LOGP, "logp_tiles_kernel"),
        {**LOGP_ROWS, **dict.fromkeys(("z", "ms", "ls", "ws", "zt"), "*fp32"), "at": INT, "sz": INT},
        {"R": 2, "TILES": 8, "N": 128, "HAS_MASK": mask},
        warps=4,
        stages=1,
        unaligned=(*LOGP_UNALIGNED, "at"),
    )
    for mask in (False, True)
] + [
    Kernel(
        *(LOGP, "logp_groups_kernel"),
        {**dict.fromkeys(("ms", "ls", "ws", "mg", "lg", "wg"), "*fp32"), "T": INT, "tiles": INT},
        {"GROUP": 75, "R": 64, "STAGES": 4},
        warps=2,
        stages=1,
        unaligned=("T", "tiles"),
    ),
    Kernel(
        *(LOGP, "dz_product_kernel"),
        {**LOGP_ROWS, **dict.fromkeys(("m", "l", "c"), "*fp32"), "dz": "*bf16", "K": INT, "sdz": INT}
        | {"h": "tensordesc<bf16[128,64]>", "weight": "tensordesc<bf16[256,64]>"},
        {"BM": 128, "BN": 256, "BK": 64, "GROUP": 8, "HAS_MASK": True},
        warps=8,
        unaligned=LOGP_UNALIGNED,
        targets=("cuda:90",),
    ),
    Kernel(
        *(LOGP, "logp_merge_kernel"),
        {name: "*fp32" for name in ("ms", "ls", "ws", "m_out", "l_out", "w_out")} | {**STATE, "groups": INT},
        {"R": 128},
        stages=1,
        unaligned=("T", "groups"),
    ),
    Kernel(
        *(LOGP, "logp_finish_kernel"),
        {name: "*fp32" for name in ("m", "l", "w", "zt", "logp", "entropy")} | STATE,
        {"R": 128},
        stages=1,
        unaligned=("T",),
    ),
    Kernel(
        *(LOGP, "logits_gradient_kernel"),
        {**LOGP_ROWS, **dict.fromkeys(("z", "m", "l", "c"), "*fp32"), "dz": "*bf16", "sz": INT, "sdz": INT},
        {"R": 4, "N": 1024, "HAS_MASK": True},
        warps=8,
        stages=1,
        unaligned=LOGP_UNALIGNED,
    ),
]

KERNELS: list[Kernel] = [
    _gemm(16, 32, 128, 4, 4),
    _gemm(16, 64, 128, 4, 3, EVEN=False),
    _gemm(64, 64, 64, 4, 3),
    _gemm(128, 128, 64, 8, 3, RESIDUAL=True),
    _swapped(64, 16, 128, 4, 5),
    _tma(64, 16, 256, 4, 5, True, True, "swapped_tma_kernel"),
    _tma(64, 64, 128, 4, 6, True, True, "gemm_tma_kernel"),
    _tma(128, 256, 64, 8, 3, True, False, "gemm_tma_kernel"),
    _tma(128, 128, 64, 8, 5, True, True, "gemm_tma_kernel", PROGRAMS=132),
    _fold(128, 128, 64, 8, 4, tma=True),
    _fold(128, 64, 64, 8, 3, tma=False),
    _bias_fold(),
    Kernel(
        *("rl_engine.ops.gluon_fold", "fold_specialized_kernel"),
        {"dy": "tensordesc<bf16[64,64],{AL}>", "x": "tensordesc<bf16[64,128],{BL}>", "grad": "*fp32"}
        | {name: kind for name, kind in FOLD_ARGUMENTS.items() if name != "g"},
        {"BM": 192, "BN": 128, "BK": 64, "S": 5, "G": 4},
        layouts={"AL": (64, 64), "BL": (64, 128)},
        unaligned=("COUNT",),
        targets=("cuda:90",),
    ),
    *LOGP_KERNELS,
    *ROW_KERNELS,
]


@needs_triton
@pytest.mark.parametrize(("kernel", "target"), [(k, t) for k in KERNELS for t in k.targets], ids=str)
def test_kernel_compiles(kernel: Kernel, target: str) -> None:
    code = compiled(kernel, target).asm
    if target.startswith("cuda"):
        assert kernel.fma or "fma.rn.f32" not in code["ptx"], "a fused multiply-add that nobody wrote"
        if kernel.module.endswith("triton_gemm"):
            assert "wgmma.mma_async" in code["ptx"] or "mma.sync" in code["ptx"]
            assert "tf32" not in code["ptx"]
    elif kernel.module.endswith("triton_gemm"):  # there the device library's own functions hold fused multiply-adds
        assert "v_mfma_f32" in code["amdgcn"]


@needs_triton
def test_contraction_would_be_seen() -> None:
    """The control: with fusion on, the tiles kernel holds fused multiply-adds."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rl_engine.ops.selected_logp.triton import logp_merge_kernel as function

    kernel = next(kernel for kernel in KERNELS if kernel.name == "logp_merge_kernel")
    kinds = {name: kernel.arguments.get(name, "constexpr") for name in function.arg_names}
    fused = triton.compile(
        ASTSource(function, kinds, dict(kernel.constants), {}),
        target=GPUTarget(*TARGETS["cuda:90"]),
        options={"num_warps": 4, "enable_fp_fusion": True},
    )
    assert "fma.rn.f32" in fused.asm["ptx"]


@needs_triton
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("rows", [4, 8])
def test_every_score_of_a_split_has_one_place(rows: int, warps: int) -> None:
    """And a row sum meets no other warp."""
    from rl_engine.ops.attention.hopper_paged import scores_layout

    layout = scores_layout(rows, warps)
    parts = (layout.reg_bases, layout.lane_bases, layout.warp_bases)
    assert [len(part) for part in parts][1:] == [5, warps.bit_length() - 1]
    places = {(0, 0, 0)}
    for block, row, key in [basis for part in parts for basis in part]:
        places |= {(b + block, r + row, n + key) for b, r, n in places}
    assert places == {(b, r, n) for b in range(16) for r in range(rows) for n in range(64)}
    assert not any(key for _, _, key in layout.warp_bases)


def test_no_kernel_is_left_out() -> None:
    """Every ``*_kernel`` of the operators that a launch can name has an entry."""
    found = set()
    for file in OPS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.name] if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found |= {name for name in names if name.endswith("_kernel")}
    assert found == {kernel.name for kernel in KERNELS if kernel.module.startswith("rl_engine.ops.")}
