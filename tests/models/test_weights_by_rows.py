"""Weights that another engine fills: by rows, in its own memory, packed on arrival; what was loaded is what is held."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rl_engine.engines.snapshot import JoinedWeights, SnapshotMismatch, own_digests, row_digests, snapshot_of
from rl_engine.models.config import ModelConfig
from rl_engine.models.decoder import Decoder
from rl_engine.models.sharding import LayoutRefused, Sharding
from rl_engine.models.weights import ModelWeights, WeightMismatch, random_tensor, random_weights
from rl_engine.ops.attention.paged import PagedCache
from rl_engine.ops.selected_logp.vocabulary import groups
from rl_engine.ops.weight import BorrowedMemory, Memory, Weight
from tests.helpers.models import llama, operators, qwen3
from tests.helpers.numeric import assert_bitwise

SMALL = qwen3(layers=1, intermediate=301, vocabulary=1100)
TIED = llama(layers=1, intermediate=96, vocabulary=700, tied=True)


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """What an engine's loader hands over: HF names, fp32 or bf16, whole tensors."""
    named = {name: random_tensor(config, name, 3) for name in config.tensor_shapes()}
    return {name: x if number % 2 else x.bfloat16() for number, (name, x) in enumerate(named.items())}


def same_weights(found: ModelWeights, expected: ModelWeights) -> None:
    ours, theirs = found.export_rows(), expected.export_rows()
    assert list(ours) == list(theirs)
    for name, (first, rows) in ours.items():
        assert first == theirs[name][0], name
        assert_bitwise(rows, theirs[name][1], name)


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["qwen3", "tied"])
@pytest.mark.parametrize("sharding", [(1, 0), (2, 0), (2, 1)])
def test_weights_written_by_rows_equal_those_read_at_once(config: ModelConfig, sharding: tuple[int, int]) -> None:
    """Whole tensors, out of order, and one in three pieces; a rank takes its rows and says how many."""
    shards = Sharding(config, *sharding)
    weights, named, taken = ModelWeights.empty(config, shards), tensors(config), 0
    assert len(weights.missing()) == len(config.tensor_shapes())
    for name in reversed(named):
        pieces = [0, 1, 40, named[name].shape[0]] if name.endswith("k_proj.weight") else [0, named[name].shape[0]]
        for first, last in itertools.pairwise(pieces):
            assert name in weights.missing()
            taken += weights.write(name, first, named[name][first:last])
    assert weights.missing() == {}
    assert taken == sum(rows.shape[0] for rows in weights.export().values())
    same_weights(weights, random_weights(config, 3, shards))
    assert weights.write("lm_head.weight", 0, torch.zeros(1, config.hidden)) == (0 if config.tied else 1 - sharding[1])


def test_what_lacks_is_named_and_what_does_not_fit_is_refused() -> None:
    weights, named = ModelWeights.empty(SMALL), tensors(SMALL)
    name = "model.layers.0.mlp.up_proj.weight"
    weights.write(name, 10, named[name][10:20])
    weights.write(name, 15, named[name][15:300])
    assert weights.missing()[name] == [(0, 10), (300, 301)]
    with pytest.raises(WeightMismatch, match="no tensor model"):
        weights.write("model.layers.7.mlp.up_proj.weight", 0, named[name])
    with pytest.raises(WeightMismatch, match="rows 1 to 302"):
        weights.write(name, 1, named[name])
    with pytest.raises(WeightMismatch, match="expected rows of a tensor"):
        weights.write(name, 0, named[name][:, :-1])
    with pytest.raises(WeightMismatch, match="rows -1 to 300"):
        weights.write(name, -1, named[name])


def decode(weights: ModelWeights) -> tuple[Tensor, Tensor]:
    """(hidden, logits) of eight tokens through pages, no gradient: the form that reads packed panels."""
    ops = operators()
    decoder = Decoder(weights, ops, 64)
    cache: PagedCache = ops.new_cache(weights.config.layers, decoder.cache_heads, weights.config.head_dim, 2, 16)
    batch = cache.batch([cache.join()], [0], [8])
    ids = torch.arange(8) * 37 + 5

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention_over_pages(q, k, v, cache.k[layer], cache.v[layer], batch)

    with torch.no_grad():
        hidden = decoder.hidden(ids, batch.positions, attend)
        return hidden, ops.logits(hidden, weights.head)


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["qwen3", "tied"])
def test_rows_are_packed_on_arrival_and_the_weights_are_held_once(config: ModelConfig) -> None:
    """New weights go into panels whose values were dropped: same logits, same digests, one copy in memory."""
    expected = random_weights(config, 3)
    weights = ModelWeights.empty(config)
    matrices = [w for w in weights if len(w.shape) == 2 and w is not weights.embedding]
    operators().pack(matrices, drop_value=True)
    for name, tensor in tensors(config).items():
        weights.write(name, 0, tensor)
    assert weights.missing() == {} and not any(w.holds_value for w in matrices)
    held = sum(w.packed.nbytes for w in matrices if w.packed is not None)
    assert held < 1.08 * sum(2 * w.shape[0] * w.shape[1] for w in matrices), "panels alone, padded to 32 rows"
    assert own_digests(weights) == own_digests(expected)
    same_weights(weights.clone(), expected)
    for found, wanted in zip(decode(weights), decode(expected), strict=True):
        assert_bitwise(found, wanted, "decoded over packed rows")
    weights.write("model.layers.0.mlp.up_proj.weight", 5, torch.zeros(1, config.hidden))
    assert own_digests(weights) != own_digests(expected), "the control: one other row"


def test_weights_over_an_engines_parameters_follow_them() -> None:
    """Decoder and export over tensors of somebody else, who loads other values into them behind our back."""
    params: dict[str, Tensor] = {}

    def memory(name: str, shape: tuple[int, ...]) -> Memory:
        params[name] = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        return BorrowedMemory(lambda: params[name])

    weights = ModelWeights.over(SMALL, memory)
    for seed in (3, 4):
        expected = random_weights(SMALL, seed)
        for weight in expected:
            params[weight.name] = weight.value.clone()  # another place, too
        same_weights(weights, expected)
        for found, wanted in zip(decode(weights), decode(expected), strict=True):
            assert_bitwise(found, wanted, f"weights of seed {seed}")
    place = {weight.name: weight.value.data_ptr() for weight in weights}
    weights.load(lambda name, first, last: random_tensor(SMALL, name, 5)[first:last])
    same_weights(weights, random_weights(SMALL, 5))
    assert {weight.name: weight.value.data_ptr() for weight in weights} == place, "loaded into the owner's memory"


def test_a_snapshot_of_rows_equals_that_of_the_weights() -> None:
    """What an engine exports without a ``ModelWeights``: two ranks' rows, joined to the same bits and digests."""
    expected = random_weights(SMALL, 3)
    ranks = [random_weights(SMALL, 3, Sharding(SMALL, 2, rank)) for rank in range(2)]
    parts = [snapshot_of({name: (first, x) for name, (first, x) in w.export_rows().items()}, 7) for w in ranks]
    assert {part.version for part in parts} == {7}
    assert [part.digests for part in parts] == [own_digests(w) for w in ranks]
    whole = JoinedWeights(parts)
    assert row_digests(whole, whole.held) == own_digests(expected)
    name = "model.layers.0.self_attn.q_proj.weight"
    bits = whole.rows(name, 0, 1024)
    assert_bitwise(bits, expected.export()[name], name)
    with pytest.raises(SnapshotMismatch, match=r"float32 rows, expected bf16"):
        snapshot_of({"a": (0, torch.zeros(2, 2))}, 1)


@pytest.mark.parametrize(("vocabulary", "sizes"), [(49152, (1, 2, 4, 8)), (151936, (2, 3, 4, 6)), (2500, (3, 5))])
def test_even_shares_of_the_vocabulary_are_whole_groups_of_the_padded_one(
    vocabulary: int, sizes: tuple[int, ...]
) -> None:
    for size in sizes:
        config = llama(heads=size * 2, kv_heads=size, vocabulary=vocabulary)
        shards = [Sharding(config, size, rank, even_vocabulary=True) for rank in range(size)]
        share = shards[0].padded_vocabulary // size
        edges = [shards[0].vocabulary(rank) for rank in range(size)]
        assert edges == [(rank * share, min((rank + 1) * share, vocabulary)) for rank in range(size)]
        assert [group for rank, s in enumerate(shards) for group in s.groups(rank)] == groups(vocabulary)


def test_an_even_share_without_a_group_is_refused() -> None:
    config = llama(heads=10, kv_heads=5, vocabulary=2048)  # 16 groups, 4 a rank: the fifth has none
    Sharding(config, 5)
    with pytest.raises(LayoutRefused, match="TP 5 with 16 vocabulary groups, 4 a rank"):
        Sharding(config, 5, even_vocabulary=True)


def test_one_weight_is_one_weight_however_often_it_is_asked_for() -> None:
    weights = ModelWeights.empty(TIED)
    assert weights.head is weights.embedding and isinstance(weights.head, Weight)
