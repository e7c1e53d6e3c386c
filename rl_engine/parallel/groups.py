"""Groups of ranks that exchange bytes (gloo between CPU processes; any byte transport gives the same bits)."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = datetime.timedelta(seconds=300)


class PeerLost(RuntimeError):
    """A rank of the group is gone or does not answer; the run cannot go on."""


@contextmanager
def _naming_peers(ranks: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistBackendError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PeerLost(f"an exchange among ranks {list(ranks)} failed: {reason}") from error


def _as_bytes(x: Tensor) -> Tensor:
    """uint8 view of a contiguous copy: whatever the dtype, no library can do arithmetic on it."""
    return x.detach().contiguous().flatten().view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)


class Group:
    """Ranks in order, and this process' place among them.

    Attributes:
        ranks: global ranks.
        index: this process' place, 0 ... size - 1.
        sent: bytes that this process sent to others, by purpose.
    """

    def __init__(self, ranks: tuple[int, ...], index: int, handle: Any = None) -> None:
        self.ranks, self.index, self._handle = ranks, index, handle
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
        longest = max(sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: sizes[self.index]] = _as_bytes(x)
        buffers = [torch.empty(longest, dtype=torch.uint8) for _ in self.ranks]
        with _naming_peers(self.ranks):
            dist.all_gather(buffers, mine, group=self._handle)
        self._count(purpose, sizes[self.index] * (self.size - 1))
        return [
            buffer[:size].clone().view(x.dtype).view(shape)
            for buffer, size, shape in zip(buffers, sizes, shapes, strict=True)
        ]

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], *, purpose: str) -> list[Tensor]:
        """``parts[i]`` goes to member i; what member i sent here comes back, of shape ``shapes[i]``, in group order."""
        if self.size == 1:
            return [parts[0]]
        dtype, element = parts[0].dtype, parts[0].element_size()
        sizes_out = [part.numel() * element for part in parts]
        sizes_in = [math.prod(shape) * element for shape in shapes]
        flat_out = torch.cat([_as_bytes(part) for part in parts])
        flat_in = torch.empty(sum(sizes_in), dtype=torch.uint8)
        with _naming_peers(self.ranks):
            dist.all_to_all_single(flat_in, flat_out, sizes_in, sizes_out, group=self._handle)
        self._count(purpose, sum(sizes_out) - sizes_out[self.index])
        pieces = flat_in.split(sizes_in)
        return [piece.clone().view(dtype).view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def send(self, x: Tensor, member: int, *, purpose: str) -> None:
        """``x`` to group member ``member``, which must call :meth:`receive`."""
        data = _as_bytes(x)
        with _naming_peers(self.ranks):
            dist.send(data, dst=self.ranks[member], group=self._handle)
        self._count(purpose, data.numel())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, member: int) -> Tensor:
        """What group member ``member`` sends, of ``shape`` and ``dtype``."""
        out = torch.empty(shape, dtype=dtype)
        data = torch.empty(out.numel() * out.element_size(), dtype=torch.uint8)
        with _naming_peers(self.ranks):
            dist.recv(data, src=self.ranks[member], group=self._handle)
        return data.view(dtype).view(shape)

    def barrier(self) -> None:
        """Returns when every member is here."""
        if self.size > 1:
            with _naming_peers(self.ranks):
                dist.barrier(group=self._handle)


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
        for group in (self.tp, self.cp, self.world):
            total.update(group.sent)
        return dict(total)


def single_mesh() -> Mesh:
    """One process, no communication."""
    return Mesh(Group((0,), 0), Group((0,), 0), Group((0,), 0))


def join_mesh(tp: int, cp: int, rank: int, store: str, timeout: datetime.timedelta = TIMEOUT) -> Mesh:
    """Meets the other ``tp * cp - 1`` processes at ``store`` (``tcp://host:port`` or ``file:///path``).

    Raises:
        PeerLost: the others did not come within ``timeout``.
    """
    size = tp * cp
    if size == 1:
        return single_mesh()
    with _naming_peers(range(size)):
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
        tp_groups = [tuple(range(c * tp, (c + 1) * tp)) for c in range(cp)]
        cp_groups = [tuple(range(t, size, tp)) for t in range(tp)]
        handles = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in (*tp_groups, *cp_groups)}
    mine_tp, mine_cp = tp_groups[rank // tp], cp_groups[rank % tp]
    return Mesh(
        tp=Group(mine_tp, mine_tp.index(rank), handles[mine_tp]),
        cp=Group(mine_cp, mine_cp.index(rank), handles[mine_cp]),
        world=Group(tuple(range(size)), rank, None),
    )


def leave_mesh() -> None:
    """Ends this process' part in every group."""
    if dist.is_initialized():
        dist.destroy_process_group()
