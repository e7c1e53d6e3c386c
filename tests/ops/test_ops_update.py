"""The update: exact gradient norm, clip factor, AdamW."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.grad_norm import NonFiniteGradient, clip_factor, joined, norm_from_bins
from tests.helpers.numeric import assert_bitwise, assert_close
from tests.helpers.ops import (
    THREADS,
    differing,
    f32_randn,
    generator,
    hardest_square,
    kernel_threads,
    operators,
)

LARGEST = 3.4028234663852886e38


def bits_of_every_exponent(count: int, seed: int) -> Tensor:
    """Finite fp32 values of all signs and magnitudes, subnormal ones and both zeros included."""
    bits = torch.randint(0, 0x7F800000, (count,), generator=generator(seed), dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    x[:4] = torch.tensor([0.0, -0.0, 1.4e-45, LARGEST])
    return torch.where(torch.rand(count, generator=generator(seed + 1)) < 0.5, x, -x)


def exact_norm(x: Tensor) -> float:
    """Squares of fp32 are exact in fp64, and fsum rounds their exact sum once."""
    return math.sqrt(math.fsum(value * value for value in x.double().flatten().tolist()))


GRADIENTS = {
    "one": lambda: torch.tensor([0.1]),
    "normal": lambda: f32_randn(70_001, seed=1),
    "every exponent": lambda: bits_of_every_exponent(50_003, 2),
    "subnormal": lambda: f32_randn(1001, seed=3) * 1e-41,
    "smallest": lambda: torch.full((3,), 1.4e-45),
    "largest": lambda: torch.full((40_000,), LARGEST),
    "zero": lambda: torch.zeros(17),
    "cancelled by rounding": lambda: torch.cat([torch.tensor([2.0**60]), torch.full((5000,), 1.0)]),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_norm_is_the_exact_sum_of_squares_rounded_once(kind: str) -> None:
    x = GRADIENTS[kind]()
    expected = operators("reference").norm_bins(x)
    for threads in THREADS:
        with kernel_threads(threads):
            bins = operators("cpu").norm_bins(x)
        assert_bitwise(bins, expected, "bins")
    assert norm_from_bins(bins) == exact_norm(x)


def test_norm_does_not_depend_on_order_or_sharding() -> None:
    x = bits_of_every_exponent(50_003, 5) * 1e-3
    cpu = operators("cpu")
    norm = norm_from_bins(cpu.norm_bins(x))
    shuffled = x[torch.randperm(x.numel(), generator=generator(6))]
    assert norm_from_bins(cpu.norm_bins(shuffled)) == norm
    for shards in (2, 3, 8, 1000):
        assert norm_from_bins(torch.stack([cpu.norm_bins(part) for part in x.chunk(shards)]).sum(0)) == norm
        for name in ("cpu", "reference"):
            assert joined(operators(name).norm_bins(*x.chunk(shards))) == joined(cpu.norm_bins(x))
    wide = f32_randn(50_000, seed=7)
    plain = {float(wide[torch.randperm(50_000, generator=generator(i))].square().sum()) for i in range(10)}
    assert len(plain) > 1, "the control: torch's own sum depends on the order"


def test_the_same_sum_in_other_bins_is_the_same_norm() -> None:
    """A provider may carry between bins, and below zero: the sum decides."""
    bins = operators("cpu").norm_bins(f32_randn(1001, seed=1))
    moved = bins.clone()
    moved[100, 1] += 2**20
    moved[112, 0] -= 2**20
    assert joined(moved) == joined(bins) and norm_from_bins(moved) == norm_from_bins(bins)
    moved[112, 0] += 1
    assert joined(moved) != joined(bins), "the control: one unit more"


def three_sums(x: float, count: int, first: int) -> int:
    """``count`` squares of ``x`` as a thread of a GPU adds them into a window at exponent ``first``, in units of the
    lowest sum: the bits of each sum, less those that it starts with."""
    from rl_engine.ops.grad_norm.triton import GAP

    def bits(value: float) -> int:
        return int.from_bytes(struct.pack(">d", value), "big")

    starts = [math.ldexp(1.5, 52 + 2 * first - 300 + GAP.value * place) for place in (0, 1, 2)]
    low, middle, high = starts
    square = x * x
    for _ in range(count):
        total = high + square
        rest = square + (high - total)
        second = middle + rest
        low, middle, high = low + (rest + (middle - second)), second, total
    sums = zip((low, middle, high), starts, strict=True)
    return sum((bits(found) - bits(start)) << GAP.value * place for place, (found, start) in enumerate(sums))


@pytest.mark.parametrize("first", [1, 90, 212])
def test_a_gpus_three_sums_hold_as_many_squares_as_they_may(first: int) -> None:
    """Exact at every exponent of a window for the worst significand; the control: several times as many are not."""
    pytest.importorskip("triton")
    from rl_engine.ops.grad_norm.triton import ADDENDS, GAP, LARGEST, SPAN

    assert first <= LARGEST.value == 254 - GAP.value
    wrong = 0
    for above in range(SPAN.value):
        x = hardest_square(first + above, first, GAP.value)
        square = int(math.ldexp(x, 150 - first)) ** 2  # in units of the lowest sum
        assert three_sums(x, ADDENDS.value, first) == ADDENDS.value * square, above
        wrong += three_sums(x, 6 * ADDENDS.value, first) != 6 * ADDENDS.value * square
    assert wrong > 0


def test_bins_do_not_overflow_where_one_word_would() -> None:
    """2^17 squares of 48 significant bits: their sum does not fit in 63 bits, two words hold it."""
    x = torch.full((2**17,), 1.9999999)
    square = Fraction(float(x[0])) ** 2
    total = square * 2**17
    assert math.frexp(float(total * 2**46))[1] > 63
    assert norm_from_bins(operators("cpu").norm_bins(x)) == math.sqrt(float(total))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4999, 9999])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_gradient_that_is_not_finite_is_refused(name: str, place: int, bad: float) -> None:
    x = f32_randn(10_000, seed=1)
    x[place] = bad
    with pytest.raises(NonFiniteGradient):
        norm_from_bins(operators(name).norm_bins(x))


def test_more_than_one_chunk() -> None:
    x = f32_randn((1 << 20) + 3, seed=8)
    with kernel_threads(3):
        bins = operators("cpu").norm_bins(x)
    assert_bitwise(bins, operators("reference").norm_bins(x), "bins")


def test_clip_factor() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(1e9, 0.0) == 1.0 and clip_factor(1e9, -1.0) == 1.0
    factor = clip_factor(3.0, 1.0)
    assert factor == float(torch.tensor(1.0 / 3.000001, dtype=torch.float32)) != 1.0 / 3.000001
    assert clip_factor(0.0, 1.0) == 1.0


State = list[Tensor]  # master, m, v fp32, weight bf16


def fresh(n: int) -> State:
    return [f32_randn(n, seed=1), torch.zeros(n), torch.zeros(n), torch.empty(n, dtype=torch.bfloat16)]


def gradient(n: int, step: int) -> Tensor:
    g = f32_randn(n, seed=100 + step) * torch.exp(f32_randn(n, seed=200 + step) * 4.0)
    g[::7] = 0.0
    g[::11] *= 1e-40
    return g


def scalars(step: int, decay: float = 0.1) -> AdamScalars:
    return AdamScalars.at(step, 1e-3, 0.9, 0.98, 1e-8, decay)


def update(name: str, state: State, step: int, clip: float = 0.37, part: slice = slice(None)) -> None:
    master, m, v, weight = (x[part] for x in state)
    g = gradient(state[0].numel(), step)[part].contiguous()
    operators(name).adamw(master, m, v, g, weight, clip, scalars(step))


def adamw64(p: Tensor, steps: int, clip: float) -> Tensor:
    """AdamW in fp64 as the paper has it (Loshchilov and Hutter, algorithm 2, decay times the learning rate)."""
    p, m, v = p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()
    lr, b1, b2, eps, decay = 1e-3, 0.9, 0.98, 1e-8, 0.1
    for step in range(1, steps + 1):
        g = gradient(p.numel(), step).double() * clip
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - lr * decay * p - lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps)
    return p


@pytest.mark.parametrize("n", [1, 15, 1003, 65_535, 65_537])
def test_adamw_is_the_reference_over_five_steps(n: int) -> None:
    states = {name: fresh(n) for name in ("reference", "cpu", "shards")}
    cuts = sorted({0, n // 3, n // 2, n})
    for step in range(1, 6):
        update("reference", states["reference"], step)
        with kernel_threads(THREADS[step % 3]):
            update("cpu", states["cpu"], step)
        for first, last in itertools.pairwise(cuts):
            update("cpu", states["shards"], step, part=slice(first, last))
        for name, expected in zip(("master", "m", "v", "weight"), states["reference"], strict=True):
            index = ("master", "m", "v", "weight").index(name)
            assert not expected.isnan().any()
            assert_bitwise(states["cpu"][index], expected, f"{name}, step {step}")
            assert_bitwise(states["shards"][index], expected, f"{name} in shards, step {step}")
        assert_bitwise(states["cpu"][3], states["cpu"][0].bfloat16(), "the weight is the master to nearest even")


def test_adamw_against_fp64_and_against_torch() -> None:
    state = fresh(5001)
    stock = torch.nn.Parameter(state[0].clone())
    optimizer = torch.optim.AdamW([stock], lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
    exact = adamw64(state[0], 5, 0.37)
    start = state[0].double()
    for step in range(1, 6):
        update("cpu", state, step)
        stock.grad = gradient(5001, step) * 0.37
        optimizer.step()
    assert_close(state[0], exact, rtol=1e-6, atol=1e-8, why="five steps of some ten fp32 roundings")
    moved = (exact - start).norm()
    ours, theirs = ((x.double() - exact).norm() / moved for x in (state[0], stock.detach()))
    assert float(ours) <= 2.0 * float(theirs)
    assert differing(state[0], stock.detach()) > 10, "the control: torch's optimizer has other bits"


def test_adamw_decay_and_still_weights() -> None:
    """No decay: a weight without gradient stays. With decay it shrinks by fl(1 - lr wd)."""
    p, zeros = f32_randn(100, seed=1), torch.zeros(100)
    for decay in (0.0, 0.1):
        state = [p.clone(), zeros.clone(), zeros.clone(), torch.empty(100, dtype=torch.bfloat16)]
        operators("cpu").adamw(state[0], state[1], state[2], zeros, state[3], 1.0, scalars(1, decay))
        assert_bitwise(state[0], p * torch.tensor(1.0 - 1e-3 * decay), f"decay {decay}")


def test_scalars_are_cast_once_from_fp64() -> None:
    s = scalars(3)
    assert s.root_bc2 == float(torch.tensor(math.sqrt(1 - 0.98**3), dtype=torch.float32))
    assert s.step_size == float(torch.tensor(1e-3 / (1 - 0.9**3), dtype=torch.float32))
    assert s.one_minus_beta2 == float(torch.tensor(1 - 0.98, dtype=torch.float32))
    assert s.one_minus_beta2 != 1.0 - s.beta2, "1 - beta2 is not taken from the rounded beta2"


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_changed_weights_are_counted(name: str) -> None:
    n = 200_003  # several chunks
    state = fresh(n)
    state[3] = state[0].bfloat16()
    before = state[3].clone()
    changed = operators(name).adamw(*state[:3], gradient(n, 1), state[3], 1.0, scalars(1))
    assert changed.shape == () and changed.dtype == torch.int64
    assert int(changed) == differing(before, state[3])
    assert 0 < int(changed) < n
