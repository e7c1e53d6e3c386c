"""Linear layers of Qwen3-8B: the chain by the proven table against the best cuBLAS of any kind, forward, dX and dW."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu import Proof, Row
from benchmarks.gpu.device import Device, Run, copies
from benchmarks.gpu.model import QWEN3_8B
from benchmarks.gpu.table import qualified
from rl_engine.models.config import parse_config
from rl_engine.ops import cublaslt
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify.gpu.data import Inputs
from rl_engine.qualify.gpu.products import Folds, Products
from rl_engine.qualify.gpu.run import shapes

LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
# rows -> (must, aim) of the forward sum
FORWARD = {
    **{1: (0.82, 1.0), 8: (1.0, 1.05), 64: (0.92, 1.0), 128: (0.8, 1.0)},
    **dict.fromkeys((256, 512, 1024), (0.8, 0.97)),
    **dict.fromkeys((2048, 4096, 8192), (0.97, 1.0)),
    **dict.fromkeys((3, 37, 200, 700, 3001), (None, None)),  # odd rows, for the eye
}
PRODUCTS = ("product", "fold", "linear", "controls")  # operators of the cases that are matrix products
SEARCHED = 8  # algorithms of cuBLASLt, splits allowed, that the baseline may choose from


def prove(device: Device) -> Iterator[Proof]:
    """What ``qualify`` proves of products; refuted candidates are no fault, since none of them is chosen. Its other
    operators are counted by their own families."""
    device.check()
    found = qualified()
    for case in found.cases:
        if case.operator in PRODUCTS and (case.holds or case in found.failed):
            yield Proof(f"{case.operator} {case.what}", case.elements, case.differing, case.control)
    yield from _slices()


def _slices() -> Iterator[Proof]:
    """Column and depth slices of 8 tensor-parallel ranks at a small and a large row count, and rows of their dW."""
    for shape in shapes(parse_config(QWEN3_8B), (8,)):
        if shape.kind in ("logits", "dh"):
            continue
        prover = (Folds if shape.kind == "fold" else Products)(shape, Inputs(8))
        prover.choose((256, 4096) if shape.kind == "fold" else (8, 1024))
        for case in prover.cases:
            if case.holds:
                yield Proof(f"slice of 8, {case.what}", case.elements, case.differing)


def measure(device: Device) -> Iterator[Row]:
    found = qualified()
    yield Row("refuted candidates of all", len(found.refuted), None, None, f"{len(found.cases)} cases", at_most=True)
    for rows, (must, aim) in FORWARD.items():
        yield _row(device, f"GEMM forward {rows} rows, sum of four", must, aim, _forward, rows)
    for rows in (2048, 4096):
        yield _row(device, f"GEMM dX {rows} rows, sum of four", 0.97, 1.0, _input_gradient, rows)
    yield _row(device, "GEMM dW 4096 rows, one unit of all, sum of four", 0.97, 1.0, _one_unit, 4096)
    yield _row(device, "dW with its fold, 4 units of 4096, sum of four", 0.9, 1.0, _units(4096), 16384)
    yield _row(device, "dW with its fold, 16 units of 256, sum of four", 0.6, 0.9, _units(256), 4096)
    yield _row(device, "dW with its fold, 16 units of 251, sum of four", None, None, _units(251), 16 * 251)
    yield _decode_head(device)
    yield _host_time(device)


Contestants = dict[str, list[Run]]
Make = Callable[[Device, int, int, int], Contestants]


def _row(device: Device, name: str, must: float | None, aim: float | None, make: Make, rows: int) -> Row:
    """Sum over the four linears of the best cuBLAS, over the sum of ours."""
    detail, ours, best = {}, 0.0, 0.0
    for linear, (columns, depth) in LINEARS.items():
        times = device.times(make(device, rows, columns, depth))
        native = min(value for key, value in times.items() if key != "ours")
        ours, best = ours + times["ours"], best + native
        detail[linear] = {key: round(value, 2) for key, value in times.items()}
        torch.cuda.empty_cache()
    return Row(name, best / ours, must, aim, "best cuBLAS of any kind", detail=detail)


def _weight(value: Tensor) -> Weight:
    return Weight("w", value, (Part("w", 0, value.shape[0]),))


def _bf16(rows: int, columns: int) -> Tensor:
    return torch.empty((rows, columns), dtype=torch.bfloat16, device="cuda")


def _any_cublas(a: Tensor, b: Tensor, sets: list[tuple[Tensor, Tensor, Tensor]]) -> Contestants:
    """cuBLASLt's own ranking for ``out = a b^T``, splits and a workspace allowed."""
    space = torch.empty(cublaslt.WORKSPACE, dtype=torch.uint8, device="cuda")
    plan = cublaslt.plan(cublaslt.describe(a, b, sets[0][2]), 0)
    found: Contestants = {}
    for index, (algorithm, _) in enumerate(plan.search(SEARCHED, split=True)):
        raw = ctypes.create_string_buffer(algorithm, 64)
        found[f"cublaslt {index}"] = [lambda x=x, y=y, o=o, r=raw: plan(x, y, o, r, None, space) for x, y, o in sets]
    return found


def _forward(device: Device, rows: int, columns: int, depth: int) -> Contestants:
    count = copies(2 * (columns * depth + rows * (columns + depth)), 12)
    weights = [_weight(device.normal(columns, depth, scale=0.02)) for _ in range(count)]
    xs = [device.normal(rows, depth) for _ in weights]
    sets = [
        (x, w.value, torch.empty((rows, columns), dtype=torch.bfloat16, device="cuda"))
        for x, w in zip(xs, weights, strict=True)
    ]
    ours = provider("linear", "cublaslt")
    pairs = list(zip(xs, weights, strict=True))
    return {
        "ours": [lambda x=x, w=w: ours.forward(x, w, None) for x, w in pairs],
        "torch": [lambda x=x, w=w: torch.nn.functional.linear(x, w.value) for x, w in pairs],
        **_any_cublas(xs[0], weights[0].value, sets),
    }


def _input_gradient(device: Device, rows: int, columns: int, depth: int) -> Contestants:
    weights = [_weight(device.normal(columns, depth, scale=0.02)) for _ in range(2)]
    dys = [device.normal(rows, columns) for _ in weights]
    sets = [
        (y, w.value.T, torch.empty((rows, depth), dtype=torch.bfloat16, device="cuda"))
        for y, w in zip(dys, weights, strict=True)
    ]
    ours = provider("linear", "cublaslt")
    pairs = list(zip(dys, weights, strict=True))
    return {
        "ours": [lambda y=y, w=w: ours.input_gradient(y, w) for y, w in pairs],
        "torch": [lambda y=y, w=w: y @ w.value for y, w in pairs],
        **_any_cublas(dys[0], weights[0].value.T, sets),
    }


def _units(tokens: int) -> Make:
    """dW of whole fold units, added into the fp32 gradient, against one product over all tokens, bf16 or fp32."""

    def make(device: Device, rows: int, columns: int, depth: int) -> Contestants:
        dy, x = device.normal(rows, columns), device.normal(rows, depth)
        grad, narrow = torch.zeros((columns, depth), device="cuda"), _bf16(columns, depth)
        count, ours = rows // tokens, provider("linear", "cublaslt")
        layout = PackedLayout((tokens,) * count, (1,) * count)
        found = {
            "ours": [lambda: ours.add_weight_gradient(dy, x, layout, grad)],
            "torch": [lambda: torch.mm(dy.T, x, out=narrow)],
            **_any_cublas(dy.T, x.T, [(dy.T, x.T, narrow)]),
        }
        return {key: runs * 2 for key, runs in found.items()}

    return make


def _one_unit(device: Device, rows: int, columns: int, depth: int) -> Contestants:
    return _units(rows)(device, rows, columns, depth)


def _decode_head(device: Device) -> Row:
    """fp32 logits of 8 rows against cuBLAS' bf16 logits."""
    weight = _weight(device.normal(151936, 4096, scale=0.02))
    x, head = device.normal(8, 4096), provider("lm_head", "cublaslt")
    times = device.times({"ours": [lambda: head.logits(x, weight)], "torch": [lambda: torch.mm(x, weight.value.T)]})
    detail = {key: round(value, 2) for key, value in times.items()}
    return Row(
        "LM head fp32 logits, 8 rows", times["torch"] / times["ours"], None, None, "cuBLAS bf16 logits", detail=detail
    )


def _host_time(device: Device) -> Row:
    """What the host spends on one call of 8 rows outside a CUDA graph."""
    weight = _weight(device.normal(4096, 4096, scale=0.02))
    x, y = (device.normal(rows, 4096) for rows in (8, 128))
    ours = provider("linear", "cublaslt")
    spent = {}
    for name, run in {
        "ours": lambda: ours.forward(x, weight, None),
        "ours, 128 rows": lambda: ours.forward(y, weight, None),
        "torch": lambda: torch.nn.functional.linear(x, weight.value),
    }.items():
        for calls in (50, 400):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                run()
            spent[name] = (time.perf_counter() - started) / calls * 1e6
            torch.cuda.synchronize()
    detail = {f"{name} us": round(value, 1) for name, value in spent.items()}
    return Row("host time of one call, 8 rows", spent["ours"] / spent["torch"], None, None, "torch", True, detail)
