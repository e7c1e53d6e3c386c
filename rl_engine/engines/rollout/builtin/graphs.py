"""Decode passes captured once and replayed: the host starts one graph instead of every kernel of every layer.

A pass in which every sample appends one token reads all that differs between passes (ids, positions, page tables,
slots, draw identities) from memory that keeps its place, and writes tokens and logprobs there. A graph begins with the
copy of the inputs from pinned memory and ends with the copy of the results into pinned memory, so that a pass is one
launch. While it is computed the host advances the inputs by one token a sample; what must be known of the drawn tokens
and of new pages is written when they are. Inputs are written in ordinary memory and put into pinned memory when the
pass before has ended, since a graph may read it late.

A graph is made for a size, for the number of KV splits of the longest sample, rounded up to a power of two (a launch's
grid, where programs without keys end at once), and for the temperature of its draws. A batch is padded up to the next
size: the rows behind it are a sample of one token each on the scratch page, and no operator looks at another row, so no
bit changes. The first pass of a kind is launched, so that kernels are compiled and libraries have what they need; the
second is captured. All graphs share one pool of memory for what is between inputs and results.

A graph holds addresses. They are compared before every pass: where weights or cache lie elsewhere, all graphs are
dropped. What lies at the same addresses may change.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_engine.engines.rollout.builtin.memory import PagedMemory
from rl_engine.engines.rollout.builtin.sequence import Sequence
from rl_engine.models.decoder import Decoder
from rl_engine.numerics.contract import Contract
from rl_engine.ops.attention.static import DecodeBatch
from rl_engine.ops.operators import Calls
from rl_engine.ops.sample import DrawKey

SPLIT = Contract().kv_split
MOST = 64  # graphs that are kept, the longest unused goes first
ALIGNMENT = 256  # bytes, of every input
DTYPES: dict[torch.dtype, Any] = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


class CaptureFailed(RuntimeError):
    """A decode pass could not be captured; nothing is replayed in its place."""


class GraphDevice(Protocol):
    """What graphs need of a device."""

    device: torch.device

    def host_bytes(self, size: int) -> Tensor:
        """uint8 [size] in the host's memory, from which copies need no staging."""

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        """What ``run`` would launch, as one call; ``run`` itself computes nothing."""

    def wait(self) -> None:
        """Until everything has been computed that was started."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What one graph is made for: padded batch size, KV splits at most, temperature of the draws (None: hidden states
    only)."""

    size: int
    splits: int
    temperature: float | None


@dataclasses.dataclass(frozen=True)
class Graph:
    replay: Callable[[], None]
    calls: Calls


def captured_sizes(offered: Items[int], most: int) -> tuple[int, ...]:
    """The sizes that are captured of those ``offered``, ascending, for batches of at most ``most``: for every power of
    two the smallest that holds it, and the largest that is needed. Every one costs two launched passes, while a padded
    row costs next to nothing: on an H200 a pass of 17 samples takes as long as one of 64."""
    useful = sorted(set(offered))
    needed = next((size for size in useful if size >= most), None)
    useful = [size for size in useful if needed is None or size <= needed]
    powers = (1 << i for i in range(useful[-1].bit_length())) if useful else ()
    return tuple(sorted({*(next(size for size in useful if size >= power) for power in powers), *useful[-1:]}))


class Block:
    """Named arrays in one piece of pinned memory on the host and one of the same form on the device; one copy takes the
    first ``size`` bytes across. With ``staged`` the host's arrays lie in ordinary memory, until :meth:`stage`."""

    def __init__(
        self, device: GraphDevice, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], staged: bool = False
    ) -> None:
        places, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            places[name], end = end, end + -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.host_bytes = device.host_bytes(end).zero_()
        self.device_bytes = torch.zeros(end, dtype=torch.uint8, device=device.device)
        self._pinned = self.host_bytes.numpy()
        self._written = np.zeros_like(self._pinned) if staged else self._pinned
        self.host: dict[str, np.ndarray[Any, Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in shapes.items():
            part = slice(places[name], places[name] + math.prod(shape) * dtype.itemsize)
            self.host[name] = self._written[part].view(DTYPES[dtype]).reshape(shape)
            self.device[name] = self.device_bytes[part].view(dtype).view(shape)
        self.places = places

    def stage(self, size: int) -> None:
        self._pinned[:size] = self._written[:size]

    def send(self, size: int) -> None:
        self.device_bytes[:size].copy_(self.host_bytes[:size], non_blocking=True)

    def fetch(self) -> None:
        self.host_bytes.copy_(self.device_bytes, non_blocking=True)


class Inputs:
    """What a pass of at most ``rows`` samples reads, tables at most ``width`` pages wide.

    A row remembers whose it is: a table is written as far as it grew. Rows without a sample are padding.
    """

    def __init__(self, device: GraphDevice, rows: int, width: int, page: int, scratch: int) -> None:
        self.rows, self.width, self.page, self.scratch = rows, width, page, scratch
        self.block = Block(
            device,
            {
                **{name: (torch.int64, (rows,)) for name in ("ids", "positions", "slots")},
                **{"items": (torch.int32, (rows, 4)), "words": (torch.int32, (rows, 5))},
                "tables": (torch.int32, (rows, width)),
            },
            staged=True,
        )
        self.bytes_of_row = 4 * width
        self._owners: list[list[int] | None] = [None] * rows
        self._written = [0] * rows
        host = self.block.host
        host["items"][:, 0] = host["items"][:, 3] = np.arange(rows)
        host["items"][:, 2] = 1
        host["slots"][:] = scratch * page
        host["tables"][:, 0] = scratch
        offsets = torch.arange(rows + 1, dtype=torch.int64)
        self.offsets = offsets.to(device.device)

    def fill(self, sequences: Items[Sequence], tables: Items[list[int]], size: int) -> None:
        """The next tokens of ``sequences``, then padding up to ``size`` rows."""
        host, page, count = self.block.host, self.page, len(sequences)
        pages = []
        for row, (sequence, table) in enumerate(zip(sequences, tables, strict=True)):
            if self._owners[row] is not table:
                self._begin(row, sequence, table)
            if len(table) > self._written[row]:
                self._write_table(row, table)
            pages.append(table[sequence.computed // page])
        host["ids"][:count] = [s.tokens[s.computed] for s in sequences]
        host["positions"][:count] = positions = np.array([s.computed for s in sequences])
        host["slots"][:count] = np.array(pages) * page + positions % page
        host["items"][:count, 1] = positions
        host["words"][:count, 2] = (positions + 1).astype(np.uint32).view(np.int32)
        for row in range(count, size):
            if self._owners[row] is not None:
                self._pad(row)

    def advance(self, count: int) -> list[int]:
        """The next positions of the first ``count`` rows; :meth:`complete` writes the rest, new pages of the rows that
        are handed out among it."""
        host = self.block.host
        for name, column in (("positions", ()), ("slots", ()), ("items", (1,)), ("words", (2,))):
            host[name][(slice(count), *column)] += 1
        rows: list[int] = np.flatnonzero(host["positions"][:count] % self.page == 0).tolist()
        return rows

    def complete(self, ids: list[int], opened: Items[int], tables: Items[list[int]]) -> None:
        """The rest of what :meth:`advance` began: ids of all rows, tables of those that it handed out."""
        host = self.block.host
        host["ids"][: len(ids)] = ids
        for row, table in zip(opened, tables, strict=True):
            self._write_table(row, table)
            host["slots"][row] = table[-1] * self.page

    def _write_table(self, row: int, table: list[int]) -> None:
        written = self._written[row]
        self.block.host["tables"][row, written : len(table)] = table[written:]
        self._written[row] = len(table)

    def _begin(self, row: int, sequence: Sequence, table: list[int]) -> None:
        job = sequence.job
        key = DrawKey(job.sampling.seed, job.step, job.request.prompt, job.request.sample, sequence.computed + 1)
        words = np.array([key.seed, key.step, key.position, key.sample, key.prompt], dtype=np.uint32)
        self.block.host["words"][row] = words.view(np.int32)
        self._owners[row], self._written[row] = table, 0

    def _pad(self, row: int) -> None:
        host = self.block.host
        for name in ("ids", "positions", "words"):
            host[name][row] = 0
        host["slots"][row], host["tables"][row, 0], host["items"][row, 1] = self.scratch * self.page, self.scratch, 0
        self._owners[row] = None

    def stage(self, size: int) -> None:
        """The first ``size`` rows into pinned memory; no pass may be in flight."""
        self.block.stage(self._bytes(size))

    def send(self, size: int) -> None:
        """What pinned memory has of the first ``size`` rows, in one copy."""
        self.block.send(self._bytes(size))

    def _bytes(self, size: int) -> int:
        return self.block.places["tables"] + size * self.bytes_of_row

    def batch(self, size: int, splits: int, keys: int) -> DecodeBatch:
        device = self.block.device
        positions = device["positions"][:size]
        return DecodeBatch(
            table=device["tables"][:size],
            q_offsets=self.offsets[: size + 1],
            q_position=positions,
            positions=positions,
            slots=device["slots"][:size],
            items=device["items"][:size],
            splits=splits,
            keys=keys,
        )


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A pass whose inputs are advanced, but for ids and the pages of the rows ``opened``."""

    sequences: list[Sequence]
    kind: Kind
    keys: int
    opened: list[int]


class DecodeGraphs:
    """The graphs of one engine.

    Args:
        sizes: as :func:`captured_sizes` gives them.
        device: captures; only a test gives another than :class:`CudaGraphDevice`.

    Attributes:
        replayed: passes that were replays.
        foreseen: passes whose inputs were advanced while the pass before was computed.
        captured: size of every graph that was captured, in order.
    """

    def __init__(self, decoder: Decoder, memory: PagedMemory, sizes: tuple[int, ...], device: GraphDevice) -> None:
        assert memory.scratch is not None and sizes == tuple(sorted(sizes))
        self.decoder, self.memory, self.sizes, self.device = decoder, memory, sizes, device
        self.replayed, self.foreseen, self.captured = 0, 0, list[int]()
        rows, hidden = sizes[-1], decoder.config.hidden
        self.results = Block(device, {"tokens": (torch.int64, (rows,)), "logprobs": (torch.float32, (rows,))})
        self.hidden = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device.device)
        self._inputs = self._new_inputs(64)
        self._graphs: OrderedDict[Kind, Graph] = OrderedDict()
        self._launched: set[Kind] = set()
        self._places: list[int] = []
        self._ahead: Ahead | None = None
        self._in_flight = False

    def _new_inputs(self, width: int) -> Inputs:
        assert self.memory.scratch is not None
        return Inputs(self.device, self.sizes[-1], width, self.memory.page, self.memory.scratch)

    def take(self, work: Items[tuple[Sequence, int]]) -> bool:
        """Whether every sample of the pass appends its last known token, and there is a size for so many."""
        return len(work) <= self.sizes[-1] and all(count == 1 == sequence.remaining for sequence, count in work)

    def run(
        self, sequences: Items[Sequence], temperature: float | None, meanwhile: Callable[[], object] | None = None
    ) -> tuple[list[int], list[float]] | Tensor:
        """One pass of samples that :meth:`take` took, or of the very list that :meth:`advance` was called with in the
        pass before, whose samples then have one token more and room for it. ``meanwhile`` is called while the device
        computes.

        Returns:
            (tokens, logprobs) drawn without filters at ``temperature``, token -1 where a logit is NaN; without one
            hidden states bf16 [R, H] on the device, which hold until the next pass.

        Raises:
            CaptureFailed: the pass cannot be captured.
        """
        count, ahead = len(sequences), self._ahead
        self._ahead = None
        if self._in_flight:
            self._wait()
        if ahead is None or ahead.sequences is not sequences:
            kind, keys = self._fill(sequences, temperature)
        else:
            kind, keys = ahead.kind, ahead.keys
            self._complete(ahead)
        self._inputs.stage(kind.size)
        self._in_flight = True
        self._start(kind, keys)
        if meanwhile is not None:
            meanwhile()
        if temperature is None:
            return self.hidden[:count]
        self._wait()
        host = self.results.host
        return host["tokens"][:count].tolist(), host["logprobs"][:count].tolist()

    def advance(self, sequences: list[Sequence], temperature: float) -> bool:
        """Within :meth:`run`: a pass of ``sequences``, row by row those of the one in flight, will follow when each has
        its token. False where it is filled as any other: tables outgrow the inputs."""
        inputs, count = self._inputs, len(sequences)
        longest = max(sequence.computed for sequence in sequences) + 1
        if self.memory.needed(longest) > inputs.width:
            return False
        keys = sum(sequence.computed for sequence in sequences) + count
        self._ahead = Ahead(sequences, self._kind(count, longest, temperature), keys, inputs.advance(count))
        return True

    def _fill(self, sequences: Items[Sequence], temperature: float | None) -> tuple[Kind, int]:
        tables = [self.memory.tables[sequence.number] for sequence in sequences]
        lengths = [sequence.computed + 1 for sequence in sequences]
        kind = self._kind(len(sequences), max(lengths), temperature)
        self._hold(max(map(len, tables)))
        self._inputs.fill(sequences, tables, kind.size)
        return kind, sum(lengths)

    def _complete(self, ahead: Ahead) -> None:
        sequences = ahead.sequences
        self._hold(self._inputs.width)
        tables = [self.memory.tables[sequences[row].number] for row in ahead.opened]
        self._inputs.complete([sequence.tokens[-1] for sequence in sequences], ahead.opened, tables)
        self.foreseen += 1

    def _kind(self, count: int, longest: int, temperature: float | None) -> Kind:
        size = next(size for size in self.sizes if size >= count)
        return Kind(size, 1 << ((longest - 1) // SPLIT).bit_length(), temperature)

    def _wait(self) -> None:
        self.device.wait()
        self._in_flight = False

    def _hold(self, width: int) -> None:
        """Inputs wide enough; no graph that knows other addresses than those in use."""
        places = self.addresses()
        if width > self._inputs.width:
            self._inputs = self._new_inputs(1 << (width - 1).bit_length())
        elif places == self._places:
            return
        self._graphs.clear()
        self._launched.clear()
        self._places = places

    def addresses(self) -> list[int]:
        """Where everything lies that graphs read and that others may replace."""
        cache = self.memory.cache
        values = [weight.value for weight in self.decoder.weights]
        return list(map(Tensor.data_ptr, (*values, *cache.k, *cache.v)))

    def _start(self, kind: Kind, keys: int) -> None:
        graph = self._graphs.get(kind)
        if graph is None:
            if kind not in self._launched:
                self._launched.add(kind)
                self._launch(kind, keys)
                return
            graph = self._graphs[kind] = self._capture(kind, keys)
            while len(self._graphs) > MOST:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(kind)
        graph.replay()
        self.decoder.ops.count_replay(graph.calls)
        self.replayed += 1

    def _capture(self, kind: Kind, keys: int) -> Graph:
        with self.decoder.ops.recording() as calls:
            try:
                replay = self.device.capture(lambda: self._launch(kind, keys))
            except Exception as error:
                raise CaptureFailed(
                    f"a decode pass of {kind.size} samples could not be captured as a graph ({error}); "
                    "without graph_sizes every pass is launched"
                ) from error
        self.captured.append(kind.size)
        return Graph(replay, calls)

    def _launch(self, kind: Kind, keys: int) -> None:
        size, arrays, results = kind.size, self._inputs.block.device, self.results.device
        self._inputs.send(size)
        batch, cache = self._inputs.batch(size, kind.splits, keys), self.memory.cache

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.decoder.ops.attention_decode(q, k, v, cache, layer, batch)

        hidden = self.decoder.hidden(arrays["ids"][:size], arrays["positions"][:size], attend)
        if kind.temperature is None:
            self.hidden[:size].copy_(hidden)
            return
        tokens, logprobs = self.decoder.draw_words(hidden, kind.temperature, arrays["words"][:size])
        results["tokens"][:size].copy_(tokens)
        results["logprobs"][:size].copy_(logprobs)
        self.results.fetch()


@dataclasses.dataclass(frozen=True)
class Common:
    """What passes of the same samples have in common.

    Attributes:
        batch: the list itself, by which it is known.
        temperature: of all draws; None where they differ in it, where one has a filter, or wants logprobs at another
            temperature too.
        raw: whether one wants logprobs at temperature 1.
        stops: tokens that end one of them; None where one has stop strings.
    """

    batch: list[Sequence]
    temperature: float | None
    raw: bool
    stops: frozenset[int] | None

    @staticmethod
    def of(batch: list[Sequence], vocabulary: int) -> Common:
        jobs = [sequence.job for sequence in batch]
        found = {job.sampling.temperature for job in jobs}
        for job in jobs:
            sampling = job.sampling
            filtered = 0 <= sampling.top_k < vocabulary or sampling.top_p < 1.0
            if filtered or (job.raw and sampling.temperature != 1.0):
                found.clear()
                break
        texts = any(job.stop_strings for job in jobs)
        return Common(
            batch=batch,
            temperature=found.pop() if len(found) == 1 else None,
            raw=any(job.raw for job in jobs),
            stops=None if texts else frozenset().union(*(job.sampling.stop_tokens for job in jobs)),
        )
