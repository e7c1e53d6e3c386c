"""How an update is cut into fold units and micro-batches: properties over any lengths."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine.engines.train.batching import build_micro_batch, fold_units, micro_batches
from rl_engine.engines.types import pack_retained, retained_bits, retained_ids
from tests.helpers.models import random_samples
from tests.helpers.numeric import assert_bitwise

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 100))
@settings(deadline=None)
def test_fold_units_hold_whole_samples_in_order(lengths: list[int], fold_tokens: int) -> None:
    units = fold_units(lengths, fold_tokens)
    assert list(itertools.chain(*units)) == list(range(len(lengths)))
    for unit in units:
        assert unit
        assert len(unit) == 1 or sum(lengths[i] for i in unit) <= fold_tokens
    for unit, following in itertools.pairwise(units):
        closed = sum(lengths[i] for i in unit) + lengths[following[0]]
        assert closed > fold_tokens, "a unit was closed although the next sample would have fitted"


@given(LENGTHS, st.integers(1, 100), st.integers(0, 40))
@settings(deadline=None)
def test_fold_units_of_a_beginning_do_not_depend_on_what_follows(
    lengths: list[int], fold_tokens: int, kept: int
) -> None:
    beginning = fold_units(lengths[:kept], fold_tokens)
    whole = fold_units(lengths, fold_tokens)
    assert whole[: max(len(beginning) - 1, 0)] == beginning[:-1]


@given(LENGTHS, st.integers(1, 100), st.one_of(st.none(), st.integers(1, 400)))
@settings(deadline=None)
def test_micro_batches_hold_whole_units_in_order(lengths: list[int], fold_tokens: int, max_tokens: int | None) -> None:
    units = fold_units(lengths, fold_tokens)
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    if max_tokens is not None and max(sizes, default=0) > max_tokens:
        with pytest.raises(ValueError, match=f"{max(sizes)} tokens exceeds .* {max_tokens}"):
            micro_batches(units, lengths, max_tokens)
        return
    batches = micro_batches(units, lengths, max_tokens)
    assert list(itertools.chain(*batches)) == units
    assert all(batches)
    if max_tokens is None:
        assert all(len(batch) == 1 for batch in batches)
        return
    tokens = [sum(lengths[i] for unit in batch for i in unit) for batch in batches]
    assert all(count <= max_tokens for count in tokens)
    for count, following in zip(tokens, batches[1:], strict=False):
        assert count + sum(lengths[i] for i in following[0]) > max_tokens


def test_nothing_gives_nothing() -> None:
    assert fold_units([], 10) == []
    assert micro_batches([], [], None) == micro_batches([], [], 5) == []


def test_micro_batch_joins_tokens_rows_and_targets() -> None:
    samples = random_samples(50, (3, 5), (2, 1, 4, 3))
    batch = build_micro_batch(samples, [[1, 2], [3]], 50)
    assert batch.indices == [1, 2, 3]
    assert batch.layout.lengths == (4, 9, 8)
    assert batch.layout.unit_samples == (2, 1)
    joined = np.concatenate([np.concatenate([s.prompt_tokens, s.response_tokens]) for s in samples[1:]])
    assert batch.ids.tolist() == joined.tolist()
    assert batch.counts == [1, 4, 3]
    assert batch.targets.tolist() == [t for s in samples[1:] for t in s.response_tokens.tolist()]
    assert batch.ids[batch.rows + 1].tolist() == batch.targets.tolist()
    assert batch.layout.positions[batch.rows].tolist() == [2, 4, 5, 6, 7, 4, 5, 6]
    assert batch.mask is None


def test_samples_without_retained_sets_keep_every_column() -> None:
    first, second = random_samples(20, (2,), (1, 2))
    row = np.array([3, 19], dtype=np.int32)
    batch = build_micro_batch([dataclasses.replace(first, retained=(row,)), second], [[0, 1]], 20)
    assert batch.mask is not None
    flags = np.unpackbits(batch.mask.numpy(), axis=1, count=20, bitorder="little")
    assert np.flatnonzero(flags[0]).tolist() == [3, 19]
    assert flags[1:].all()


@given(st.integers(1, 300).flatmap(lambda v: st.tuples(st.just(v), st.sets(st.integers(0, v - 1), min_size=1))))
@settings(deadline=None)
def test_retained_rows_keep_their_set_in_the_smaller_form(case: tuple[int, set[int]]) -> None:
    vocabulary, kept = case
    ids = np.array(sorted(kept), dtype=np.int32)
    bits = retained_bits(ids, vocabulary)
    row = pack_retained(bits, vocabulary)
    assert row.nbytes == min(ids.nbytes, bits.nbytes)
    assert_bitwise(retained_ids(row, vocabulary), ids, "ids")
    assert_bitwise(retained_bits(row, vocabulary), bits, "bits")
