"""Exchanges are of bytes, for every dtype and shape; a rank that is gone ends the others in seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_engine.parallel import Group, NoTransport, PeerLost, groups, join_mesh, single_mesh
from rl_engine.parallel.groups import leave_mesh
from tests.helpers.ranks import Rank, Ranks, run_ranks

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
SECONDS = 60.0  # on a busy machine; the exchanges' own limit is far above


def payload(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bytes as ``dtype``: NaN payloads, infinities, denormals, both zeros."""
    number = int(torch.tensor(shape).prod())
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (number * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.bool:
        return (raw % 2).bool().view(shape)
    return raw.view(dtype).view(shape) if number else torch.empty(shape, dtype=dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Also that they lie in the same memory."""
    if a.device != b.device:
        return False
    a, b = a.cpu(), b.cpu()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return not a.numel() or torch.equal(a.contiguous().flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def device_of(rank: Rank, kind: str) -> torch.device:
    """``kind``: cpu, shared (ranks have GPU 0 together) or own (each has one)."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank.index if kind == "own" else 0)


def gather_everything(rank: Rank, kind: str = "cpu") -> list[str]:
    """Faults of all-gathers over dtypes, ragged, empty and strided inputs."""
    device = device_of(rank, kind)
    group, faults = rank.join(device=device, shared=kind == "shared").tp, []
    cases: list[list[tuple[int, ...]]] = [
        [(3, 5)] * rank.size,
        [(i + 1, 2) for i in range(rank.size)],
        [(4 * (i % 2), 7) for i in range(rank.size)],  # some ranks have nothing
        [(0, 7)] * rank.size,
        [(5, i) for i in range(rank.size)],
    ]
    for number, shapes in enumerate(cases):
        for dtype in DTYPES:
            parts = [payload(dtype, shape, 100 * number + i).to(device) for i, shape in enumerate(shapes)]
            before = group.sent["test"]
            received = group.all_gather(parts[rank.index], shapes, purpose="test")
            own = parts[rank.index].numel() * parts[rank.index].element_size()
            if group.sent["test"] - before != own * (rank.size - 1):
                faults.append(f"{dtype} case {number}: {group.sent['test'] - before} bytes counted")
            faults += [f"{dtype} case {number}" for a, b in zip(received, parts, strict=True) if not same_bytes(a, b)]
    strided = [payload(torch.bfloat16, (6, 8), i).to(device) for i in range(rank.size)]
    received = group.all_gather(strided[rank.index].T, purpose="strided")
    faults += ["strided" for a, b in zip(received, strided, strict=True) if not same_bytes(a, b.T.contiguous())]
    on_cpu = [payload(torch.float32, (3,), i) for i in range(rank.size)]
    received = group.all_gather(on_cpu[rank.index], purpose="cpu")
    faults += ["from a CPU" for a, b in zip(received, on_cpu, strict=True) if not same_bytes(a, b)]
    return faults + still_right(group, rank, device)


def still_right(group: Group, rank: Rank, device: torch.device) -> list[str]:
    """Faults where inputs are written again, and results read, as soon as an exchange returns."""
    faults = []
    for step in range(20):
        mine = torch.full((1 << 18,), 100 * step + rank.index, device=device)
        received = group.all_gather(mine, purpose="again")
        mine.fill_(-1)
        turned = group.all_to_all(
            [mine + i for i in range(rank.size)], [tuple(mine.shape)] * rank.size, purpose="again"
        )
        mine.fill_(-7)
        faults += [f"step {step}" for i, x in enumerate(received) if bool((x != 100 * step + i).any())]
        faults += [f"step {step} back" for x in turned if bool((x != rank.index - 1).any())]
    return faults


def exchange_everything(rank: Rank, kind: str = "cpu") -> list[str]:
    """Faults of all-to-all over dtypes; part (i, j) goes from i to j; some are empty."""
    device = device_of(rank, kind)
    group, faults = rank.join(device=device, shared=kind == "shared").tp, []
    me = rank.index
    for dtype in DTYPES:
        for shape in (lambda i, j: (2, 3), lambda i, j: (i + 1, j), lambda i, j: (3 * (j == 0), i)):
            parts = [payload(dtype, shape(me, j), 10 * me + j).to(device) for j in range(rank.size)]
            received = group.all_to_all(parts, [shape(i, me) for i in range(rank.size)], purpose="test")
            expected = [payload(dtype, shape(i, me), 10 * i + me).to(device) for i in range(rank.size)]
            faults += [f"{dtype}" for a, b in zip(received, expected, strict=True) if not same_bytes(a, b)]
    everything = sum(part.numel() * part.element_size() for part in parts)
    before = group.sent["test"]
    group.all_to_all(parts, [shape(i, me) for i in range(rank.size)], purpose="test")
    if group.sent["test"] - before != everything - parts[me].numel() * parts[me].element_size():
        faults.append("bytes counted")
    return faults


@pytest.mark.parametrize("function", [gather_everything, exchange_everything])
def test_bytes_arrive(function: Any, tmp_path: Path) -> None:
    assert [rank.result for rank in run_ranks(function, 3, tmp_path)] == [[], [], []]


def pass_along(rank: Rank, kind: str = "cpu") -> list[str]:
    """Faults of sending every dtype once around the ring, each rank adding nothing."""
    device = device_of(rank, kind)
    group, faults = rank.join(device=device, shared=kind == "shared").tp, []
    after, before = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
    for dtype in DTYPES:
        for shape in ((3, 5), (0, 4), (1,)):
            expected = payload(dtype, shape, before).to(device)
            own = payload(dtype, shape, rank.index).to(device)
            if rank.index % 2:
                received = group.receive(shape, dtype, before, device)
                group.send(own, after, purpose="test")
            else:
                group.send(own, after, purpose="test")
                received = group.receive(shape, dtype, before, device)
            faults += [] if same_bytes(received, expected) else [f"{dtype} {shape}"]
    sizes = [torch.empty(0, dtype=dtype).element_size() for dtype in DTYPES]
    return faults + ([] if group.sent["test"] == 16 * sum(sizes) else [f"{group.sent['test']} bytes counted"])


def test_send_and_receive(tmp_path: Path) -> None:
    assert [rank.result for rank in run_ranks(pass_along, 2, tmp_path)] == [[], []]


def by_stand_in(rank: Rank, name: str) -> list[str]:
    """Faults of one of the above through the transport of own GPUs, with gloo and a CPU in NCCL's and a GPU's place."""

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return True

    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.Event = Event
    join = Rank.join

    def replaced(rank: Rank, **where: Any) -> groups.Mesh:
        mesh = join(rank, **where)
        for group in (mesh.tp, mesh.world):
            group.transport = groups.NcclTransport(group.transport.handle, torch.device("cpu"))
            group.barrier()
        return mesh

    Rank.join = replaced
    return globals()[name](rank)


@pytest.mark.parametrize("name", ["gather_everything", "exchange_everything", "pass_along"])
def test_the_transport_of_own_gpus_moves_the_same_bytes(name: str, tmp_path: Path) -> None:
    size = 2 if name == "pass_along" else 3
    assert [rank.result for rank in run_ranks(by_stand_in, size, tmp_path, name)] == [[]] * size


def test_payloads_hold_what_arithmetic_would_change() -> None:
    """The control of the test above: adding zero changes some of these bytes."""
    x = payload(torch.bfloat16, (3000,), 0)
    assert x.isnan().any()
    assert not same_bytes(x + 0.0, x)


def test_one_rank_exchanges_nothing() -> None:
    group = Group((0,), 0)
    x = payload(torch.bfloat16, (3, 5), 0)
    assert group.all_gather(x, purpose="test")[0] is x
    assert group.all_to_all([x], [(3, 5)], purpose="test")[0] is x
    group.barrier()
    assert single_mesh().sent() == {}


def place_of(rank: Rank, tp: int, cp: int) -> dict[str, Any]:
    mesh = join_mesh(tp, cp, rank.index, f"file://{rank.folder}/store")
    mine = torch.tensor([rank.index])
    seen = {
        name: torch.cat(group.all_gather(mine, purpose=name)).tolist()
        for name, group in (("tp", mesh.tp), ("cp", mesh.cp), ("world", mesh.world))
    }
    mesh.world.barrier()
    sent = mesh.sent()
    leave_mesh()
    return {"seen": seen, "indices": [mesh.tp.index, mesh.cp.index], "sent": sent, "left": not dist.is_initialized()}


def test_mesh_of_two_by_three(tmp_path: Path) -> None:
    for rank, ended in enumerate(run_ranks(place_of, 6, tmp_path, 2, 3)):
        tp, cp = rank % 2, rank // 2
        assert ended.result["seen"] == {
            "tp": [2 * cp, 2 * cp + 1],
            "cp": [tp, tp + 2, tp + 4],
            "world": [0, 1, 2, 3, 4, 5],
        }
        assert ended.result["indices"] == [tp, cp]
        assert ended.result["sent"] == {"tp": 8, "cp": 16, "world": 40}
        assert ended.result["left"]


def listening(rank: Rank) -> list[str]:
    import psutil

    join_mesh(2, 1, rank.index, f"file://{rank.folder}/store").world.barrier()
    found = psutil.Process().net_connections("inet")
    leave_mesh()
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]


def test_ranks_of_one_machine_listen_on_the_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for ended in run_ranks(listening, 2, tmp_path):
        assert ended.result and set(ended.result) <= {"127.0.0.1", "::1"}


def test_gpus_of_their_own_need_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(groups, "nccl_available", lambda: False)
    with pytest.raises(NoTransport, match="has no NCCL: exchange through host memory"):
        join_mesh(2, 1, 0, f"file://{tmp_path}/store", device=torch.device("cuda", 0))
    assert not dist.is_initialized()


# -- ranks that are gone


def lose_a_rank(rank: Rank, exchange: str) -> dict[str, Any]:
    """Rank 1 dies while the others wait for it; what they raise and how long it takes."""
    group = rank.join().world
    group.barrier()
    if rank.index == 1:
        time.sleep(1.0)  # the others are inside the exchange by then
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    x = torch.arange(1 << 16)
    try:
        if exchange == "all_gather":
            group.all_gather(x, purpose="test")
        elif exchange == "all_to_all":
            group.all_to_all([x] * rank.size, [tuple(x.shape)] * rank.size, purpose="test")
        else:
            group.barrier()
    except PeerLost as error:
        return {"seconds": time.monotonic() - started, "message": str(error)}
    return {"seconds": time.monotonic() - started, "message": ""}


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "barrier"])
def test_a_dead_rank_ends_the_others(exchange: str, tmp_path: Path) -> None:
    with Ranks(lose_a_rank, 3, tmp_path, exchange) as ranks:
        ended = ranks.wait(SECONDS)
    assert ended[1].code == -signal.SIGKILL
    for survivor in (ended[0], ended[2]):
        assert survivor.code == 0, survivor
        assert survivor.result["seconds"] < 20.0
        assert "exchange among ranks [0, 1, 2] failed" in survivor.result["message"]


def wait_for_nobody(rank: Rank) -> dict[str, Any]:
    """Rank 1 is alive and does not come to the exchange."""
    group = rank.join(seconds=5.0).world
    group.barrier()
    if rank.index == 1:
        time.sleep(12.0)
        return {}
    started = time.monotonic()
    try:
        group.all_gather(torch.arange(4), purpose="test")
    except PeerLost as error:
        return {"seconds": time.monotonic() - started, "message": str(error)}
    return {"message": ""}


def test_a_silent_rank_runs_into_the_time_limit(tmp_path: Path) -> None:
    with Ranks(wait_for_nobody, 2, tmp_path) as ranks:
        ended = ranks.wait(SECONDS)
    assert "failed" in ended[0].result["message"]
    assert 4.0 < ended[0].result["seconds"] < 30.0


def come_alone(rank: Rank) -> str:
    try:
        Rank(0, 2, rank.folder).join(seconds=3.0)
    except PeerLost as error:
        return str(error)
    return ""


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    (ended,) = run_ranks(come_alone, 1, tmp_path, seconds=SECONDS)
    assert "exchange among ranks [0, 1] failed" in ended.result
