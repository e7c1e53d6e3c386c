"""Attention: forward and backward against cuDNN and flash, paged decode against the bytes of the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import Proof, Row
from benchmarks.gpu.device import Device
from benchmarks.gpu.limits import copy_rate, copy_time, read_time
from benchmarks.gpu.model import QWEN3_8B
from benchmarks.gpu.reading import contestants
from rl_engine.models.config import parse_config
from rl_engine.ops.attention import hopper_forward
from rl_engine.ops.attention.triton import ANCHOR, TILES, TritonAttention, by_head, decode_pages, store
from rl_engine.ops.layout import PackedLayout
from rl_engine.qualify.gpu.data import differing
from rl_engine.qualify.gpu.parts import operators

HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 64  # Qwen3-8B
LAYERS = parse_config(QWEN3_8B).layers
PACKED = ((4, 4096), (1, 16384))  # samples, tokens of each
CACHED = ((8, 1024), (8, 8192), (8, 32768), (16, 2048), (32, 4096), (64, 1024), (64, 8192), (64, 32768))


def prove(device: Device) -> Iterator[Proof]:
    """The cases of ``qualify``, and decode at the measured group and pages against the training form."""
    for case in operators(parse_config(QWEN3_8B), ("rl_engine.qualify.gpu_attention",)):
        yield Proof(f"{case.operator} {case.what}", case.elements, case.differing, case.control)
    device.check()
    length = 2100
    layout = PackedLayout((length,), (1,))
    q, k, v = (device.normal(length, n, WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS))
    out, lse = TritonAttention(ANCHOR).forward_packed(q, k, v, layout)
    keys, values, table = _pages(1, length)
    place = torch.arange(length, device="cuda")
    store(k, v, table[0, place // PAGE].long() * PAGE + place % PAGE, keys, values)
    last, last_lse, splits = torch.empty_like(out[-1:]), by_head(1, HEADS, out.device), -(-length // 1024)
    items = torch.tensor([[0, length - 1, 1, 0]], dtype=torch.int32, device="cuda")
    decode_pages(q[-1:], keys, values, items, table, 1, splits, length, last, last_lse, TILES[WIDTH])
    yield Proof("decode against the training form", last.numel(), differing(last, out[-1:]))
    yield Proof("decode's LSE against the training form", last_lse.numel(), differing(last_lse, lse[-1:]))
    if hopper_forward.available(keys.device):
        yield from _reading()


def _reading() -> Iterator[Proof]:
    """Whether the readers that decode is measured beside read every word: their xor against NumPy's."""
    pages = _pages(3, 1024)
    for x in pages[:2]:
        x.normal_()
    items = torch.tensor([[i, 1023, 1, i] for i in range(3)], dtype=torch.int32, device="cuda")
    words = numpy.concatenate([x.view(torch.int32).flatten().cpu().numpy() for x in pages[:2]])
    right, less = (int(numpy.bitwise_xor.reduce(x)) for x in (words, words[1:]))
    for waiting in (False, True):
        for name, (run, *_) in contestants([pages], items, waiting).items():
            assert isinstance(run, functools.partial)
            run()
            found = int(numpy.bitwise_xor.reduce(run.args[4].cpu().numpy()))
            yield Proof(name, 1, int(found != right))
            yield Proof("xor of all words but one", 1, int(found != less), control=True)


def _pages(samples: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, values, table) with pages in random order."""
    each = -(-length // PAGE)
    shape = (samples * each, KV_HEADS, PAGE, WIDTH)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    order = torch.randperm(samples * each, device="cuda").to(torch.int32)
    return keys, values, order.view(samples, each)


def measure(device: Device) -> Iterator[Row]:
    for samples, length in PACKED:
        yield from _packed(device, samples, length)
        torch.cuda.empty_cache()
    rate = copy_rate(device)
    torch.cuda.empty_cache()
    for samples, length in CACHED:
        yield from _decode(device, samples, length, rate)
        torch.cuda.empty_cache()


def _packed(device: Device, samples: int, length: int) -> Iterator[Row]:
    tokens, layout = samples * length, PackedLayout((length,) * samples, (samples,))
    q, k, v, dout = (device.normal(tokens, n, WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    ours = TritonAttention()
    forward = {"ours": [lambda: ours.forward_packed(q, k, v, layout)]}  # many in a row, so that no launch is waited for
    backward: dict[str, list[Callable[[], object]]] = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        for grouped in (True, False):
            what = f"{name}, {'grouped' if grouped else 'repeated'} heads"
            run, gradient = _native(backend, grouped, samples, length, q, k, v, dout)
            forward[what] = [run]
            if name == "cudnn":
                backward[what] = [gradient]
    times = device.times({name: runs * 8 for name, runs in forward.items()}, 0.1, graph=False)
    best = min(value for name, value in times.items() if name != "ours")
    flops = 2 * samples * HEADS * WIDTH * length * length
    size = f"{samples} x {length}"
    detail = {**times, "TFLOP/s": flops / times["ours"] / 1e6, "best TFLOP/s": flops / best / 1e6}
    baseline = "best of cuDNN and flash"
    yield Row(f"attention forward, causal, {size}", best / times["ours"], 0.75, 0.95, baseline, detail=detail)
    out, lse = ours.forward_packed(q, k, v, layout)
    backward["ours"] = [lambda: ours.backward_packed(dout, q, k, v, out, lse, layout)]
    times = device.times({name: runs * 4 for name, runs in backward.items()}, 0.15, graph=False)
    best = min(value for name, value in times.items() if name != "ours")
    detail = {**times, "TFLOP/s": 2.5 * flops / times["ours"] / 1e6, "best TFLOP/s": 2.5 * flops / best / 1e6}
    yield Row(
        f"attention backward, deterministic, {size}",
        *(best / times["ours"], 0.65, 0.85, "cuDNN, not deterministic"),
        detail=detail,
    )


def _native(
    backend: SDPBackend, grouped: bool, samples: int, length: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(forward, backward) of torch's attention. ``grouped`` hands over the KV heads as they are; otherwise they are
    repeated beforehand, which is not timed."""

    def dense(x: Tensor) -> Tensor:
        return x.view(samples, length, -1, WIDTH).transpose(1, 2)

    inputs = [dense(q), *(dense(x) if grouped else dense(x).repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))]
    leaves = [x.detach().requires_grad_() for x in inputs]

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)

    with sdpa_kernel(backend):
        out = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=grouped)
    gradient = dense(dout)
    return forward, lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)


def _layers(runs: list[Callable[[], object]]) -> list[Callable[[], object]]:
    """The calls of one pass: one for every layer, over the caches in turn."""
    return [runs[layer % len(runs)] for layer in range(LAYERS)]


def _decode(device: Device, samples: int, length: int, rate: float) -> Iterator[Row]:
    """A pass of the model's layers, one call each over several caches, in one graph; no key is written, so old ones
    may come early. Beside it a graph of one call a cache, where the graph's own start weighs more on each, and, on a
    Hopper, kernels that read the same pages in the same way and do nothing else."""
    moved = samples * length * KV_HEADS * WIDTH * 4
    sets = [_pages(samples, length) for _ in range(max(1, min(8, (400 << 20) // moved + 1)))]
    for keys, values, _ in sets:
        keys.normal_()
        values.normal_()
    q = device.normal(samples, HEADS, WIDTH)
    items = torch.tensor([[i, length - 1, 1, i] for i in range(samples)], dtype=torch.int32, device="cuda")
    out, counts = torch.empty_like(q), (1, -(-length // 1024), samples * length)

    def run(settled: bool, keys: Tensor, values: Tensor, table: Tensor) -> None:
        decode_pages(q, keys, values, items, table, *counts, out, None, TILES[WIDTH], settled=settled)

    early, late = ([functools.partial(run, settled, *pages) for pages in sets] for settled in (True, False))
    runs = {
        "us": _layers(early),
        "us, all keys after the last kernel": _layers(late),
        f"us, a graph of {len(sets)} calls": early,
    }
    times = device.times(runs, 0.02)
    ours = times["us"]
    reads: dict[str, float] = {}
    if hopper_forward.available(q.device):
        beside = {
            waiting: {name: _layers(reading) for name, reading in contestants(sets, items, waiting).items()}
            for waiting in (True, False)
        }
        reads = device.times({**beside[True], **beside[False]}, 0.02)
        read, free = (min(reads[name] for name in beside[waiting]) for waiting in (True, False))
        beside.clear()
    for made in (sets, runs, early, late):
        made.clear()
    torch.cuda.empty_cache()
    copied = copy_time(device, moved)
    detail = {**times, "limit us": moved / rate, "copy of as many bytes us": copied, "copy GB/s": rate / 1e3}
    detail["share of that copy"] = copied / ours
    detail["read of as many bytes us"] = read_time(device, moved)
    detail["share of that read"] = detail["read of as many bytes us"] / ours
    baseline = "bytes of K and V at the rate of the fastest copy"
    yield Row(f"paged decode, {samples} x {length}", moved / rate / ours, 0.85, 0.95, baseline, detail=detail)
    if reads:
        detail = {**reads, "us": read, "without waiting for the last kernel us": free, "decode us": ours}
        what = f"reading its pages and nothing else, {samples} x {length}"
        yield Row(what, moved / rate / read, None, None, baseline, detail=detail)
