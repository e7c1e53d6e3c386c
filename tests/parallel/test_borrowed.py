"""Ranks that somebody else brought together: meshes over their process groups, exchanges that a graph could capture,
their cut of the vocabulary and their storage. The bits are those of one rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_engine.models.exchange import MeshExchange
from rl_engine.models.sharding import Sharding
from rl_engine.models.shards import refresh_input_shards, refresh_output_shards
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.ops.weight import BorrowedMemory, Part, Weight
from rl_engine.parallel import Group, Mesh, NoTransport, StreamTransport, group_over, groups, mesh_over
from tests.helpers.models import llama, operators, qwen3
from tests.helpers.ops import bf16_randn
from tests.helpers.ranks import Rank, run_ranks
from tests.parallel import test_groups
from tests.parallel.conftest import Baseline
from tests.parallel.scene import Layout, Scene, work
from tests.parallel.test_groups import same_bytes
from tests.parallel.test_layouts import check_equal


def meet(rank: Rank) -> None:
    """What an engine does before it asks us for anything."""
    dist.init_process_group("gloo", init_method=f"file://{rank.folder}/store", rank=rank.index, world_size=rank.size)


def given_mesh(rank: Rank, tp: int, cp: int, stream: bool) -> Mesh | None:
    """TP x CP over process groups made by hand; None on ranks beyond them."""
    size = tp * cp
    sets = {"tp": [range(c * tp, (c + 1) * tp) for c in range(cp)], "cp": [range(t, size, tp) for t in range(tp)]}
    sets["world"] = [range(size)]
    found: dict[str, Group] = {}
    for name, families in sets.items():
        for members in families:
            handle = dist.new_group(list(members))
            if rank.index in members:
                found[name] = group_over(handle, transport=StreamTransport(handle) if stream else None)
    return mesh_over(found["tp"], found["cp"], found["world"]) if found else None


# -- groups


def exchange_over_given_groups(rank: Rank, name: str) -> list[str]:
    """Faults of a function of ``test_groups``, over a group that was here before, by the transport of a stream."""

    def replaced(rank: Rank, **where: Any) -> Mesh:
        if not dist.is_initialized():
            meet(rank)
        found = group_over(dist.group.WORLD, transport=StreamTransport(dist.group.WORLD))
        found.barrier()
        return mesh_over(found)

    Rank.join = replaced  # type: ignore[assignment]
    faults: list[str] = getattr(test_groups, name)(rank)
    return faults


@pytest.mark.parametrize("name", ["gather_everything", "exchange_everything", "pass_along"])
def test_the_transport_of_a_stream_moves_the_same_bytes(name: str, tmp_path: Path) -> None:
    size = 2 if name == "pass_along" else 3
    assert [rank.result for rank in run_ranks(exchange_over_given_groups, size, tmp_path, name)] == [[]] * size


def groups_of(rank: Rank) -> dict[str, Any]:
    meet(rank)
    pair = dist.new_group([0, 2])
    found: dict[str, Any] = {"alone": group_over(None).ranks}
    try:
        group = group_over(pair)
        found["pair"] = [group.ranks, group.index, type(group.transport).__name__]
        found["gathered"] = torch.cat(group.all_gather(torch.tensor([rank.index]), purpose="test")).tolist()
    except NoTransport as error:
        found["refused"] = str(error)
    world = group_over(dist.group.WORLD)
    reversed_ranks = group_over(dist.group.WORLD, ranks=[2, 1, 0])
    found["named"] = [reversed_ranks.ranks, reversed_ranks.index]
    for what, make in {
        "both": lambda: mesh_over(world, world),
        "other": lambda: mesh_over(world, None, group_over(None)),
    }.items():
        try:
            make()
        except NoTransport as error:
            found[what] = str(error)
    alone = mesh_over(group_over(None))
    found["sizes"] = [mesh_over(world).size, alone.size, alone.cp.size]
    return found


def test_groups_over_given_handles(tmp_path: Path) -> None:
    for index, ended in enumerate(run_ranks(groups_of, 3, tmp_path)):
        found = ended.result
        assert found["alone"] == [index] and found["sizes"] == [3, 1, 1]
        assert found["named"] == [[2, 1, 0], 2 - index]
        if index == 1:
            assert found["refused"] == "rank 1 is no member of the group of ranks [0, 2]"
        else:
            assert found["pair"] == [[0, 2], index // 2, "HostTransport"] and found["gathered"] == [0, 2]
        assert found["both"] == "tensor and context parallel ranks: give the group of them all"
        assert "do not make up the ranks" in found["other"]


def test_other_backends_need_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda handle: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_backend", lambda handle: "ucc")
    handle = object()
    with pytest.raises(NoTransport, match=r"backend ucc: give a transport \(StreamTransport takes any backend\)"):
        group_over(handle)
    assert group_over(handle, transport=StreamTransport(handle)).index == 1
    monkeypatch.setattr(dist, "get_backend", lambda handle: "nccl")
    found = group_over(handle, device=torch.device("cuda", 0)).transport
    assert isinstance(found, groups.NcclTransport) and found.handle is handle


# -- the whole scene


@dataclasses.dataclass(frozen=True)
class BorrowedScene(Scene):
    stream: bool = False


def borrowed_work(rank: Rank, scene: BorrowedScene, layout: Layout, baseline: Path) -> dict[str, Any]:
    """``work`` over given groups; with ``stream`` nothing waits on the host either."""
    made = MeshExchange.__init__

    def never_waits(self: MeshExchange, mesh: Any, sharding: Any, local: bool = False, waits: bool = True) -> None:
        made(self, mesh, sharding, local, waits and not scene.stream)

    MeshExchange.__init__ = never_waits  # type: ignore[method-assign]
    Rank.join = lambda rank, **where: meet(rank)  # type: ignore[assignment, misc]
    Rank.mesh = lambda rank, tp, cp, **where: given_mesh(rank, tp, cp, scene.stream)  # type: ignore[assignment]
    return work(rank, scene, layout, baseline)


@pytest.mark.parametrize("stream", [False, True], ids=["gloo", "stream"])
def test_given_groups_and_even_shares_give_one_ranks_bits(stream: bool, filtered: Baseline, tmp_path: Path) -> None:
    """TP 3 over 10 vocabulary groups: 4, 4 and 2 by the even rule, 4, 3 and 3 by ours."""
    layout = Layout(3, 1, rollout_tp=3) if stream else Layout(3, 2, rollout_tp=2)
    config = filtered.config
    assert Sharding(config, 3, 0, True).vocabulary(1) != Sharding(config, 3, 0).vocabulary(1)
    scene = BorrowedScene(**{**vars(filtered.scene), "even_vocabulary": True}, stream=stream)
    check_equal(run_ranks(borrowed_work, layout.size, tmp_path, scene, layout, filtered.folder), layout, filtered)


# -- looking tokens up without waiting


def look_up(rank: Rank) -> list[str]:
    """Faults of the lookup of fixed size against the table itself; what it refuses is refused by the device."""
    meet(rank)
    config = llama(layers=1, vocabulary=1100)
    group, faults = group_over(dist.group.WORLD, transport=StreamTransport(dist.group.WORLD)), []
    table = random_weights(config, 3).embedding.value
    weights = random_weights(config, 3, Sharding(config, rank.size, rank.index))
    ops, exchange = operators(), MeshExchange(mesh_over(group), weights.sharding, waits=False)
    edges = [weights.sharding.vocabulary(r) for r in range(rank.size)]
    ids = torch.tensor([a for edge in edges for a in (edge[0], edge[1] - 1)] + [7, 7, 1099])
    with torch.no_grad():
        if not same_bytes(ops.embedding(ids, weights.embedding, None, exchange), table[ids]):
            faults.append("rows")
        for bad in (-1, 1100):
            try:
                ops.embedding(torch.tensor([3, bad]), weights.embedding, None, exchange)
                faults.append(f"{bad} was looked up")
            except RuntimeError as error:
                if "a token id lies outside the vocabulary" not in str(error):
                    faults.append(str(error))
    return faults


def test_a_lookup_of_fixed_size_gives_the_same_rows(tmp_path: Path) -> None:
    assert [rank.result for rank in run_ranks(look_up, 2, tmp_path)] == [[], []]


# -- storage


def store_otherwise(rank: Rank) -> list[str]:
    """Faults of both kinds of second copies, of weights in an engine's order, and of what they are multiplied with."""
    meet(rank)
    tp, faults = group_over(dist.group.WORLD), []
    config = qwen3(layers=1, intermediate=512, vocabulary=700)
    whole = random_weights(config, 3)
    sharding = Sharding(config, rank.size, rank.index)
    own = random_weights(config, 3, sharding)
    own.refresh_input_shards(tp)
    ops = operators()

    def check(what: str, found: Tensor, expected: Tensor) -> None:
        if not same_bytes(found.contiguous(), expected.contiguous()):
            faults.append(what)

    # q, k, v rows interleaved head group by head group, as an engine may store them
    name = "model.layers.0.self_attn.qkv_proj.weight"
    heads, kv_heads, width = sharding.heads, sharding.kv_heads, config.head_dim
    places = torch.arange((heads + 2 * kv_heads) * width).view(kv_heads, heads // kv_heads + 2, width)
    parts = (places[:, : heads // kv_heads], places[:, -2], places[:, -1])
    order = torch.cat([part.reshape(-1) for part in parts])
    stored = torch.empty_like(own[name].value)
    stored[order] = own[name].value
    rows = stored.shape[0]
    theirs = Weight(name, BorrowedMemory(lambda: stored), (Part(name, 0, rows),), tuple(stored.shape))
    refresh_input_shards([theirs], sharding, tp, {name: order})
    first, last = sharding.inputs(name)
    assert theirs.input_shard is not None and own[name].input_shard is not None
    check("input shard in HF order", theirs.input_shard.value, whole[name].value[:, first:last])
    check("input shard of own weights", own[name].input_shard.value, theirs.input_shard.value)
    unsorted = Weight(name, stored, (Part(name, 0, rows),))
    refresh_input_shards([unsorted], sharding, tp)
    assert unsorted.input_shard is not None
    if same_bytes(unsorted.input_shard.value, theirs.input_shard.value):
        faults.append("the control: another order has the same rows")
    # o and down stored by input columns
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        (a, b), (c, d) = sharding.inputs(name), sharding.rows(name)
        column = whole[name].value[:, a:b].contiguous()
        parallel = Weight(name, column, (Part(name, 0, column.shape[0]),))
        refresh_output_shards([parallel], sharding, tp)
        assert parallel.output_shard is not None
        check(f"output shard of {name}", parallel.output_shard.value, whole[name].value[c:d])
        x = bf16_randn(9, whole[name].shape[1], seed=2)
        with torch.no_grad():
            product = ops.linear(x, whole[name])
            check(f"columns of {name}", ops.linear(x, parallel.output_shard), product[:, c:d])
            summed = sum(tp.all_gather(ops.linear(x[:, a:b], parallel), purpose="control"))
        if same_bytes(summed, product):
            faults.append("the control: partial products summed over ranks have the same bits")
    return faults


def test_second_copies_of_weights_that_others_store(tmp_path: Path) -> None:
    assert [rank.result for rank in run_ranks(store_otherwise, 2, tmp_path)] == [[], []]


def test_one_rank_needs_a_copy_only_where_its_rows_lie_otherwise() -> None:
    config = qwen3(layers=1, intermediate=512, vocabulary=700)
    weights: ModelWeights = random_weights(config, 3)
    name, alone = "model.layers.0.self_attn.qkv_proj.weight", group_over(None)
    refresh_input_shards([weights[name]], weights.sharding, alone)
    refresh_output_shards([weights[name]], weights.sharding, alone)
    assert weights[name].input_shard is None and weights[name].output_shard is None
    backwards = torch.arange(weights[name].shape[0]).flip(0)
    refresh_input_shards([weights[name]], weights.sharding, alone, {name: backwards})
    found = weights[name].input_shard
    assert found is not None and same_bytes(found.value, weights[name].value.flip(0))
