"""Selected logp and entropy: from hidden states with the head's products, from given logits, and its memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu import Proof, Row
from benchmarks.gpu.device import Device
from benchmarks.gpu.model import QWEN3_8B
from benchmarks.gpu.table import qualified
from rl_engine.models.config import parse_config
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.selected_logp import LogpState
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify.gpu import logp as proof
from rl_engine.qualify.gpu.data import Inputs, differing

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
    """The variants of ``qualify``, and the whole score, forward and backward, by the table and with the logits kept,
    against Triton's tiles alone and logits computed again."""
    for case in proof.prove(VOCABULARY, Inputs(7)):
        yield Proof(f"{case.operator} {case.what}", case.elements, case.differing, case.control)
    device.check()
    qualified()
    weight, hidden, targets, c = _inputs(device, 1100, 20000)
    layout = PackedLayout((300, 1, 499, 300), (2, 1, 1))
    rows = torch.arange(0, 1100, device="cuda")[torch.arange(1100, device="cuda") % 3 != 1]
    mask = proof.random_mask(targets[rows], 20000, Inputs(8))
    for bits, kind in ((None, ""), (mask, ", retained set")):
        sides = []
        for products, cleared in (("cublaslt", True), ("cublaslt", False), ("triton", True), ("triton", False)):
            weight.enable_training()
            if not cleared:
                assert weight.grad is not None  # read: no logits are kept in it
            x, head = hidden.detach().requires_grad_(), provider("lm_head", products)
            found = provider("selected_logp", "triton").score(
                *(x, weight, targets[rows], 0.8, bits, layout, rows, head)
            )
            found[0].backward(c[rows])
            sides.append((f"{products}{', logits kept' if cleared else ''}", (*found, x.grad, weight.grad)))
        anchor = sides.pop()[1]
        for what, side in sides:
            for name, a, b in zip(("logp", "entropy", "dH", "dW"), side, anchor, strict=True):
                yield Proof(f"score {name}{kind}, {what}", a.numel(), differing(a.detach(), b.detach()))


def _inputs(device: Device, tokens: int, vocabulary: int) -> tuple[Weight, Tensor, Tensor, Tensor]:
    weight = Weight("head", device.normal(vocabulary, HIDDEN, scale=0.02), (Part("head", 0, vocabulary),))
    hidden = device.normal(tokens, HIDDEN)
    targets = torch.randint(0, vocabulary, (tokens,), generator=device.random, device="cuda")
    return weight, hidden, targets, torch.randn(tokens, generator=device.random, device="cuda")


def measure(device: Device) -> Iterator[Row]:
    qualified()
    weight, hidden, targets, c = _inputs(device, TOKENS, VOCABULARY)
    hidden.requires_grad_()
    weight.enable_training()
    task = _Task(weight, hidden, targets, c)
    first, later, forward = task.times(device)
    size = f"{TOKENS} x {VOCABULARY}"
    baseline_name = "cuBLAS logits, fp32 log_softmax, gather, entropy, autograd"
    yield Row(
        f"logp and entropy, forward and backward, {size}",
        *(first["baseline"] / first["ours"], 1.2, 1.6, baseline_name),
        detail={"a step's first micro-batch": first, "later ones": later, "forward": forward},
    )
    yield Row(
        f"logp and entropy, forward and backward into a gradient that holds others, {size}",
        *(later["baseline"] / later["ours"], None, None, f"{baseline_name}, added to its gradient"),
    )
    yield Row(
        f"logp and entropy, forward, {size}",
        *(forward["baseline"] / forward["ours"], None, None, "the same, without gradient"),
    )
    logits, outputs = 4 * TOKENS * VOCABULARY, 2 * TOKENS * HIDDEN + 8 * TOKENS
    extra = {name: device.peak(run) - outputs for name, run in (("first", task.first), ("later", task.later))}
    yield Row(
        "peak extra memory", max(extra.values()) / logits, 0.05, 0.035, "fp32 logits", at_most=True,
        detail={"extra bytes": extra, "output bytes": outputs, "logits bytes": logits},
    )  # fmt: skip
    hidden.grad = weight.grad = None
    del task
    torch.cuda.empty_cache()
    yield from _from_logits(device, targets, c)


Times = dict[str, float]


class _Task:
    """From hidden states to the gradients of them and of the head; the head's fp32 gradient is there beforehand."""

    def __init__(self, weight: Weight, hidden: Tensor, targets: Tensor, c: Tensor) -> None:
        self.weight, self.hidden, self.targets, self.c = weight, hidden, targets, c
        self.plain = weight.value.detach().requires_grad_()
        self.rows = torch.arange(TOKENS, device="cuda")
        self.head, self.logp = provider("lm_head", "cublaslt"), provider("selected_logp", "triton")

    def score(self) -> tuple[Tensor, Tensor]:
        return self.logp.score(self.hidden, self.weight, self.targets, 1.0, None, LAYOUT, self.rows, self.head)

    def first(self) -> None:
        """The step's first micro-batch: nothing was added to the gradient yet."""
        self.weight.clear_gradient()
        self.score()[0].backward(self.c)
        self.hidden.grad = None

    def later(self) -> None:
        assert self.weight.grad is not None  # read: no memory is lent
        self.score()[0].backward(self.c)
        self.hidden.grad = None

    def native(self, *, first: bool) -> None:
        if first:
            self.plain.grad = None
        baseline(self.hidden @ self.plain.T, self.targets, self.c)
        self.hidden.grad = None

    def times(self, device: Device) -> tuple[Times, Times, Times]:
        """Microseconds of (a first micro-batch, a later one, forward alone)."""

        def ours_forward() -> None:
            with torch.no_grad():
                self.score()

        def native_forward() -> None:
            with torch.no_grad():
                logps = (self.hidden @ self.plain.T).float().log_softmax(-1)
                (-(logps.exp() * logps).sum(-1), logps.gather(1, self.targets[:, None]))

        pairs = (
            (self.first, lambda: self.native(first=True), 0.25),
            (self.later, lambda: self.native(first=False), 0.15),
            (ours_forward, native_forward, 0.1),
        )
        found = [device.times({"ours": [a], "baseline": [b]}, seconds, graph=False) for a, b, seconds in pairs]
        self.plain.grad = None
        return found[0], found[1], found[2]


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
