"""Selected logp on the GPU: one result whatever the rows, warps, chunks and groups per call; wrong sums are caught."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_engine.ops.lm_head.triton import TritonHead
from rl_engine.ops.selected_logp import LogpState, kept_logits
from rl_engine.ops.selected_logp import triton as kernels
from rl_engine.ops.selected_logp.triton import TritonLogp
from rl_engine.ops.selected_logp.vocabulary import group_columns, groups
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify.cases import Case
from rl_engine.qualify.gpu.data import Inputs, differing, poisoned
from rl_engine.qualify.gpu.logp_controls import fused_merge, wrong_state

VARIANTS = ((1, 1, 1), (2, 2, 2), (16, 1, 4), (1, 16, 8))  # rows, tiles, warps of a program


def prove(vocabulary: int, inputs: Inputs, rows: int = 37, hidden: int = 256) -> Iterator[Case]:
    """Bits of every variant against the anchor, and fp64 values with a tolerance."""
    anchor = TritonLogp()
    z = torch.randn((rows, vocabulary), generator=inputs.random, device="cuda") * 4
    targets = torch.randint(0, vocabulary, (rows,), generator=inputs.random, device="cuda")
    mask = random_mask(targets, vocabulary, inputs)
    c = torch.randn(rows, generator=inputs.random, device="cuda")
    for bits, kind in ((None, ""), (mask, ", retained set")):
        expected = anchor.from_logits(z, targets, 0.7, bits)
        for size in VARIANTS:
            found = variant(*size).from_logits(z, targets, 0.7, bits)
            for name, a, b in zip(("logp", "entropy"), found, expected, strict=True):
                yield _case(f"{name}{kind}, {size[0]} rows, {size[1]} tiles, {size[2]} warps", a, b)
        yield _case(
            f"logp{kind}, one row alone", anchor.from_logits(z[3:4], targets[3:4], 0.7, _row(bits))[0], expected[0][3:4]
        )
        state = LogpState.empty(rows, z.device)
        for first, last in groups(vocabulary):
            anchor.merge_columns(z[:, first:last], first, vocabulary, 0.7**-1, bits, targets, state)
        whole = LogpState.empty(rows, z.device)
        anchor.merge_columns(z, 0, vocabulary, 0.7**-1, bits, targets, whole)
        for name in ("m", "l", "w", "zs_target"):
            yield _case(f"{name}{kind}, group by group", getattr(state, name), getattr(whole, name))
        yield _close(f"logp{kind}, fp64", expected[0], exact_logp(z, targets, 0.7, bits))
        width = group_columns(vocabulary)
        dz = anchor.logits_gradient(z[:, :width], 0, 1.0, bits, targets, whole, c)
        last = min(300, width)
        first = min(128, last // 2)
        piece = z[5:6, first:last], first, 1.0, _row(bits, 5), targets[5:6], _part(whole, 5), c[5:6]
        yield _case(f"dz{kind}, a piece alone", anchor.logits_gradient(*piece), dz[5:6, first:last])
    yield from _chunks(anchor, vocabulary, inputs, rows, hidden)
    yield from _controls(z, vocabulary)


def _chunks(anchor: TritonLogp, vocabulary: int, inputs: Inputs, rows: int, hidden: int) -> Iterator[Case]:
    """From hidden states, chunk by chunk, against the whole logits."""
    weight = Weight("head", inputs.normal(vocabulary, hidden, scale=0.1), (Part("head", 0, vocabulary),))
    h, head = inputs.normal(rows, hidden), TritonHead()
    targets = torch.randint(0, vocabulary, (rows,), generator=inputs.random, device="cuda")
    z, whole = head.logits(h, weight), LogpState.empty(rows, h.device)
    anchor.merge_columns(z, 0, vocabulary, 1.0, None, targets, whole)
    c = torch.randn(rows, generator=inputs.random, device="cuda")
    sizes = kernels.CHUNK_BYTES, kernels.CHUNK_ROWS
    try:
        for size in (sizes, (4 * 128 * 10 * 5, 10), (4 * 128 * 7, 7)):
            kernels.CHUNK_BYTES, kernels.CHUNK_ROWS = size
            state = anchor.scan(h, weight, 1.0, None, targets, head)
            for name in ("m", "l", "w", "zs_target"):
                yield _case(f"{name}, chunks of {size[1]} rows", getattr(state, name), getattr(whole, name))
            for width in (hidden, 16):  # memory for the logits of every group, and of a few
                kept = kept_logits(poisoned(vocabulary, width, torch.float32), rows)
                state = anchor.scan(h, weight, 1.0, None, targets, head, kept)
                for name in ("m", "l", "w", "zs_target"):
                    what = f"{name}, {len(kept)} groups kept, chunks of {size[1]} rows"
                    yield _case(what, getattr(state, name), getattr(whole, name))
                for (first, last), logits in zip(groups(vocabulary), kept, strict=False):
                    yield _case(f"logits from {first}, kept in {width} columns", logits, z[:, first:last])
            first, last = groups(vocabulary)[:2][-1]
            expected = anchor.logits_gradient(z[:, first:last], first, 1.0, None, targets, whole, c)
            dz = anchor.group_gradient(h, weight, (first, last), 1.0, None, targets, whole, c, head)
            yield _case("dz in the product's epilogue", dz, expected)
            odd = _odd_view(h)  # what the copy engine cannot read goes chunk by chunk
            dz = anchor.group_gradient(odd, weight, (first, last), 1.0, None, targets, whole, c, head)
            yield _case(f"dz, chunks of {size[1]} rows", dz, expected)
    finally:
        kernels.CHUNK_BYTES, kernels.CHUNK_ROWS = sizes


def _controls(z: Tensor, vocabulary: int) -> Iterator[Case]:
    """A sum over warps, and contraction: both must be seen in l, in fp32."""
    width = min(group_columns(vocabulary), vocabulary)
    rows = z.shape[0]
    states = {}
    for warps in (1, 4):
        m, l, w = (torch.empty(rows, device="cuda") for _ in range(3))
        wrong_state(z[:, :width], m, l, w, 1.0, warps=warps, fusion=False)
        states[warps] = l
    partial = tuple(torch.empty((1, rows), device="cuda") for _ in range(3))
    state = LogpState.empty(rows, z.device)
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    TritonLogp().merge_columns(z[:, :width], 0, vocabulary, 1.0, None, targets, state)
    for warps, l in states.items():
        yield Case("selected_logp", "control", f"tl.sum, {warps} warps", rows, differing(l, state.l), True)
    for x in partial:
        x.copy_(torch.rand((1, rows), device="cuda") + 1)
    sides = []
    for fusion in (False, True):
        side = LogpState(*(torch.full((rows,), value, device="cuda") for value in (0.3, 1.7, 1.1, 0.0)))
        fused_merge(*partial, side, fusion=fusion)
        sides.append(torch.cat([side.l, side.w]))
    yield Case("selected_logp", "control", "contraction on", 2 * rows, differing(*sides), True)


def _odd_view(x: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16 bytes."""
    store = torch.full((x.shape[0], x.shape[1] + 3), torch.nan, dtype=x.dtype, device=x.device)
    store[:, 3:] = x
    return store[:, 3:]


def variant(rows: int, tiles: int, warps: int) -> TritonLogp:
    made = TritonLogp()
    made.rows, made.tiles, made.warps = rows, tiles, warps
    return made


def random_mask(targets: Tensor, vocabulary: int, inputs: Inputs) -> Tensor:
    """Packed bits, half of the columns; the targets are inside."""
    shape = (targets.numel(), -(-vocabulary // 8))
    mask = torch.randint(0, 256, shape, generator=inputs.random, device="cuda").to(torch.uint8)
    row = torch.arange(targets.numel(), device="cuda")
    mask[row, targets // 8] |= (1 << (targets % 8)).to(torch.uint8)
    return mask


def exact_logp(z: Tensor, targets: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    """fp64 log-probabilities of the targets."""
    scaled = z.double() / temperature
    if mask is not None:
        column = torch.arange(z.shape[1], device=z.device)
        scaled = scaled.masked_fill(((mask[:, column // 8].long() >> (column % 8)) & 1) == 0, -torch.inf)
    return scaled.log_softmax(1).gather(1, targets[:, None])[:, 0]


def _row(mask: Tensor | None, row: int = 3) -> Tensor | None:
    return None if mask is None else mask[row : row + 1]


def _part(state: LogpState, row: int) -> LogpState:
    return LogpState(*(x[row : row + 1] for x in (state.m, state.l, state.w, state.zs_target)))


def _case(what: str, a: Tensor, b: Tensor) -> Case:
    return Case("selected_logp", "triton", what, a.numel(), differing(a, b))


def _close(what: str, a: Tensor, b: Tensor) -> Case:
    """Values: 2e-5 absolute, some ulps of a logit of 40 and the approximate exp2's error over a long sum."""
    return Case("selected_logp", "triton", what, a.numel(), int(((a.double() - b).abs() > 2e-5).sum()))
