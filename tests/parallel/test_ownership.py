"""Who owns what: slices, zig-zag runs and their inverse, over any length and any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine.models.sharding import LayoutRefused, Sharding, merged_names
from rl_engine.models.weights import in_hf_order
from rl_engine.parallel import ContextLayout, Group, bounds, zigzag_runs
from tests.helpers.models import qwen3

LENGTHS = st.integers(1, 3000)
PARTS = st.integers(1, 16)


@given(length=st.integers(0, 5000), parts=PARTS)
def test_bounds_cut_without_gap(length: int, parts: int) -> None:
    slices = bounds(length, parts)
    assert [i for a, b in slices for i in range(a, b)] == list(range(length))
    sizes = [b - a for a, b in slices]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the longer ones come first"


@given(length=LENGTHS, parts=PARTS)
def test_runs_cover_every_position_once(length: int, parts: int) -> None:
    runs = zigzag_runs(length, parts)
    assert len(runs) == parts
    owned = [p for rank in runs for first, count in rank for p in range(first, first + count)]
    assert sorted(owned) == list(range(length))
    for rank in runs:
        assert all(count > 0 for _, count in rank)
        assert rank == sorted(rank)
        assert len(rank) <= 2


@given(length=st.integers(64, 3000), parts=st.integers(2, 8))
def test_runs_share_the_work(length: int, parts: int) -> None:
    """Keys seen by all queries of a rank: within a chunk's rounding of each other, which plain slices are not."""
    size = -(-length // (2 * parts))
    work = [sum(p + 1 for a, n in rank for p in range(a, a + n)) for rank in zigzag_runs(length, parts)]
    assert max(work) - min(work) <= 2 * parts * size * (2 * parts * size - length + 1)


@pytest.mark.parametrize("length", range(1, 8))
def test_short_samples_leave_ranks_without_a_token(length: int) -> None:
    runs = zigzag_runs(length, 8)
    assert [rank for rank in range(8) if not runs[rank]] == list(range(length, 8))


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6), parts=PARTS, data=st.data())
def test_gather_is_the_inverse_of_ownership(lengths: list[int], parts: int, data: st.DataObject) -> None:
    """Places of all ranks are a permutation, and follow each rank's runs."""
    rank = data.draw(st.integers(0, parts - 1))
    layouts = [ContextLayout(tuple(lengths), parts, index) for index in range(parts)]
    joined = torch.cat([layout.own for layout in layouts])
    assert sorted(joined.tolist()) == list(range(sum(lengths)))
    assert all(torch.equal(layouts[rank].places[i], layout.own) for i, layout in enumerate(layouts))
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    places = [offsets[s] + p for s, first, n in layouts[rank].runs for p in range(first, first + n)]
    assert places == layouts[rank].own.tolist()
    tokens = torch.arange(sum(lengths)).unsqueeze(1) * torch.tensor([[1, -1]])
    group = _Shared(parts, rank, [tokens[layout.own] for layout in layouts])
    assert torch.equal(layouts[rank].gather(group, tokens[layouts[rank].own], purpose="test"), tokens)


class _Shared(Group):
    """A group whose members' tensors are known here."""

    def __init__(self, size: int, index: int, parts: list[torch.Tensor]) -> None:
        super().__init__(tuple(range(size)), index)
        self._parts = parts

    def all_gather(self, x, shapes=None, *, purpose):  # type: ignore[no-untyped-def]
        assert torch.equal(x, self._parts[self.index])
        assert [tuple(part.shape) for part in self._parts] == list(shapes)
        return self._parts


# -- rows of weights


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("vocabulary", [1500, 2500, 3001])
def test_every_row_has_one_owner(size: int, vocabulary: int) -> None:
    """Norms are on all ranks, every other row on one; merged rows and input columns likewise."""
    config = qwen3(layers=1, intermediate=301, vocabulary=vocabulary)
    ranks = [Sharding(config, size, index) for index in range(size)]
    for name, shape in config.tensor_shapes().items():
        rows = [row for rank in ranks for row in range(*rank.rows(name))]
        assert rows == list(range(shape[0])) * (size if len(shape) == 1 else 1), name
    for merged, names in merged_names(config).items():
        if ranks[0].is_replicated(merged):
            continue
        rows = torch.cat([ranks[0].canonical_rows(merged, rank) for rank in range(size)])
        assert sorted(rows.tolist()) == list(range(sum(config.tensor_shapes()[name][0] for name in names)))
        counts = [ranks[0].part_rows(merged, rank) for rank in range(size)]
        for axis in (0, 1):
            pieces = [piece.unsqueeze(1 - axis) for piece in rows.split([sum(each) for each in counts])]
            assert torch.equal(in_hf_order(pieces, counts, axis).flatten(), torch.arange(rows.numel())), merged
        if "_proj" in merged:
            columns = [c for rank in ranks for c in range(*rank.inputs(merged))]
            assert columns == list(range(config.tensor_shapes()[names[0]][1])), merged


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_vocabulary_is_cut_at_groups(size: int) -> None:
    config = qwen3(layers=1, vocabulary=2500)
    sharding = Sharding(config, size, 0)
    groups = [group for rank in range(size) for group in sharding.groups(rank)]
    assert groups == Sharding(config).groups(0)
    assert all(sharding.groups(rank) for rank in range(size))


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(LayoutRefused, match="16 query and 8 KV heads"):
        Sharding(qwen3(), 3, 0)
    with pytest.raises(LayoutRefused, match="vocabulary groups"):
        Sharding(qwen3(heads=32, kv_heads=32, vocabulary=1500), 32, 0)
