"""Records from engine arrays."""

from __future__ import annotations

import numpy as np
import pytest

from rl_engine.records.build import route_records, sample_batch
from rl_engine.records.samples import decode_samples, encode_samples
from rl_engine.records.types import RouteRecord, SampleRecord
from tests.helpers.numeric import assert_bitwise


def identity(index: int) -> SampleRecord:
    return SampleRecord(0, index, 7, 0, "engine0", "", 0.0, None, "stop")


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_join_and_round_trip() -> None:
    mask = np.packbits(np.isin(np.arange(20), [3, 9, 19]), bitorder="little")
    batch = sample_batch(
        prompts=[ints(1, 2), ints(1, 2), ints(5)],
        responses=[ints(3, 4), ints(), ints(9)],
        rollout_logprobs=[np.float32([-1, -2]), np.float32([]), np.float32([-3])],
        train_logprobs=[np.float32([-1, -2.5]), np.float32([]), np.float32([-3])],
        samples=[identity(i) for i in range(3)],
        retained=[[ints(3), ints(4, 5)], None, [mask]],
        vocab=20,
    )
    assert_bitwise(batch.tokens, ints(1, 2, 3, 4, 1, 2, 5, 9), "tokens")
    assert_bitwise(batch.offsets, np.array([0, 4, 6, 8]), "offsets")
    assert_bitwise(batch.loss_mask, np.array([0, 0, 1, 1, 0, 0, 0, 1], np.uint8), "mask")
    assert_bitwise(batch.train_logprob, np.float32([0, 0, -1, -2.5, 0, 0, 0, -3]), "train")
    back = decode_samples(0, *encode_samples(0, batch), "x")
    assert back.retained is not None and batch.retained is not None
    assert_bitwise(back.retained.ids, ints(3, 4, 5, 3, 9, 19), "ids")
    assert_bitwise(back.retained.offsets, np.array([0, 0, 0, 1, 3, 3, 3, 3, 6]), "retained offsets")


def test_lengths_must_fit() -> None:
    good = {
        "prompts": [ints(1)],
        "responses": [ints(2)],
        "rollout_logprobs": [np.float32([-1])],
        "train_logprobs": [np.float32([-1])],
        "samples": [identity(0)],
    }
    sample_batch(**good)  # type: ignore[arg-type]
    for change in (
        {"train_logprobs": [np.float32([-1, -1])]},
        {"train_logprobs": [np.float64([-1])]},
        {"samples": []},
        {"retained": [[ints(2), ints(3)]], "vocab": 5},
        {"retained": [[ints(2)]]},
    ):
        with pytest.raises(ValueError):
            sample_batch(**{**good, **change})  # type: ignore[arg-type]


def test_routes_are_grouped() -> None:
    counts = [
        ("linear", "cpu", "bfloat16", 64, 3),
        ("linear", "cpu", "bfloat16", 128, 2),
        ("rope", "cpu", "float32", 1, 1),
    ]
    assert route_records("train", counts) == [
        RouteRecord("train", "linear", "cpu", "bfloat16", "eager", 5, {"rows<=64": 3, "rows<=128": 2}),
        RouteRecord("train", "rope", "cpu", "float32", "eager", 1, {"rows<=1": 1}),
    ]
