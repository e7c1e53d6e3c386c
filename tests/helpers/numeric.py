"""The only two numeric comparisons that tests may use."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_engine.numerics.bits import compare_bits, int_view, to_float64


def assert_bitwise(actual: Any, expected: Any, what: str) -> None:
    """Fail unless shape, dtype and every bit agree; the message has the count, the first index and both values in hex.

    Both may be numpy arrays or torch tensors (bf16 too). ``what`` names the quantity in the message.
    """
    result = compare_bits(actual, expected)
    assert result.equal, f"{what}: {result.reason}"


def assert_close(actual: Any, expected: Any, *, rtol: float, atol: float, why: str) -> None:
    """Fail unless ``|actual - expected| <= atol + rtol * |expected|`` element by element, in fp64.

    Shapes must be equal and every value finite on both sides. ``why`` says where the tolerance comes from.
    """
    assert why, "a tolerance needs a reason"
    a, e = to_float64(actual), to_float64(expected)
    assert a.shape == e.shape, f"shape {a.shape}, expected {e.shape}"
    assert np.isfinite(a).all(), f"{np.count_nonzero(~np.isfinite(a))} of {a.size} values are not finite"
    assert np.isfinite(e).all(), "the expected values are not finite"
    bad = np.abs(a - e) > atol + rtol * np.abs(e)
    if not bad.any():
        return
    first = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
    error = np.abs(a - e)
    raise AssertionError(
        f"{np.count_nonzero(bad)} of {bad.size} beyond rtol={rtol:g} atol={atol:g} ({why}); first at {first}: "
        f"{a[first]!r} against {e[first]!r}; max |difference| {error.max():.6g} "
        f"(bits {int_view(a)[first]:#018x} against {int_view(e)[first]:#018x})"
    )
