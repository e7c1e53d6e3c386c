"""Row operators against the bytes they must move: norms, QK norm with RoPE, SwiGLU, and the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu import Proof, Row
from benchmarks.gpu.device import Device
from benchmarks.gpu.limits import copy_rate, copy_time
from benchmarks.gpu.model import QWEN3_8B
from rl_engine.models.config import parse_config
from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.adamw.triton import TritonAdam
from rl_engine.ops.grad_norm.triton import TritonNormBins
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.rms_norm.triton import TritonNorm
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.rope.triton import qk_norm_rope, qk_norm_rope_backward
from rl_engine.ops.swiglu.triton import TritonSwiglu
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify.gpu.data import differing
from rl_engine.qualify.gpu.parts import operators

TOKENS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 16384, 4096, 12288, 32, 8, 128  # Qwen3-8B
EPS, SETS = 1e-6, 3
ELEMENTS = 8192 * INNER  # of an update: 100 million
LAYOUT = PackedLayout((1024,) * 16, (4,) * 4)


def _gain(width: int, device: Device) -> Weight:
    return Weight("gain", device.normal(width), (Part("gain", 0, width),))


def _table(positions: int) -> RopeTable:
    table = RopeTable.build(1.0 / 1e6 ** (torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH), positions)
    return RopeTable(table.cosine.cuda(), table.sine.cuda())


def prove(device: Device) -> Iterator[Proof]:
    """The cases of ``qualify``, and the fused rotation against the separate operators."""
    for case in operators(parse_config(QWEN3_8B), ("rl_engine.qualify.gpu_rows",)):
        yield Proof(f"{case.operator} {case.what}", case.elements, case.differing, case.control)
    device.check()
    q, k = device.normal(431, HEADS, WIDTH), device.normal(431, KV_HEADS, WIDTH)
    table, weights = _table(431), (_gain(WIDTH, device), _gain(WIDTH, device))
    positions = torch.arange(431, device="cuda")
    normed = provider("qk_norm", "triton").forward(q, weights[0], EPS)
    separate = provider("rope", "triton").rotate(normed, positions, table, 1.0)
    fused = qk_norm_rope(q, k, *weights, EPS, positions, table)[0]
    yield Proof("QK norm and RoPE, fused against separate", q.numel(), differing(fused, separate))


def measure(device: Device) -> Iterator[Row]:
    rate = copy_rate(device)
    torch.cuda.empty_cache()
    tokens, elements = f"{TOKENS} tokens", f"{ELEMENTS} elements"
    for family, size in ((_norms, tokens), (_rotations, tokens), (_swiglu, tokens), (_update, elements)):
        for name, moved, runs, bounds in family(device):
            ours = device.times({"ours": runs}, 0.02)["ours"]
            copied = copy_time(device, moved)
            detail = {"us": ours, "limit us": moved / rate, "copy of as many bytes us": copied}
            detail |= {"share of that copy": copied / ours, "copy GB/s": rate / 1e3}
            baseline = "each input read once, each output written once, at the rate of the fastest copy"
            must, aim = (0.85, 0.95) if bounds else (None, None)
            yield Row(f"{name}, {size}", moved / rate / ours, must, aim, baseline, detail=detail)
        torch.cuda.empty_cache()


Case = tuple[str, int, list[Callable[[], object]], bool]


def _norms(device: Device) -> Iterator[Case]:
    norm, gain = TritonNorm(), _gain(HIDDEN, device)
    xs, dys = ([device.normal(TOKENS, HIDDEN) for _ in range(SETS)] for _ in range(2))
    branches = [torch.randn((TOKENS, HIDDEN), generator=device.random, device="cuda") for _ in range(SETS)]
    elements = TOKENS * HIDDEN
    yield "norm forward", 4 * elements, [lambda x=x: norm.forward(x, gain, EPS) for x in xs], True
    pairs = list(zip(xs, branches, strict=True))
    residual = [lambda x=x, b=b: norm.forward_residual(x, b, gain, EPS) for x, b in pairs]
    yield "norm with residual, forward", 10 * elements, residual, True
    both = list(zip(xs, dys, strict=True))
    yield "norm backward", 6 * elements, [lambda x=x, d=d: norm.backward(d, x, gain, EPS, False) for x, d in both], True
    gain.grad = torch.zeros(HIDDEN, device="cuda")
    with_gain = [lambda x=x, d=d: norm.backward_with_gain(d, x, gain, EPS, LAYOUT, None) for x, d in both]
    yield "norm backward with the gain's gradient", 6 * elements, with_gain, False
    added = [lambda x=x, d=d: norm.backward_with_gain(d, x, gain, EPS, LAYOUT, d) for x, d in both]
    yield "norm with residual, backward with the gain's gradient", 8 * elements, added, False


def _rotations(device: Device) -> Iterator[Case]:
    slabs = [device.normal(TOKENS, HEADS + 2 * KV_HEADS, WIDTH) for _ in range(SETS)]
    inputs: list[tuple[Tensor, Tensor]] = [(x[:, :HEADS], x[:, HEADS : HEADS + KV_HEADS]) for x in slabs]
    table, weights = _table(1024), (_gain(WIDTH, device), _gain(WIDTH, device))
    positions, elements = LAYOUT.positions.cuda(), TOKENS * (HEADS + KV_HEADS) * WIDTH
    forward = [lambda q=q, k=k: qk_norm_rope(q, k, *weights, EPS, positions, table) for q, k in inputs]
    yield "QK norm and RoPE, forward", 4 * elements, forward, True
    grads = [(device.normal(TOKENS, HEADS, WIDTH), device.normal(TOKENS, KV_HEADS, WIDTH)) for _ in range(SETS)]

    def backward() -> list[Callable[[], object]]:
        return [
            lambda g=g, x=x: qk_norm_rope_backward(*g, *x, *weights, EPS, positions, table, LAYOUT)
            for g, x in zip(grads, inputs, strict=True)
        ]

    yield "QK norm and RoPE, backward", 6 * elements, backward(), True
    for weight in weights:
        weight.grad = torch.zeros(WIDTH, device="cuda")
    yield "QK norm and RoPE, backward with the gains' gradients", 6 * elements, backward(), False


def _swiglu(device: Device) -> Iterator[Case]:
    swiglu = TritonSwiglu()
    xs = [device.normal(TOKENS, 2 * INNER) for _ in range(2)]
    das = [device.normal(TOKENS, INNER) for _ in range(2)]
    elements = TOKENS * INNER
    yield "SwiGLU forward", 6 * elements, [lambda x=x: swiglu.forward(x) for x in xs], True
    backward = [lambda d=d, x=x: swiglu.backward(d, x) for d, x in zip(das, xs, strict=True)]
    yield "SwiGLU backward", 10 * elements, backward, True


def _update(device: Device) -> Iterator[Case]:
    def normal(scale: float) -> Tensor:
        return torch.randn(ELEMENTS, generator=device.random, device="cuda") * scale

    norm, adam = TritonNormBins(), TritonAdam()
    grads = [normal(1e-4) for _ in range(SETS)]
    yield "gradient norm, sum of squares", 4 * ELEMENTS, [lambda g=g: norm.bins(g) for g in grads], False
    scalars = AdamScalars.at(3, 1e-5, 0.9, 0.95, 1e-8, 0.1)
    states = [(normal(0.02), normal(1e-4), normal(1e-4).square(), grad) for grad in grads[:2]]
    sets = [(*state, state[0].bfloat16()) for state in states]
    runs = [lambda x=x: adam.update(*x, 0.7, scalars) for x in sets]
    yield "AdamW with changed weights counted", 30 * ELEMENTS, runs, False
