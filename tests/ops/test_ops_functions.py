"""Elementary functions and the written sum: error against fp64, same bits in C and torch, known-answer vectors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.ops import functions, library
from rl_engine.ops.sample.reference import philox_first_word
from tests.helpers.numeric import assert_bitwise, assert_close
from tests.helpers.ops import differing, f32_randn, generator


def in_c(name: str, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    getattr(library.load(), f"rlk_{name}_array")(x.numel(), x.data_ptr(), out.data_ptr())
    return out


def uniform(first: float, last: float, count: int = 200_003) -> Tensor:
    x = torch.rand(count, generator=generator(5), dtype=torch.float64)
    return (first + (last - first) * x).float()


def every_magnitude(count: int = 200_003) -> Tensor:
    """Positive normal fp32 values of all exponents, and both neighbours of every power of two and of 1/sqrt(2)."""
    bits = torch.randint(0x00800000, 0x7F800000, (count,), generator=generator(6), dtype=torch.int64)
    edges = torch.arange(1, 255) << 23
    root = 0x3F3504F3 + torch.arange(-3, 4)
    return (
        torch.cat([bits, edges, edges - 1, edges + 1, root]).clamp(min=0x00800000).to(torch.int32).view(torch.float32)
    )


def worst_ulp(actual: Tensor, exact: np.ndarray) -> float:
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(actual.double().numpy() - exact) / spacing))


CASES: list[tuple[str, Callable[[], Tensor], Callable[[np.ndarray], np.ndarray], float]] = [
    ("exp", lambda: uniform(-87.25, 88.72), np.exp, 2.0),
    ("exp", lambda: uniform(-1.0, 1.0), np.exp, 2.0),
    ("log", every_magnitude, np.log, 2.0),
    ("log", lambda: uniform(0.5, 2.0), np.log, 2.0),
    ("log1p", lambda: -uniform(2.0**-33, 1.0 - 2.0**-24), np.log1p, 2.0),
    ("log1p", lambda: -torch.exp2(uniform(-33.0, 0.0)).clamp(max=1.0 - 2.0**-24), np.log1p, 2.0),
]


@pytest.mark.parametrize(("name", "inputs", "truth", "bound"), CASES)
def test_functions_are_within_their_ulp_and_the_same_in_c(
    name: str, inputs: Callable[[], Tensor], truth: Callable[[np.ndarray], np.ndarray], bound: float
) -> None:
    x = inputs()
    y = getattr(functions, name)(x)
    assert_bitwise(in_c(name, x), y, name)
    assert worst_ulp(y, truth(x.double().numpy())) <= bound


def test_functions_at_their_edges() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([-inf, -1e30, -104.0, -87.26, -0.0, 0.0, 88.73, 1e30, inf, nan])
    y = functions.exp(x)
    assert y.tolist()[:9] == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, inf, inf, inf]
    assert y[9].isnan()
    assert_bitwise(in_c("exp", x), y, "exp at its edges")
    x = torch.tensor([0.0, -0.0, 1.0, inf, -1.0, nan, 1.4e-45, 1.17549421e-38])
    y = functions.log(x)
    assert y.tolist()[:4] == [-inf, -inf, 0.0, inf]
    assert y[4:6].isnan().all()
    assert worst_ulp(y[6:], np.log(x[6:].double().numpy())) <= 2.0
    assert_bitwise(in_c("log", x)[[0, 1, 2, 3, 6, 7]], y[[0, 1, 2, 3, 6, 7]], "log at its edges")


def test_torchs_own_functions_have_other_bits() -> None:
    """The control: where torch's exp and log agreed everywhere, the tests above would prove nothing."""
    x = uniform(-20.0, 20.0)
    assert differing(in_c("exp", x), x.exp()) > 1000
    x = uniform(0.01, 100.0)
    assert differing(in_c("log", x), x.log()) > 1000


def test_square_root_is_correctly_rounded() -> None:
    x = torch.cat([every_magnitude(), torch.tensor([0.0, 1.4e-45, 1.17549421e-38])])
    exact = np.sqrt(x.double().numpy())
    assert_bitwise(functions.sqrt(x), torch.from_numpy(exact.astype(np.float32)), "sqrt")


def tree_by_hand(values: list[np.float32]) -> np.float32:
    """The written tree, one addition at a time."""
    zero = np.float32(0.0)
    if len(values) > 1024:
        folded = [zero] * 1024
        for start in range(0, len(values), 1024):
            chunk = values[start : start + 1024]
            chunk += [zero] * (1024 - len(chunk))
            folded = chunk if start == 0 else [a + b for a, b in zip(folded, chunk, strict=True)]
        values = folded
    while len(values) & (len(values) - 1):
        values = [*values, zero]
    while len(values) > 1:
        values = [a + b for a, b in zip(values[0::2], values[1::2], strict=True)]
    return values[0]


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 1000, 1023, 1024, 1025, 2047, 2049, 5000])
def test_tree_sum_is_the_written_tree(n: int) -> None:
    x = f32_randn(3, n, seed=n) * torch.exp(f32_randn(3, n, seed=n + 1) * 3)
    by_hand = torch.tensor(np.array([tree_by_hand(list(row)) for row in x.numpy()]))
    assert_bitwise(functions.tree_sum(x), by_hand, f"tree of {n}")
    # Each addition is off by at most 2^-24 of its result; log2(1024) levels and the folds before them.
    levels = 10 + n // 1024
    error = (functions.tree_sum(x).double() - x.double().sum(1)).abs()
    assert bool((error <= levels * 2.0**-24 * x.double().abs().sum(1)).all())


def test_another_order_of_the_sum_has_other_bits() -> None:
    x = f32_randn(200, 1025, seed=3)
    assert differing(functions.tree_sum(x), x.sum(1)) > 50
    assert differing(functions.tree_sum(x), functions.tree_sum(x.flip(1))) > 50
    two_accumulators = functions.tree_sum(x[:, :512].contiguous()) + functions.tree_sum(x[:, 512:].contiguous())
    assert differing(functions.tree_sum(x), two_accumulators) > 20


def test_tree_sum_ignores_zeros_behind_and_rows_beside() -> None:
    x = f32_randn(7, 700, seed=4)
    padded = torch.nn.functional.pad(x, (0, 324))
    assert_bitwise(functions.tree_sum(padded), functions.tree_sum(x), "zero tail")
    assert_bitwise(functions.tree_sum(x[2:3]), functions.tree_sum(x)[2:3], "one row alone")
    tenths = functions.tree_sum(torch.full((1, 3000), 0.1))
    assert_close(tenths, [np.float32(0.1) * 3000.0], rtol=1e-6, atol=0, why="12 roundings")


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ],
)
def test_philox_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], word: int) -> None:
    """The published known-answer vectors of Philox4x32-10 (Random123)."""
    first, *rest = counter
    assert philox_first_word(key, (torch.tensor([first]), rest[0], rest[1], rest[2])).tolist() == [word]
