"""Selected logp and entropy: from hidden states with the head's products, from given logits, and its memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu import Proof, Row
from benchmarks.gpu.device import Device
from benchmarks.gpu.gemm import QWEN3_8B, qualified
from rl_engine.models.config import parse_config
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.selected_logp import LogpState
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify.gpu import logp as proof
from rl_engine.qualify.gpu.data import Inputs, differing

SOURCES = (
    *(
        "rl_engine/ops/triton_gemm.py",
        "rl_engine/ops/gluon_fold.py",
        "rl_engine/ops/cublaslt.py",
        "rl_engine/ops/gemm_table.py",
    ),
    *("rl_engine/ops/triton_functions.py", "rl_engine/ops/lm_head", "rl_engine/ops/selected_logp"),
    *("rl_engine/ops/linear/cublaslt.py", "rl_engine/qualify/gpu/logp.py", "benchmarks/gpu/logp.py"),
)
TOKENS, VOCABULARY, HIDDEN = 4096, QWEN3_8B["vocab_size"], QWEN3_8B["hidden_size"]
LAYOUT = PackedLayout((TOKENS,), (1,))


def baseline(z: Tensor, targets: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """What a trainer without fused kernels does with its logits; autograd does the rest."""
    logps = z.float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(-1)
    logp = logps.gather(1, targets[:, None])[:, 0]
    logp.backward(c)
    return logp, entropy


def prove(device: Device) -> Iterator[Proof]:
    """The variants of ``qualify``, and the whole score, forward and backward, table against Triton alone."""
    for case in proof.prove(VOCABULARY, Inputs(7)):
        yield Proof(f"{case.operator} {case.what}", case.elements, case.differing, case.control)
    device.check()
    qualified()
    weight, hidden, targets, c = _inputs(device, 1100, 20000)
    layout = PackedLayout((300, 1, 499, 300), (2, 1, 1))
    sides = []
    for products in ("cublaslt", "triton"):
        weight.enable_training()
        x = hidden.detach().requires_grad_()
        rows = torch.arange(0, 1100, device="cuda")[torch.arange(1100, device="cuda") % 3 != 1]
        head, logp = provider("lm_head", products), provider("selected_logp", "triton")
        found = logp.score(x, weight, targets[rows], 0.8, None, layout, rows, head)
        found[0].backward(c[rows])
        sides.append((*found, x.grad, weight.grad))
    for name, a, b in zip(("logp", "entropy", "dH", "dW"), *sides, strict=True):
        yield Proof(f"score {name}, table against Triton", a.numel(), differing(a.detach(), b.detach()))


def _inputs(device: Device, tokens: int, vocabulary: int) -> tuple[Weight, Tensor, Tensor, Tensor]:
    weight = Weight("head", device.normal(vocabulary, HIDDEN, scale=0.02), (Part("head", 0, vocabulary),))
    hidden = device.normal(tokens, HIDDEN)
    targets = torch.randint(0, vocabulary, (tokens,), generator=device.random, device="cuda")
    return weight, hidden, targets, torch.randn(tokens, generator=device.random, device="cuda")


def measure(device: Device) -> Iterator[Row]:
    qualified()
    weight, hidden, targets, c = _inputs(device, TOKENS, VOCABULARY)
    head, logp = provider("lm_head", "cublaslt"), provider("selected_logp", "triton")
    rows = torch.arange(TOKENS, device="cuda")
    hidden.requires_grad_()
    times, forward = _against_baseline(device, weight, hidden, targets, c, rows)
    detail = {"forward and backward": times, "forward": forward}
    yield Row(
        f"logp and entropy, forward and backward, {TOKENS} x {VOCABULARY}",
        *(times["baseline"] / times["ours"], 1.2, 1.6, "cuBLAS logits, fp32 log_softmax, gather, entropy, autograd"),
        detail=detail,
    )
    yield Row(
        f"logp and entropy, forward, {TOKENS} x {VOCABULARY}",
        *(forward["baseline"] / forward["ours"], None, None, "the same, without gradient"),
    )
    logits = 4 * TOKENS * VOCABULARY

    def kept() -> tuple[Tensor, Tensor]:
        found, entropy = logp.score(hidden, weight, targets, 1.0, None, LAYOUT, rows, head)
        found.backward(c)
        return found, entropy

    def peak() -> int:
        def run() -> None:
            kept()
            hidden.grad = None

        return device.peak(run)

    outputs = 2 * TOKENS * HIDDEN + 8 * TOKENS
    extra = peak() - outputs
    yield Row(
        "peak extra memory", extra / logits, 0.05, 0.035, "fp32 logits", at_most=True,
        detail={"extra bytes": extra, "output bytes": outputs, "logits bytes": logits},
    )  # fmt: skip
    hidden.grad = weight.grad = None
    torch.cuda.empty_cache()
    yield from _from_logits(device, targets, c)


Times = dict[str, float]


def _against_baseline(
    device: Device, weight: Weight, hidden: Tensor, targets: Tensor, c: Tensor, rows: Tensor
) -> tuple[Times, Times]:
    """Microseconds of (forward and backward, forward alone); hidden takes a gradient."""
    head, logp = provider("lm_head", "cublaslt"), provider("selected_logp", "triton")
    plain = weight.value.detach().requires_grad_()
    weight.enable_training()

    def native() -> None:
        baseline(hidden @ plain.T, targets, c)
        hidden.grad = plain.grad = None

    def ours() -> None:
        found, _ = logp.score(hidden, weight, targets, 1.0, None, LAYOUT, rows, head)
        found.backward(c)
        hidden.grad = None

    def ours_forward() -> None:
        with torch.no_grad():
            logp.score(hidden, weight, targets, 1.0, None, LAYOUT, rows, head)

    def native_forward() -> None:
        with torch.no_grad():
            logps = (hidden @ plain.T).float().log_softmax(-1)
            (-(logps.exp() * logps).sum(-1), logps.gather(1, targets[:, None]))

    both = device.times({"ours": [ours], "baseline": [native]}, 0.2, graph=False)
    return both, device.times({"ours": [ours_forward], "baseline": [native_forward]}, 0.1, graph=False)


def _from_logits(device: Device, targets: Tensor, c: Tensor) -> Iterator[Row]:
    """The logp part alone: forward and dz from fp32 logits; the limit is 8 bytes read and 2 written an element."""
    logp = provider("selected_logp", "triton")
    z = torch.randn((TOKENS, VOCABULARY), generator=device.random, device="cuda") * 2
    leaf = z.detach().requires_grad_()

    def native() -> None:
        baseline(leaf, targets, c)
        leaf.grad = None

    def forward() -> LogpState:
        state = LogpState.empty(TOKENS, z.device)
        logp.merge_columns(z, 0, VOCABULARY, 1.0, None, targets, state)
        logp.finish(state)
        return state

    def ours() -> None:
        logp.logits_gradient(z, 0, 1.0, None, targets, forward(), c)

    times = device.times({"ours": [ours], "forward": [forward], "baseline": [native]}, 0.1, graph=False)
    source, target = torch.empty(1 << 30, device="cuda"), torch.empty(1 << 30, device="cuda")
    copy = device.times({"copy": [lambda: target.copy_(source)]}, 0.05, graph=False)["copy"]
    rate = 8 * source.numel() / copy  # bytes a microsecond
    limit = 10 * z.numel() / rate
    detail = {**times, "copy GB/s": rate / 1e3, "limit us": limit, "share of limit": limit / times["ours"]}
    detail["forward's share of limit"] = 4 * z.numel() / rate / times["forward"]
    yield Row(
        "logp and entropy from given logits, forward and dz",
        *(times["baseline"] / times["ours"], 4.0, 0.85 * times["baseline"] / limit, "the same without products"),
        detail=detail,
    )


assert parse_config(QWEN3_8B).vocabulary == VOCABULARY
