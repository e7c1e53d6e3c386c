"""Bit comparison, digests and the two numeric test helpers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_engine.numerics.bits import compare_bits, int_view
from rl_engine.numerics.digest import digest_tensors, map_digest, tensor_digest
from tests.helpers.numeric import assert_bitwise, assert_close


@pytest.mark.parametrize(
    ("value", "dtype", "bits"),
    [
        (np.float32(1), np.uint32, 0x3F800000),
        (np.float64(1), np.uint64, 0x3FF0000000000000),
        (np.float16(1), np.uint16, 0x3C00),
        (torch.tensor(1.0, dtype=torch.bfloat16), np.uint16, 0x3F80),
        (torch.tensor(-0.0), np.uint32, 0x80000000),
        (np.int32(-3), np.int32, -3),
        (True, np.uint8, 1),
    ],
)
def test_int_view(value: object, dtype: type, bits: int) -> None:
    view = int_view(value)
    assert view.dtype == dtype and view.shape == () and int(view) == bits


def test_compare_bits() -> None:
    a = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    b = a.clone()
    b[2, 3] = b[2, 3] * 1.5
    b[4, 6] = float("nan")
    result = compare_bits(a, b)
    assert (result.equal, result.count, result.total, result.first_index) == (False, 2, 35, (2, 3))
    assert result.a_hex == f"0x{int(int_view(a)[2, 3]):04x}" and result.max_abs == float("inf")
    assert compare_bits(a, a.T.contiguous().T).equal
    assert compare_bits(b, b).equal, "equal NaN bits are equal"
    assert compare_bits(np.zeros(0, np.float32), np.zeros(0, np.float32)).equal
    assert compare_bits(torch.ones(3), np.ones(3, np.float32)).equal
    assert compare_bits(np.ones(3, ">f4"), np.ones(3, np.float32)).equal


def test_compare_bits_controls() -> None:
    one = np.ones(3, np.float32)
    assert compare_bits(np.float32([0.0]), np.float32([-0.0])).count == 1
    assert "dtype" in compare_bits(one, one.astype(np.float64)).reason
    assert "dtype" in compare_bits(torch.ones(3).bfloat16(), torch.ones(3).half()).reason
    assert "shape" in compare_bits(one, one[None]).reason
    with pytest.raises(TypeError):
        int_view(np.array(["a"]))


def test_digest_depends_on_everything() -> None:
    one = np.arange(6, dtype=np.float32)
    base = tensor_digest("a", one)
    assert base == tensor_digest("a", torch.arange(6, dtype=torch.float32)) == tensor_digest("a", one.astype(">f4"))
    others = [
        tensor_digest("b", one),
        tensor_digest("a", one.reshape(2, 3)),
        tensor_digest("a", one.view(np.int32)),
        tensor_digest("a", torch.arange(6).bfloat16()),
        tensor_digest("a", np.float32([-0.0, 1, 2, 3, 4, 5])),
        tensor_digest("a", one[:0]),
    ]
    assert len({base, *others}) == 7
    assert tensor_digest("a", one[::2]) == tensor_digest("a", one[::2].copy())
    digests = digest_tensors({"x": one, "a": one}, threads=2)
    assert digests["a"] == base and list(digests) == ["a", "x"]
    assert map_digest(digests) == map_digest(dict(reversed(digests.items())))
    assert map_digest(digests) != map_digest({"a": digests["x"], "x": digests["a"]})


def test_helpers_fail_when_they_must() -> None:
    one = np.ones(3, np.float32)
    assert_bitwise(one, torch.ones(3), "ones")
    assert_close(one, one + 1e-7, rtol=1e-6, atol=0, why="test")
    with pytest.raises(AssertionError, match=r"logp: 1 of 3 differ, first at \(1,\): 0x3f800000 against 0x3f800001"):
        assert_bitwise(one, np.float32([1, np.nextafter(np.float32(1), np.float32(2)), 1]), "logp")
    with pytest.raises(AssertionError, match="beyond rtol"):
        assert_close(one, one + 1e-3, rtol=1e-6, atol=0, why="test")
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(np.float32([np.nan]), np.float32([1]), rtol=1, atol=1, why="test")
    with pytest.raises(AssertionError, match="shape"):
        assert_close(one, one[:1], rtol=1, atol=1, why="test")
