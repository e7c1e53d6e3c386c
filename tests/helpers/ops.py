"""Builders of the operator tests: seeded inputs, views in NaN, order-revealing data, one way to run a backward."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rl_engine.numerics.bits import compare_bits
from rl_engine.ops import Operators, library, uniform
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.weight import Part, Weight
from tests.helpers.numeric import assert_bitwise

THREADS = (1, 2, 3)
BIG = 2.0**22


@functools.cache
def operators(name: str) -> Operators:
    """The operators with one provider everywhere: ``reference``, ``cpu``, ``torch`` or ``stock``."""
    return Operators(uniform(name))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def f32_randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal fp32 values."""
    return torch.randn(shape, generator=generator(seed)) * scale


def bf16_randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal values rounded to bf16."""
    return f32_randn(*shape, seed=seed, scale=scale).bfloat16()


def make_weight(value: Tensor, *, trains: bool = True) -> Weight:
    """A weight of one HF tensor, with a zero fp32 gradient where it trains."""
    weight = Weight("w", value, (Part("w", 0, value.shape[0]),))
    if trains:
        weight.enable_training()
    return weight


def random_weight(*shape: int, seed: int, scale: float = 0.1, trains: bool = True) -> Weight:
    return make_weight(bf16_randn(*shape, seed=seed, scale=scale), trains=trains)


def in_nan(x: Tensor, before: int = 5, behind: int = 7) -> Tensor:
    """The values of ``x`` [T, ...] as a view whose rows lie apart, with NaN between, in front and behind."""
    width = x[0].numel()
    store = torch.full((x.shape[0] + 2, before + width + behind), torch.nan, dtype=x.dtype, device=x.device)
    view = store[1:-1, before : before + width].unflatten(1, x.shape[1:])
    view.copy_(x)
    return view


def order_revealing(rows: int, depth: int, *, seed: int) -> Tensor:
    """bf16 [rows, depth]: a unit everywhere but +2^22 and -2^22 at two places that move from row to row.

    An fp32 sum has a spacing of 0.5 while the large value is in it, so what is left in the end tells in which order the
    units came.
    """
    x = torch.full((rows, depth), 0.30078125, dtype=torch.bfloat16)
    if depth >= 2:
        for row in range(rows):
            first, second = torch.randperm(depth, generator=generator(seed * 1000 + row))[:2].tolist()
            x[row, first], x[row, second] = BIG, -BIG
    return x


def rope_table(width: int, positions: int) -> RopeTable:
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    return RopeTable.build(1.0 / 10000.0**exponents, positions)


def draw_keys(
    rows: int, *, seed: int = 7, step: int = 0, prompt: int = 0, sample: int = 0, first: int = 0
) -> list[DrawKey]:
    """Keys of ``rows`` consecutive positions."""
    return [DrawKey(seed, step, prompt, sample, first + row) for row in range(rows)]


@contextlib.contextmanager
def kernel_threads(count: int) -> Iterator[None]:
    """The C kernels on ``count`` threads, back to one behind it."""
    library.set_threads(count)
    try:
        yield
    finally:
        library.set_threads(1)


def differing(a: Tensor, b: Tensor) -> int:
    """Number of elements whose bits differ."""
    return compare_bits(a, b).count


Call = Callable[..., Tensor | tuple[Tensor, ...]]
Named = dict[str, Tensor]


def run(
    ops: Operators, call: Call, inputs: Named, *, weight: Weight | None = None, dout: Tensor | None = None
) -> Named:
    """Forward and backward of ``call(ops, *inputs)`` through autograd; the first output is differentiated.

    Inputs become leaves that keep their strides. ``dout`` is the upstream gradient, random where it is not given. The
    weight's fp32 gradient starts from zero. Returns outputs (``out0``, ...), ``d<input>`` and ``dw``.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    if weight is not None:
        weight.enable_training()
        weight.lookups.clear()
    outputs = call(ops, *leaves.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if dout is None:
        dout = bf16_randn(*outputs[0].shape, seed=99).to(outputs[0].dtype)
    torch.autograd.backward(outputs[0], dout)
    result = {f"out{i}": x.detach() for i, x in enumerate(outputs)}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name} has no gradient"
        result[f"d{name}"] = leaf.grad
    if weight is not None:
        assert weight.grad is not None
        result["dw"] = weight.grad.clone()
    return result


def assert_same(actual: Named, expected: Named, what: str) -> None:
    """Bit equality of two results of :func:`run`, and no NaN anywhere."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert not bool(value.isnan().any()), f"{what}: {name} holds NaN"
        assert_bitwise(value, expected[name], f"{what}: {name}")


def assert_providers_agree(
    call: Call, inputs: Named, what: str, *, weight: Weight | None = None, dout: Tensor | None = None
) -> Named:
    """The C provider equals the reference bit for bit, forward and backward, on every thread count; returns the bits.

    The reference computes on plain contiguous copies, so views, strides and surroundings are the provider's part.
    """
    plain = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in inputs.items()}
    expected = run(operators("reference"), call, plain, weight=weight, dout=dout)
    for count in THREADS:
        with kernel_threads(count):
            actual = run(operators("cpu"), call, inputs, weight=weight, dout=dout)
        assert_same(actual, expected, f"{what}, {count} threads")
    return expected


def hardest_square(exponent: int, first: int, gap: int) -> float:
    """The value 2^``exponent`` x [1, 2) whose square leaves the most to the next sum, of a window at ``first``."""

    def left(significand: int) -> float:
        square = significand * significand << 2 * (exponent - first)
        return max(min(square % (1 << bits), -square % (1 << bits)) / (1 << bits) for bits in (gap, 2 * gap))

    near_root = 11863283  # its square is 2^47
    best = max((*range((1 << 24) - 4096, 1 << 24), *range(near_root - 2048, near_root + 2048)), key=left)
    return math.ldexp(best, exponent - 150)
