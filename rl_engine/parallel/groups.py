"""Groups of ranks that exchange bytes; any transport gives the same bits.

Three transports, chosen when the ranks meet. Between CPU processes: gloo. Between GPUs of the ranks' own: NCCL, on
uint8 alone, so that it moves and never adds; an exchange is over when it returns, so that its inputs may be written
again, its results read from any stream, and a lost peer is an error here and no hanging kernel elsewhere. Between ranks
that share a GPU, which NCCL refuses, or where torch has no NCCL: gloo, staged through pinned host memory.

Ranks that have met already, in an engine of somebody else, exchange over its process groups (:func:`mesh_over`): by the
same transports, or by one that never waits on the host, so that a graph can capture it (:class:`StreamTransport`).
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = datetime.timedelta(seconds=300)
CPU = torch.device("cpu")
ALIGNMENT = 16  # bytes at which a rank's share of a gathered buffer begins: the copy engine reads no others
LOOPBACKS = ("lo", "lo0")
SPIN, NAP = 0.002, 0.0002  # seconds of asking without a pause, and between questions after that


class PeerLost(RuntimeError):
    """A rank of the group is gone or does not answer; the run cannot go on."""


class NoTransport(ValueError):
    """The ranks cannot exchange as asked: no NCCL, or ranks that share a GPU."""


@contextmanager
def _naming_peers(ranks: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistBackendError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PeerLost(f"an exchange among ranks {list(ranks)} failed: {reason}") from error


def _as_bytes(x: Tensor) -> Tensor:
    """uint8 view of a contiguous copy: whatever the dtype, no library can do arithmetic on it."""
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return x.detach().contiguous().flatten().view(torch.uint8)


class HostTransport:
    """gloo between CPU processes; tensors of a GPU are staged through pinned host memory."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @staticmethod
    def _space(size: int, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def _lowered(self, x: Tensor) -> Tensor:
        """``x`` in host memory, arrived."""
        if x.device.type == "cpu":
            return x
        host = self._space(x.numel(), x.device)
        host.copy_(x, non_blocking=True)
        torch.cuda.current_stream(x.device).synchronize()
        return host

    def gather(self, mine: Tensor, size: int) -> list[Tensor]:
        host = self._lowered(mine)
        buffers = list(self._space(size * mine.numel(), mine.device).view(size, -1))
        dist.all_gather(buffers, host, group=self.handle)
        return [buffer.to(mine.device, non_blocking=True, copy=True) for buffer in buffers]

    def exchange(self, out: Tensor, sizes_out: list[int], sizes_in: list[int]) -> list[Tensor]:
        received = self._space(sum(sizes_in), out.device)
        dist.all_to_all_single(received, self._lowered(out), sizes_in, sizes_out, group=self.handle)
        return [piece.to(out.device, non_blocking=True, copy=True) for piece in received.split(sizes_in)]

    def send(self, data: Tensor, rank: int) -> None:
        dist.send(self._lowered(data), dst=rank, group=self.handle)

    def receive(self, size: int, rank: int, device: torch.device) -> Tensor:
        data = self._space(size, device)
        dist.recv(data, src=rank, group=self.handle)
        return data.to(device, non_blocking=True)

    def barrier(self) -> None:
        dist.barrier(group=self.handle)


class NcclTransport:
    """NCCL between GPUs, one of them ``device``; tensors of host memory travel through it."""

    def __init__(self, handle: Any, device: torch.device, timeout: datetime.timedelta = TIMEOUT) -> None:
        self.handle, self.device, self.seconds = handle, device, timeout.total_seconds()

    def _finish(self, start: Callable[[], Any]) -> None:
        """Starts an exchange and waits for it on the host.

        Raises:
            RuntimeError: it failed, or was not over in time.
        """
        with torch.cuda.device(self.device):
            start().wait()  # this stream waits, the host does not
            event = torch.cuda.Event()
            event.record()
            begun = time.monotonic()
            while not event.query():
                waited = time.monotonic() - begun
                if waited > self.seconds:
                    raise RuntimeError(f"not over after {self.seconds:.0f} s")
                if waited > SPIN:
                    time.sleep(NAP)

    def gather(self, mine: Tensor, size: int) -> list[Tensor]:
        if not mine.numel():
            return [torch.empty_like(mine) for _ in range(size)]
        here = mine.to(self.device)
        found = [torch.empty_like(here) for _ in range(size)]
        self._finish(lambda: dist.all_gather(found, here, group=self.handle, async_op=True))
        return [part.to(mine.device) for part in found]

    def exchange(self, out: Tensor, sizes_out: list[int], sizes_in: list[int]) -> list[Tensor]:
        here = out.to(self.device)
        found = torch.empty(sum(sizes_in), dtype=torch.uint8, device=self.device)
        self._finish(lambda: dist.all_to_all_single(found, here, sizes_in, sizes_out, group=self.handle, async_op=True))
        return list(found.to(out.device).split(sizes_in))

    def send(self, data: Tensor, rank: int) -> None:
        if data.numel():
            here = data.to(self.device)
            self._finish(lambda: dist.isend(here, dst=rank, group=self.handle))

    def receive(self, size: int, rank: int, device: torch.device) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8, device=self.device)
        if size:
            self._finish(lambda: dist.irecv(data, src=rank, group=self.handle))
        return data.to(device)

    def barrier(self) -> None:
        self.gather(torch.ones(1, dtype=torch.uint8, device=self.device), dist.get_world_size(self.handle))


class StreamTransport:
    """Any backend of torch, on the stream in force: the host never waits, so a graph can capture an exchange.

    The price: inputs and results belong to that stream until somebody waits for it, and a lost peer shows when the
    owner of the process group looks, by its own time limit. Sizes are the host's, so a replay exchanges the same ones.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def gather(self, mine: Tensor, size: int) -> list[Tensor]:
        if not mine.numel():
            return [torch.empty_like(mine) for _ in range(size)]
        found = torch.empty(size * mine.numel(), dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(found, mine, group=self.handle)
        return list(found.view(size, -1))

    def exchange(self, out: Tensor, sizes_out: list[int], sizes_in: list[int]) -> list[Tensor]:
        found = torch.empty(sum(sizes_in), dtype=torch.uint8, device=out.device)
        dist.all_to_all_single(found, out, sizes_in, sizes_out, group=self.handle)
        return list(found.split(sizes_in))

    def send(self, data: Tensor, rank: int) -> None:
        if data.numel():
            dist.send(data, dst=rank, group=self.handle)

    def receive(self, size: int, rank: int, device: torch.device) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8, device=device)
        if size:
            dist.recv(data, src=rank, group=self.handle)
        return data

    def barrier(self) -> None:
        dist.barrier(group=self.handle)


class Transport(Protocol):
    """Moves bytes (uint8) among a group's members; ``rank`` is a global one, ``handle`` the process group."""

    handle: Any

    def gather(self, mine: Tensor, size: int) -> list[Tensor]:
        """Every member's bytes, ``mine`` of one length on all ``size`` of them, in group order."""

    def exchange(self, out: Tensor, sizes_out: list[int], sizes_in: list[int]) -> list[Tensor]:
        """``out`` cut into ``sizes_out`` goes to the members in order; what they sent here, of ``sizes_in``."""

    def send(self, data: Tensor, rank: int) -> None:
        """``data`` to ``rank``, which calls :meth:`receive`."""

    def receive(self, size: int, rank: int, device: torch.device) -> Tensor:
        """``size`` bytes of ``rank``, on ``device``."""

    def barrier(self) -> None:
        """Returns when every member is here."""


class Group:
    """Ranks in order, and this process' place among them.

    Results lie where the tensor lay that this process gave.

    Attributes:
        ranks: global ranks.
        index: this process' place, 0 ... size - 1.
        sent: bytes that this process sent to others, by purpose.
    """

    def __init__(self, ranks: tuple[int, ...], index: int, transport: Transport | None = None) -> None:
        self.ranks, self.index = ranks, index
        self.transport = transport or HostTransport(None)
        self.sent: collections.Counter[str] = collections.Counter()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _count(self, purpose: str, number: int) -> None:
        self.sent[purpose] += number

    def all_gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]] | None = None, *, purpose: str) -> list[Tensor]:
        """Every member's tensor, in group order. ``shapes`` names them where they differ."""
        if self.size == 1:
            return [x]
        shapes = shapes or [tuple(x.shape)] * self.size
        assert tuple(x.shape) == shapes[self.index], (x.shape, shapes, self.index)
        element = x.element_size()
        sizes = [math.prod(shape) * element for shape in shapes]
        longest = -(-max(sizes) // ALIGNMENT) * ALIGNMENT
        mine, own = _as_bytes(x), sizes[self.index]
        if own < longest:
            mine = torch.nn.functional.pad(mine, (0, longest - own))
        with _naming_peers(self.ranks):
            buffers = self.transport.gather(mine, self.size)
        self._count(purpose, own * (self.size - 1))
        return [
            buffer[:size].view(x.dtype).view(shape) for buffer, size, shape in zip(buffers, sizes, shapes, strict=True)
        ]

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], *, purpose: str) -> list[Tensor]:
        """``parts[i]`` goes to member i; what member i sent here comes back, of shape ``shapes[i]``, in group order."""
        if self.size == 1:
            return [parts[0]]
        dtype, element = parts[0].dtype, parts[0].element_size()
        sizes_out = [part.numel() * element for part in parts]
        sizes_in = [math.prod(shape) * element for shape in shapes]
        flat = torch.cat([_as_bytes(part) for part in parts])
        with _naming_peers(self.ranks):
            pieces = self.transport.exchange(flat, sizes_out, sizes_in)
        self._count(purpose, sum(sizes_out) - sizes_out[self.index])
        return [piece.view(dtype).view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def send(self, x: Tensor, member: int, *, purpose: str) -> None:
        """``x`` to group member ``member``, which must call :meth:`receive`."""
        data = _as_bytes(x)
        with _naming_peers(self.ranks):
            self.transport.send(data, self.ranks[member])
        self._count(purpose, data.numel())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, member: int, device: torch.device = CPU) -> Tensor:
        """What group member ``member`` sends, of ``shape`` and ``dtype``."""
        size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        with _naming_peers(self.ranks):
            data = self.transport.receive(size, self.ranks[member], device)
        return data.view(dtype).view(shape)

    def barrier(self) -> None:
        """Returns when every member is here."""
        if self.size > 1:
            with _naming_peers(self.ranks):
                self.transport.barrier()


@dataclasses.dataclass(frozen=True)
class Mesh:
    """TP x CP ranks of one model copy; global rank = cp * TP + tp. ``world`` holds them all."""

    tp: Group
    cp: Group
    world: Group

    @property
    def size(self) -> int:
        return self.world.size

    def sent(self) -> dict[str, int]:
        """Bytes this rank sent, by purpose."""
        total: collections.Counter[str] = collections.Counter()
        for group in {id(group): group for group in (self.tp, self.cp, self.world)}.values():
            total.update(group.sent)
        return dict(total)


def single_mesh() -> Mesh:
    """One process, no communication."""
    return Mesh(Group((0,), 0), Group((0,), 0), Group((0,), 0))


def group_over(
    handle: Any,
    *,
    device: torch.device = CPU,
    ranks: Sequence[int] | None = None,
    transport: Transport | None = None,
    timeout: datetime.timedelta = TIMEOUT,
) -> Group:
    """A group over a process group that others made and keep; nothing is exchanged to make it.

    Args:
        handle: as its owner hands it out (a wrapper that can be loaded again included): it is passed to
            ``torch.distributed`` at every exchange and never looked into. None stands for this process alone.
        device: where this rank computes.
        ranks: its global ranks in group order, where ``torch.distributed`` cannot tell them for this handle.
        transport: what moves the bytes. By default the handle's backend decides: with gloo through host memory, with
            NCCL an exchange is over when it returns (:class:`NcclTransport`); ``StreamTransport(handle)`` can be
            captured.
        timeout: of one exchange by NCCL.

    Raises:
        NoTransport: this process is no member, or the backend is neither gloo nor NCCL and no transport is given.
    """
    if handle is None:
        here = dist.get_rank() if dist.is_initialized() else 0
        return Group((here,), 0)
    members, here = tuple(ranks or dist.get_process_group_ranks(handle)), dist.get_rank()
    if here not in members:
        raise NoTransport(f"rank {here} is no member of the group of ranks {list(members)}")
    if transport is None and len(members) > 1:
        backend = dist.get_backend(handle)
        if backend not in ("gloo", "nccl"):
            raise NoTransport(f"a group with backend {backend}: give a transport (StreamTransport takes any backend)")
        transport = NcclTransport(handle, device, timeout) if backend == "nccl" else HostTransport(handle)
    return Group(members, members.index(here), transport)


def mesh_over(tp: Group, cp: Group | None = None, world: Group | None = None) -> Mesh:
    """A mesh of groups that exist (:func:`group_over`).

    Args:
        cp: by default this process alone.
        world: all ranks of the model copy; may be left out where there is tensor or context parallelism alone.

    Raises:
        NoTransport: TP x CP ranks are not those of ``world``, or there is no ``world`` and both are parallel.
    """
    cp = cp or Group((tp.ranks[tp.index],), 0)
    if world is None:
        if tp.size > 1 and cp.size > 1:
            raise NoTransport("tensor and context parallel ranks: give the group of them all")
        world = tp if cp.size == 1 else cp
    if world.size != tp.size * cp.size or not {*tp.ranks, *cp.ranks} <= {*world.ranks}:
        raise NoTransport(f"TP ranks {tp.ranks} and CP ranks {cp.ranks} do not make up the ranks {world.ranks}")
    return Mesh(tp, cp, world)


def nccl_available() -> bool:
    """Whether this torch exchanges between GPUs of the ranks' own."""
    return dist.is_available() and dist.is_nccl_available()


def join_mesh(
    tp: int,
    cp: int,
    rank: int,
    store: str,
    timeout: datetime.timedelta = TIMEOUT,
    *,
    device: torch.device = CPU,
    shared: bool = False,
) -> Mesh:
    """Meets the other ``tp * cp - 1`` processes at ``store`` (``tcp://host:port`` or ``file:///path``).

    Ranks that meet at a file are on one machine: gloo then listens on the loopback alone, unless
    ``GLOO_SOCKET_IFNAME`` is set. By itself it takes the address of the host's name, which others may reach.

    Args:
        device: where this rank computes.
        shared: ranks on GPUs exchange through host memory, because some of them have a GPU together or torch has no
            NCCL; otherwise they use NCCL, with NVLink multicast off unless ``NCCL_NVLS_ENABLE`` is set.

    Raises:
        PeerLost: the others did not come within ``timeout``.
        NoTransport: NCCL is to be used and is not there, or ranks have a GPU together.
    """
    size = tp * cp
    nccl = size > 1 and device.type == "cuda" and not shared
    if nccl and not nccl_available():
        raise NoTransport(f"torch {torch.__version__} has no NCCL: exchange through host memory (shared)")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels and NCCL take the device in force
    if size == 1:
        return single_mesh()
    if store.startswith("file:"):
        for name in (name for _, name in socket.if_nameindex() if name in LOOPBACKS):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    with _naming_peers(range(size)):
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    whole = tuple(range(size))
    if nccl:
        _refuse_common_gpus(Group(whole, rank), device)
    mesh = make_mesh(tp, cp, rank, timeout, device=device, nccl=nccl)
    assert mesh is not None, f"rank {rank} of {size}"
    return mesh


def make_mesh(
    tp: int,
    cp: int,
    rank: int,
    timeout: datetime.timedelta = TIMEOUT,
    *,
    device: torch.device = CPU,
    nccl: bool = False,
) -> Mesh | None:
    """A mesh of the first ``tp * cp`` joined ranks, None on the others; every joined rank must call it.

    Raises:
        PeerLost: another rank did not come.
    """
    size = tp * cp
    whole = tuple(range(size))
    tp_groups = [tuple(range(c * tp, (c + 1) * tp)) for c in range(cp)]
    cp_groups = [tuple(range(t, size, tp)) for t in range(tp)]
    if nccl:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    backend, patience = ("nccl", 2 * timeout) if nccl else ("gloo", timeout)  # NCCL's own limit ends the process
    with _naming_peers(whole):
        sets = dict.fromkeys((whole, *tp_groups, *cp_groups))
        handles = {ranks: dist.new_group(list(ranks), patience, backend) for ranks in sets if len(ranks) > 1}
    if rank >= size:
        return None

    def group(ranks: tuple[int, ...]) -> Group:
        if len(ranks) == 1:
            return Group(ranks, 0)
        handle = handles[ranks]
        transport = NcclTransport(handle, device, timeout) if nccl else HostTransport(handle)
        return Group(ranks, ranks.index(rank), transport)

    mesh = Mesh(group(tp_groups[rank // tp]), group(cp_groups[rank % tp]), group(whole))
    if nccl:  # NCCL connects at a group's first exchange: who is not there is named now
        for each in (mesh.world, mesh.tp, mesh.cp):
            each.barrier()
    return mesh


def _refuse_common_gpus(world: Group, device: torch.device) -> None:
    """
    Raises:
        NoTransport: two ranks have one GPU.
    """
    name = str(torch.cuda.get_device_properties(device).uuid).encode()[:64].ljust(64)
    found = [bytes(each.tolist()) for each in world.all_gather(torch.tensor(list(name), dtype=torch.uint8), purpose="")]
    for first, one in enumerate(found):
        others = [rank for rank, other in enumerate(found) if other == one]
        if len(others) > 1 and others[0] == first:
            raise NoTransport(f"ranks {others} have one GPU, which NCCL refuses: exchange through host memory (shared)")


def leave_mesh() -> None:
    """Ends this process' part in every group."""
    if dist.is_initialized():
        dist.destroy_process_group()
