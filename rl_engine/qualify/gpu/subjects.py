"""What ``stress`` repeats: every operator of a GPU in every form, each at sizes that a generator draws.

Sizes are drawn to be unlucky: every number of blocks in a split, 13 or more of them in most calls (more than the ring
of ``decode_pairs`` holds), ragged samples, odd slices of a model that tensor parallelism cuts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.numerics.contract import Contract
from rl_engine.ops import cublaslt, gemm_table, gluon_fold, triton_gemm
from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.attention import hopper_backward, hopper_decode, hopper_forward, hopper_paged, whole_runs
from rl_engine.ops.attention import triton as attention
from rl_engine.ops.gemm_table import Choice
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.lm_head.triton import TritonHead
from rl_engine.ops.operators import provider
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.rope.triton import can_fuse, qk_norm_rope, qk_norm_rope_backward
from rl_engine.ops.sample.triton import descending_mass
from rl_engine.ops.selected_logp import LogpState
from rl_engine.ops.selected_logp.triton import TritonLogp
from rl_engine.ops.selected_logp.vocabulary import groups
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify.gpu import delays
from rl_engine.qualify.gpu.data import Inputs, differing, poisoned
from rl_engine.qualify.gpu.logp import random_mask
from rl_engine.qualify.gpu.products import ANCHOR, Folds, Products, Shape, fold_tiles
from rl_engine.qualify.gpu.run import shapes
from rl_engine.qualify.gpu.stress import Subject, Trial

BLOCK, SPLIT = Contract().kv_block, Contract().kv_split
PAGE, CACHES, CALLS = 64, 4, 64
MOST_KEYS = 48 * 1024  # of all samples of a decode trial
Dice = random.Random
Make = Callable[[ModelConfig, Inputs, Dice], Trial]


def subjects(config: ModelConfig) -> list[Subject]:
    """Those that this device runs, controls last."""
    found = [*_decode_subjects(config), *_packed_subjects(config), *_product_subjects(), *_row_subjects(config)]
    return sorted(found, key=lambda subject: subject.control)


# -- decode over pages


@dataclasses.dataclass(frozen=True)
class Pages:
    """Caches that hold the same places of samples' keys, and what one decode of each reads."""

    k: list[Tensor]
    v: list[Tensor]
    q: Tensor
    new_k: Tensor
    new_v: Tensor
    items: Tensor
    table: Tensor
    slots: Tensor
    lengths: tuple[int, ...]

    @property
    def splits(self) -> int:
        return -(-max(self.lengths) // SPLIT)


def lengths(dice: Dice, samples: int) -> tuple[int, ...]:
    """Keys of every sample: equal or ragged; the longest has any number of splits up to 4 and ends in any block of one,
    two times in three in one of the last four."""
    most = MOST_KEYS // samples

    def one() -> int:
        last = dice.randint(12, 15) if dice.random() < 2 / 3 else dice.randint(0, 15)
        return min(dice.randint(0, 3) * SPLIT + last * BLOCK + dice.randint(1, BLOCK), most)

    longest = one()
    if dice.random() < 0.5:
        return (longest,) * samples
    return tuple(longest if i == 0 else min(one(), longest) for i in range(samples))


def pages(config: ModelConfig, inputs: Inputs, dice: Dice, page: int = PAGE) -> Pages:
    """Samples of some TP slice of the model."""
    kv_heads = config.kv_heads // dice.choice([n for n in (1, 2, 4, 8) if config.kv_heads % n == 0])
    return filled(config, inputs, dice, lengths(dice, dice.choice((1, 2, 3, 5, 8, 8, 13, 16, 32, 64))), kv_heads, page)


def filled(
    config: ModelConfig, inputs: Inputs, dice: Dice, held: tuple[int, ...], kv_heads: int, page: int = PAGE
) -> Pages:
    """Samples of these lengths in pages in random order; slots without a key hold NaN."""
    counts = [-(-length // page) for length in held]
    order = list(range(sum(counts)))
    dice.shuffle(order)
    rows = torch.zeros(len(held), max(counts), dtype=torch.int32)
    for i, count in enumerate(counts):
        rows[i, :count] = torch.tensor(order[:count])
        order = order[count:]
    shape = (sum(counts), kv_heads, page, config.head_dim)
    caches = [[inputs.normal(*shape) for _ in range(CACHES)] for _ in range(2)]
    slots = []
    for i, length in enumerate(held):
        last, used = int(rows[i, counts[i] - 1]), (length - 1) % page + 1
        for tensor in (*caches[0], *caches[1]):
            tensor[last, :, used:] = torch.nan
        slots.append(last * page + used - 1)
    heads = kv_heads * (config.heads // config.kv_heads)
    q = inputs.normal(2 * CACHES, len(held), heads, config.head_dim, scale=2.0)
    new = [inputs.normal(2 * CACHES, len(held), kv_heads, config.head_dim) for _ in range(2)]
    items = torch.tensor([[i, length - 1, 1, i] for i, length in enumerate(held)], dtype=torch.int32)
    device = [x.cuda() for x in (items, rows, torch.tensor(slots))]
    return Pages(*caches, q, *new, *device, held)


Run = Callable[[Pages, int, Tensor, bool], None]  # pages, number of the query, result, whether old keys may come early


def decode(
    config: ModelConfig, inputs: Inputs, p: Pages, run: Run, *, settled: bool, crowded: bool, what: str = ""
) -> Trial:
    """Store, decode and merge over several caches in turns, a cache's new key and query another one every time;
    ``crowded``: a product between. Expected are the results of the plain kernel."""
    x, w = inputs.normal(8, 4096), inputs.normal(4096, 4096)
    outs = torch.empty(CALLS, *p.q.shape[1:], dtype=torch.bfloat16, device="cuda")

    def stored(number: int) -> int:
        cache = number % CACHES
        attention.store(p.new_k[number], p.new_v[number], p.slots, p.k[cache], p.v[cache])
        return cache

    def body() -> Sequence[Tensor]:
        outs.fill_(torch.nan)
        for call in range(CALLS):
            number = call % (2 * CACHES)
            stored(number)
            run(p, number, outs[call], settled)
            if crowded:
                torch.mm(x, w)
        return [outs]

    right, tiles = torch.empty_like(outs[: 2 * CACHES]), attention.TILES[config.head_dim]
    tile = tiles.decode if p.k[0].shape[2] % BLOCK == 0 else tiles.scattered
    for number in range(2 * CACHES):
        cache = stored(number)
        places = (p.q[number], p.k[cache], p.v[cache], p.items, p.table, 1, p.splits, right[number], None, tile)
        attention.decode(*places)
    expected = [right.repeat(CALLS // (2 * CACHES), 1, 1, 1)]
    told = f"{p.lengths[0]} keys" if len(set(p.lengths)) == 1 else f"{min(p.lengths)} to {max(p.lengths)} keys"
    early, between = ", old keys early" if settled else "", ", a product between" if crowded else ""
    told = f"{len(p.lengths)} samples of {told}, {p.k[0].shape[1]} KV heads{early}{between}{what}"
    return Trial(told, CALLS, body, expected, stacked=True)


def drawn(config: ModelConfig, inputs: Inputs, dice: Dice, run: Run, page: int = PAGE, what: str = "") -> Trial:
    """:func:`decode` at sizes and in circumstances that the dice tell."""
    p = pages(config, inputs, dice, page)
    return decode(config, inputs, p, run, settled=dice.random() < 0.6, crowded=dice.random() < 0.3, what=what)


def by_form(form: hopper_paged.Form, p: Pages, number: int, out: Tensor, settled: bool, kernel: Any = None) -> None:
    """One decode in a form, its splits merged behind it."""
    c, cache = attention.scales(p.q.shape[-1])[0], number % CACHES
    places = (p.q[number], p.k[cache], p.v[cache], p.items, p.table, 1, p.splits, out, None, c, form, settled)
    states = hopper_paged.launch_states(*places, kernel=kernel)
    if states is not None:
        attention.merge(states, p.items, 1, out, None, True)


def _decode_subjects(config: ModelConfig) -> Iterator[Subject]:
    def plain(c: ModelConfig, inputs: Inputs, dice: Dice, page: int) -> Trial:
        def run(p: Pages, number: int, out: Tensor, settled: bool) -> None:
            cache, tile = number % CACHES, attention.TILES[c.head_dim].scattered
            places = (p.q[number], p.k[cache], p.v[cache], p.items, p.table, 1, p.splits, out, None, tile)
            attention.decode(*places)

        return drawn(c, inputs, dice, run, page)

    yield Subject("decode", "plain, pages of 16 keys", functools.partial(plain, page=16))
    group = config.heads // config.kv_heads
    if not _hopper() or config.head_dim not in (64, 128) or group > 8:
        return
    for name, form in hopper_paged.forms(config.head_dim).items():
        run = functools.partial(by_form, form)
        yield Subject("decode", name, functools.partial(drawn, run=run))
        yield Subject("decode", f"{name}, slow neighbours", functools.partial(_neighbours, run=run))
        if not form.pairs:
            yield Subject("decode", f"{name}, sleeping warps", functools.partial(_slow, form=form))
            continue
        yield Subject("decode", f"{name}, sleeping warps", functools.partial(_pairs, form=form, pauses=True))
        yield Subject("decode", f"{name}, a late copy", functools.partial(_pairs, form=form, late=True))
        yield Subject("decode", f"{name}, a turn unseen", functools.partial(_unseen, form=form), control=True)
        yield Subject("decode", f"{name}, freed unread", functools.partial(_unread, form=form), control=True)


def _neighbours(config: ModelConfig, inputs: Inputs, dice: Dice, run: Run) -> Trial:
    """The kernels ahead and behind start each other early and take long."""
    trial = drawn(config, inputs, dice, run)

    def body() -> Sequence[Tensor]:
        with delays.instead(attention, delays.slow_store_and_merge()):
            return trial.body()

    return dataclasses.replace(trial, body=body)


def _slow(config: ModelConfig, inputs: Inputs, dice: Dice, form: hopper_paged.Form) -> Trial:
    kernel = delays.sleepy_kernels(hopper_decode)["attention_units_kernel"]
    return drawn(config, inputs, dice, functools.partial(by_form, form, kernel=kernel))


def _pairs(
    config: ModelConfig, inputs: Inputs, dice: Dice, form: hopper_paged.Form, pauses: bool = False, late: bool = False
) -> Trial:
    held = dice.randint(0, 31) if late else -1
    mask, group = delays.ALL_WAITS if pauses else 0, delays.ALL_GROUPS
    if pauses and dice.random() < 0.7:  # one group alone falls behind the others
        group = 1 << dice.randint(0, 3)
    source = delays.pairs_source(pauses=mask, sleepers=group, held=held)
    what = f", unit {held} comes late" if late else f", groups {group:04b} sleep"
    return drawn(config, inputs, dice, functools.partial(by_form, form, kernel=source), what=what)


def _unseen(config: ModelConfig, inputs: Inputs, dice: Dice, form: hopper_paged.Form) -> Trial:
    """A wait for a turn whose forerunner nothing has waited for, and that one late: at 16 blocks of every split."""
    held = 6 if config.heads // config.kv_heads <= 4 else 0
    run = functools.partial(by_form, form, kernel=delays.pairs_source(held=held, fault="unseen"))
    p = filled(config, inputs, dice, (4 * SPLIT,), config.kv_heads)
    return decode(config, inputs, p, run, settled=True, crowded=False, what=f", unit {held} comes late")


def _unread(config: ModelConfig, inputs: Inputs, dice: Dice, form: hopper_paged.Form) -> Trial:
    """A slot that may be filled again before all of it has been read; seen beside copies."""
    run = functools.partial(by_form, form, kernel=delays.pairs_source(fault="unread"))
    kv_heads = max(n for n in (1, 2) if config.kv_heads % n == 0)
    p = filled(config, inputs, dice, (4 * SPLIT - 121,) * 8, kv_heads)
    return decode(config, inputs, p, run, settled=True, crowded=False)


# -- attention over joined samples, forward and backward


def _packed_subjects(config: ModelConfig) -> Iterator[Subject]:
    others = {
        config.head_dim: dataclasses.replace(attention.TILES[config.head_dim], hopper=0, hopper_dq=None, hopper_dkv=0)
    }
    for which, make in (("forward", _forward), ("backward", _backward)):
        yield Subject(f"attention {which}", "tiles", functools.partial(make, tested=attention.TritonAttention(others)))
        if _hopper() and config.head_dim in (64, 128):
            tested = attention.TritonAttention()
            yield Subject(f"attention {which}", "Hopper", functools.partial(make, tested=tested))
            module = hopper_forward if which == "forward" else hopper_backward
            slow = functools.partial(make, tested=tested, within=functools.partial(delays.sleepy, module))
            yield Subject(f"attention {which}", "Hopper, sleeping warps", slow)


def _samples(dice: Dice) -> PackedLayout:
    held = [dice.choice((1, 63, 64, 65, 127, 129, dice.randint(2, 700), dice.randint(200, 1500))) for _ in range(4)]
    first = dice.randint(1, 3)
    return PackedLayout(tuple(held), (first, 4 - first))


def _joined(config: ModelConfig, inputs: Inputs, dice: Dice, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = config.kv_heads // dice.choice([n for n in (1, 2, 4) if config.kv_heads % n == 0])
    heads, width = kv_heads * (config.heads // config.kv_heads), config.head_dim
    return inputs.normal(tokens, heads, width, scale=2.0), *(inputs.normal(tokens, kv_heads, width) for _ in range(2))


def _forward(
    config: ModelConfig,
    inputs: Inputs,
    dice: Dice,
    tested: attention.TritonAttention,
    within: Callable[[], Any] = contextlib.nullcontext,
) -> Trial:
    layout = _samples(dice)
    q, k, v = _joined(config, inputs, dice, layout.tokens)

    def body() -> Sequence[Tensor]:
        with within():
            return [x for _ in range(4) for x in tested.forward_packed(q, k, v, layout)]

    expected = attention.TritonAttention(attention.ANCHOR).forward_packed(q, k, v, layout)
    return Trial(f"samples of {layout.lengths}, {q.shape[1]} heads", 4, body, expected * 4)


def _backward(
    config: ModelConfig,
    inputs: Inputs,
    dice: Dice,
    tested: attention.TritonAttention,
    within: Callable[[], Any] = contextlib.nullcontext,
) -> Trial:
    layout, anchor = _samples(dice), attention.TritonAttention(attention.ANCHOR)
    q, k, v = _joined(config, inputs, dice, layout.tokens)
    dout = inputs.normal(*q.shape)
    out, lse = anchor.forward_packed(q, k, v, layout)
    places = (dout, q, k, v, lse, anchor.delta(dout, out), layout, whole_runs(layout), torch.float32)

    def body() -> Sequence[Tensor]:
        with within():
            return [x for _ in range(2) for x in tested.gradients(*places)]

    return Trial(f"samples of {layout.lengths}, {q.shape[1]} heads", 2, body, anchor.gradients(*places) * 2)


# -- products


def _product_subjects() -> Iterator[Subject]:
    for kind in ("forward", "residual", "dx", "logits", "dh"):
        yield Subject(f"product {kind}", "tiles", functools.partial(_product, kind=kind, library=False))
        if torch.version.cuda is not None:
            yield Subject(f"product {kind}", "cuBLASLt", functools.partial(_product, kind=kind, library=True))
    yield Subject("weight gradient", "tiles", functools.partial(_fold, specialized=False))
    if any(tile.specialize for tile in fold_tiles()):
        yield Subject("weight gradient", "warps apart", functools.partial(_fold, specialized=True))
        slow = functools.partial(_fold, specialized=True, within=functools.partial(delays.sleepy, gluon_fold))
        yield Subject("weight gradient", "warps apart, sleeping", slow)


def _shape(config: ModelConfig, dice: Dice, kind: str) -> Shape:
    sizes = [n for n in (1, 2, 4, 8) if config.kv_heads % n == 0 and config.intermediate % n == 0]
    found = [shape for shape in shapes(config, sizes) if shape.kind == kind]
    return dice.choice(found)


def _product(config: ModelConfig, inputs: Inputs, dice: Dice, kind: str, library: bool) -> Trial:
    shape = _shape(config, dice, kind)
    prover, most = Products(shape, inputs), 64 if shape.columns >= 16384 else 1024
    rows = dice.choice((1, 7, 8, 16, 33, 64, dice.randint(1, most), dice.randint(1, most)))
    a, b, old = prover.data("random", rows)
    right = prover.anchor(a, b, old).to(prover.dtype)
    out = torch.empty_like(right)
    candidates = [c for c in prover.candidates(a, b, out, old) if (c.tile is None) == library]
    dice.shuffle(candidates)
    choice = next((c for c in candidates if _same(c, a, b, old, right)), None) or Choice(ANCHOR, None)

    def body() -> Sequence[Tensor]:
        found = []
        for _ in range(8):
            into = old.clone() if kind == "dh" and old is not None else torch.empty_like(right)
            gemm_table.run(choice, a, b, into, into if kind == "dh" else old)
            found.append(into)
        return found

    name = str(choice.tile or (choice.algorithm or "")[:16])
    return Trial(f"{shape} {rows} rows, {name}", 8, body, [right] * 8)


def _same(choice: Choice, a: Tensor, b: Tensor, old: Tensor | None, right: Tensor) -> bool:
    """Whether a candidate has the contract's bits at all; one that does not is refuted in the proof."""
    out = right.clone() if old is None else old.clone()
    try:
        gemm_table.run(choice, a, b, out, out if right.dtype == torch.float32 and old is not None else old)
    except (cublaslt.Refused, RuntimeError):
        return False
    return differing(out, right) == 0


def _fold(
    config: ModelConfig,
    inputs: Inputs,
    dice: Dice,
    specialized: bool,
    within: Callable[[], Any] = contextlib.nullcontext,
) -> Trial:
    shape = _shape(config, dice, "fold")
    columns = min(shape.columns, 4096)
    prover = Folds(dataclasses.replace(shape, columns=columns), inputs)
    tile = dice.choice([tile for tile in fold_tiles() if tile.specialize == specialized])
    ends, units = 0, []
    for _ in range(dice.randint(1, 4)):
        first, ends = ends, ends + dice.choice((1, 37, 64, 256, dice.randint(1, 1500)))
        units.append((first, ends))
    dy, x = inputs.normal(ends, columns), inputs.normal(ends, shape.depth)
    start = torch.randn((columns, shape.depth), generator=inputs.random, device="cuda")
    right = start.clone()
    for first, last in units:
        chain = poisoned(columns, shape.depth, torch.float32)
        triton_gemm.product(dy[first:last].T, x[first:last].T, chain, ANCHOR)
        right += chain

    def body() -> Sequence[Tensor]:
        found = []
        with within():
            for _ in range(2):
                found.append(start.clone())
                triton_gemm.fold(dy, x, found[-1], tuple(units), tile)
        return found

    return Trial(f"{prover.shape} units {units}, {tile}", 2, body, [right] * 2)


# -- rows, the loss, the draw, the update


def _row_subjects(config: ModelConfig) -> Iterator[Subject]:
    makes: dict[str, Make] = {"norm": _norm, "SwiGLU": _swiglu, "logp": _logp, "draw": _draw, "AdamW": _adamw}
    makes |= {"gradient norm": _grad_norm, "lookups": _lookups}
    if config.qk_norm and can_fuse(config.head_dim):
        makes["QK norm and RoPE"] = _rotation
    for name, make in makes.items():
        yield Subject(name, "triton", make, captured=name not in ("lookups", "logp"))


def _gain(inputs: Inputs, width: int) -> Weight:
    weight = Weight("gain", inputs.normal(width), (Part("gain", 0, width),))
    weight.grad = torch.zeros(width, device="cuda")
    return weight


def _norm(config: ModelConfig, inputs: Inputs, dice: Dice) -> Trial:
    layout, tested = _samples(dice), provider("rms_norm", "triton")
    x, dy = (inputs.normal(layout.tokens, config.hidden) for _ in range(2))
    weight, branch = _gain(inputs, config.hidden), torch.randn(x.shape, generator=inputs.random, device="cuda")

    def body() -> Sequence[Tensor]:
        assert weight.grad is not None
        weight.grad.zero_()
        dx = tested.backward_with_gain(dy, x, weight, config.norm_eps, layout, x)
        forward = tested.forward(x, weight, config.norm_eps)
        return [forward, *tested.forward_residual(x, branch, weight, config.norm_eps), dx, weight.grad.clone()]

    return Trial(f"{layout.tokens} x {config.hidden}", 3, body)


def _rotation(config: ModelConfig, inputs: Inputs, dice: Dice) -> Trial:
    layout, eps = _samples(dice), config.norm_eps
    q, k, _ = _joined(config, inputs, dice, layout.tokens)
    dq, dk, gains = inputs.normal(*q.shape), inputs.normal(*k.shape), [_gain(inputs, config.head_dim) for _ in range(2)]
    host = RopeTable.build(config.inverse_frequencies(), max(layout.lengths))
    table, positions = RopeTable(host.cosine.cuda(), host.sine.cuda()), layout.positions.cuda()

    def body() -> Sequence[Tensor]:
        grads = [gain.grad for gain in gains if gain.grad is not None]
        for grad in grads:
            grad.zero_()
        back = qk_norm_rope_backward(dq, dk, q, k, gains[0], gains[1], eps, positions, table, layout)
        forward = qk_norm_rope(q, k, gains[0], gains[1], eps, positions, table)
        return [*forward, *back, *(grad.clone() for grad in grads)]

    return Trial(f"{layout.tokens} tokens, {q.shape[1]} and {k.shape[1]} heads", 2, body)


def _swiglu(config: ModelConfig, inputs: Inputs, dice: Dice) -> Trial:
    rows, width, tested = (
        dice.randint(1, 2000),
        config.intermediate // dice.choice((1, 2, 4)),
        provider("swiglu", "triton"),
    )
    x, da = inputs.normal(rows, 2 * width, scale=3.0), inputs.normal(rows, width)
    return Trial(f"{rows} x {width}", 2, lambda: [tested.forward(x), tested.backward(da, x)])


def _logp(config: ModelConfig, inputs: Inputs, dice: Dice) -> Trial:
    rows, hidden, vocabulary, tested = dice.randint(1, 200), 256, config.vocabulary, TritonLogp()
    weight = Weight("head", inputs.normal(vocabulary, hidden, scale=0.1), (Part("head", 0, vocabulary),))
    h, head = inputs.normal(rows, hidden), TritonHead()
    targets = torch.randint(0, vocabulary, (rows,), generator=inputs.random, device="cuda")
    mask = random_mask(targets, vocabulary, inputs) if dice.random() < 0.5 else None
    c, inv_t = torch.randn(rows, generator=inputs.random, device="cuda"), 1 / 0.7

    def body() -> Sequence[Tensor]:
        state: LogpState = tested.scan(h, weight, inv_t, mask, targets, head)
        dz = tested.group_gradient(h, weight, group, inv_t, mask, targets, state, c, head)
        return [*tested.finish(state), state.l, dz]

    group = dice.choice(groups(vocabulary))
    return Trial(f"{rows} rows{', a retained set' if mask is not None else ''}", 2, body)


def _draw(config: ModelConfig, inputs: Inputs, dice: Dice) -> Trial:
    rows, tested = dice.choice((1, 8, 64, dice.randint(1, 64))), provider("sample", "triton")
    z = torch.randn(rows, config.vocabulary, generator=inputs.random, device="cuda") * 3
    words = torch.randint(0, 2**31 - 1, (rows, 5), generator=inputs.random, device="cuda").to(torch.int32)
    ordered = z.sort(1, descending=True).values
    return Trial(f"{rows} rows", 2, lambda: [*tested.best_of(z, 0, 1 / 0.7, None, words), descending_mass(ordered)])


def _adamw(config: ModelConfig, inputs: Inputs, dice: Dice) -> Trial:
    size, tested = dice.randint(1, 1 << 22), provider("adamw", "triton")
    state = [torch.randn(size, generator=inputs.random, device="cuda") for _ in range(4)]
    state[2] = state[2].abs()
    scalars = AdamScalars.at(3, 1e-3, 0.9, 0.95, 1e-8, 0.1)

    def body() -> Sequence[Tensor]:
        master, m, v = (x.clone() for x in state[:3])
        weight = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
        changed = tested.update(master, m, v, state[3], weight, 0.5, scalars)
        return [master, m, v, weight, changed]

    return Trial(f"{size} elements", 1, body)


def _grad_norm(config: ModelConfig, inputs: Inputs, dice: Dice) -> Trial:
    size, tested = dice.randint(1, 1 << 23), provider("grad_norm", "triton")
    x = torch.randn(size, generator=inputs.random, device="cuda")
    if dice.random() < 0.5:
        x *= torch.exp2(torch.randint(-30, 20, (size,), generator=inputs.random, device="cuda").float())
    return Trial(f"{size} elements", 1, lambda: [tested.bins(x)])


def _lookups(config: ModelConfig, inputs: Inputs, dice: Dice) -> Trial:
    tokens, tested = dice.randint(1, 4000), provider("embedding", "triton")
    ids = torch.randint(0, dice.choice((3, 50, 4000)), (tokens,), generator=inputs.random, device="cuda")
    rows = inputs.normal(tokens, config.hidden)

    def body() -> Sequence[Tensor]:
        grad = torch.zeros(4000, config.hidden, device="cuda")
        tested.lookup_gradient(ids, rows, grad)
        return [grad]

    return Trial(f"{tokens} tokens", 1, body)


def _hopper() -> bool:
    return hopper_forward.available(torch.device("cuda"))
