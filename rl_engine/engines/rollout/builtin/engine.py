"""The built-in rollout engine: continuous batching over a KV cache; samples join and leave with every pass.

A sample's tokens and logprobs depend on its identity and the weights alone: noise is keyed by (seed, step, prompt,
sample, position), and no operator looks at another row. How the work is cut into passes, what is shared, preempted or
computed again does not enter. In native mode (torch's own operators, a dense cache) the same engine runs without
sharing and preemption, and how the work is cut does change bits.

Every rank of a tensor-parallel group runs this loop on the same calls and takes the same decisions.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from rl_engine.engines.protocol import WeightSource
from rl_engine.engines.rollout.builtin.draws import Decode, Draws, end_of
from rl_engine.engines.rollout.builtin.graphs import Common, DecodeGraphs, GraphDevice, captured_sizes
from rl_engine.engines.rollout.builtin.log import Added, Cancelled, Entry, Loading, Pass, ReplayMismatch, SchedulerLog
from rl_engine.engines.rollout.builtin.memory import DenseMemory, Memory, PagedMemory
from rl_engine.engines.rollout.builtin.passes import PassLog
from rl_engine.engines.rollout.builtin.scheduler import Foreseen, Scheduler
from rl_engine.engines.rollout.builtin.sequence import Job, Output, RolloutSettings, Sequence
from rl_engine.engines.snapshot import load_source
from rl_engine.engines.types import Request, Sample, SamplingSettings
from rl_engine.models.decoder import Decoder
from rl_engine.models.weights import ModelWeights
from rl_engine.ops import Operators
from rl_engine.ops.attention.stock import DenseCache
from rl_engine.ops.sample import refuse_nan
from rl_engine.parallel import Mesh

__all__ = ["Job", "Output", "RolloutEngine", "RolloutSettings", "Statistics", "fan_out"]

Progress = Callable[[int, int], None]  # (finished samples, all samples)
InFlight = Literal["finish", "restart"]


@dataclasses.dataclass
class Statistics:
    """Sums since the engine started; ``worst_wait`` in passes, ``replayed`` passes that were graphs, of which
    ``captured`` were made; ``foreseen`` passes were laid out while the one before was computed."""

    passes: int = 0
    foreseen: int = 0
    replayed: int = 0
    captured: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    restarts: int = 0
    finished: int = 0
    cancelled: int = 0
    worst_wait: int = 0


def fan_out(prompt: int, tokens: Items[int], samples: int) -> list[Request]:
    """``samples`` requests of one prompt."""
    return [Request(prompt, sample, tuple(tokens)) for sample in range(samples)]


class RolloutEngine:
    """One rank.

    Args:
        weights: the model; the engine owns it.
        operators: providers of the rollout side.
        positions: longest prompt plus response.
        name: engine's name in the evidence.
        decode: text of token ids; needed for stop strings.
        mesh: the ranks that compute together; one by default.
        passes: collects the passes as evidence, where somebody takes them.
        graph_device: captures decode passes of the settings' ``graph_sizes``; the GPU where one rank has weights and
            providers there, otherwise none: every pass is launched then.
    """

    def __init__(
        self,
        weights: ModelWeights,
        operators: Operators,
        positions: int,
        settings: RolloutSettings,
        name: str = "rollout-0",
        decode: Decode | None = None,
        mesh: Mesh | None = None,
        passes: PassLog | None = None,
        graph_device: GraphDevice | None = None,
    ) -> None:
        self.weights, self.ops, self.settings, self.name, self.decode = weights, operators, settings, name, decode
        self.decoder = Decoder(weights, operators, positions, mesh)
        self.draws = Draws(self.decoder)
        self.positions = positions
        self.version = 0
        self.generated_tokens = 0
        self.statistics = Statistics()
        self.log, self.passes = SchedulerLog(settings.log_entries), passes
        sizes = captured_sizes(settings.graph_sizes, settings.max_batch)
        graph_device = (graph_device or _gpu(operators, weights.device, mesh)) if sizes else None
        self.memory = self._new_memory(graph_device is not None)
        self.graphs: DecodeGraphs | None = None
        if graph_device is not None and isinstance(self.memory, PagedMemory):
            self.graphs = DecodeGraphs(self.decoder, self.memory, sizes, graph_device)
        self.scheduler = Scheduler(settings, self.memory)
        self._arrivals = 0
        self._outputs: list[Output] = []
        self._script: deque[Entry] | None = None
        self._foreseen: Foreseen | None = None
        self._common: Common | None = None
        self._prepare()

    def _new_memory(self, scratch: bool) -> Memory:
        config, settings = self.weights.config, self.settings
        heads = self.decoder.cache_heads
        pages = 0 if settings.pages is None else settings.pages + scratch
        shape = (config.layers, heads, config.head_dim, pages, settings.page)
        cache = self.ops.new_cache(*shape, self.weights.device)
        if isinstance(cache, DenseCache):
            return DenseMemory(cache)
        late = self.weights.device.type == "cuda"
        return PagedMemory(cache, settings.pages is None, settings.share_prefixes, scratch, late)

    def _prepare(self) -> None:
        matrices = [w for w in self.weights if len(w.shape) == 2 and w is not self.weights.embedding]
        self.ops.pack(matrices, drop_value=True)
        if self.weights.config.tied:
            self.ops.pack([self.weights.embedding], drop_value=False)

    @property
    def unfinished(self) -> int:
        """Samples in the queue or in the batch."""
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    def load_weights(self, source: WeightSource, in_flight: InFlight = "finish") -> dict[str, str]:
        """Replaces the weights by this rank's rows of ``source``; their digests as they arrived. No sample ever has
        tokens of two versions.

        Samples with a token drawn ``finish`` first, with the weights they began with (the next :meth:`step` returns
        them), or ``restart`` from their prompt. Those without begin with the new weights either way.

        Raises:
            SnapshotMismatch: the source lacks rows.
        """
        version = source.version
        self.log.append(Loading(version, in_flight))
        running = list(self.scheduler.running)
        for sequence in running:
            if in_flight == "restart" or not sequence.responses:
                self.scheduler.withdraw(sequence)
        if in_flight == "restart":
            for sequence in self.scheduler.waiting:
                sequence.restart()
        while any(s.responses for s in (*self.scheduler.running, *self.scheduler.waiting)):
            self._pass(begun_only=True)
        self.memory.forget()
        digests = load_source(self.weights, source)
        self._prepare()
        self.version = version
        return digests

    def add(self, job: Job) -> int:
        """Queues a sample; its number, by which :meth:`step` and :meth:`cancel` know it.

        Raises:
            ValueError: an empty prompt, one that leaves no room for ``max_response_len`` tokens, or stop strings
                without a ``decode``.
        """
        return self._add([job])[0]

    def _add(self, jobs: list[Job]) -> list[int]:
        for job in jobs:
            self._check(job)
        queued = [s.job for s in (*self.scheduler.running, *self.scheduler.waiting)]
        if jobs:
            self.memory.plan_for([*queued, *jobs], self.settings.max_batch)
        numbers = []
        for job in jobs:
            number, self._arrivals = self._arrivals, self._arrivals + 1
            self.log.append(Added(number))
            self.scheduler.queue(Sequence.begin(number, job))
            numbers.append(number)
        return numbers

    def _check(self, job: Job) -> None:
        request, new = job.request, job.sampling.max_response_len
        name = f"prompt {request.prompt}"
        if not request.tokens:
            raise ValueError(f"{name} has no token")
        if new < 1:
            raise ValueError(f"{name} asks for {new} response tokens")
        if len(request.tokens) + new > self.positions:
            raise ValueError(
                f"{name} has {len(request.tokens)} tokens: with {new} response tokens it exceeds {self.positions} "
                "positions"
            )
        limit = self.memory.limit()
        if limit is not None and job.cached_tokens > limit:
            raise ValueError(f"{name} may grow to {job.cached_tokens} cached tokens: the pool holds {limit}")
        if any(not text for text in job.stop_strings):
            raise ValueError(f"{name} has an empty stop string")
        if job.stop_strings and self.decode is None:
            raise ValueError(f"{name} has stop strings, and the engine no decode to compare them with")

    def cancel(self, number: int) -> bool:
        """Takes a sample out, queued or half drawn; False where it is done or unknown. No other sample notices."""
        sequence = self.scheduler.find(number)
        if sequence is None:
            return False
        self.log.append(Cancelled(number))
        self.scheduler.remove(sequence)
        self.statistics.cancelled += 1
        return True

    def step(self) -> list[Output]:
        """One pass, if there is anything to do; what finished since the last call, in order of arrival."""
        if self.unfinished:
            self._pass()
        done, self._outputs = self._outputs, []
        return sorted(done, key=lambda output: output.number)

    def generate(
        self,
        requests: list[Request],
        step: int,
        sampling: SamplingSettings,
        progress: Progress | None = None,
        stop_strings: tuple[str, ...] = (),
    ) -> list[Sample]:
        """One sample per request, in the requests' order.

        Raises:
            ValueError: as :meth:`add`.
        """
        jobs = [Job(request, step, sampling, stop_strings) for request in requests]
        return [output.sample for output in self.run(jobs, progress)]

    def run(self, jobs: list[Job], progress: Progress | None = None) -> list[Output]:
        """One output per job, in the jobs' order; those that ``progress`` cancelled are missing.

        Raises:
            ValueError: as :meth:`add`; nothing has been queued then.
        """
        numbers = self._add(jobs)
        mine = set(numbers)
        done: dict[int, Output] = {}
        others: list[Output] = []
        try:
            while any(s.number in mine for s in chain(self.scheduler.running, self.scheduler.waiting)):
                before = len(done)
                for output in self.step():
                    if output.number in mine:
                        done[output.number] = output
                    else:
                        others.append(output)
                if progress is not None and len(done) > before:
                    progress(len(done), len(jobs))
        except BaseException:
            for number in numbers:
                self.cancel(number)
            raise
        finally:
            self._outputs.extend(others)
        return [done[number] for number in numbers if number in done]

    def replay(
        self,
        jobs: Items[Job],
        entries: Items[Entry],
        sources: Mapping[int, WeightSource] | None = None,
    ) -> list[Output]:
        """Does what another engine's log says, decision by decision: the same calls, the same passes.

        Args:
            jobs: what was added, in order.
            entries: the other log, from its engine's start.
            sources: weights by version, where the log has weight updates.

        Raises:
            ReplayMismatch: an entry is impossible here.
        """
        outputs: list[Output] = []
        self._script = script = deque(entries)
        try:
            while script:
                match script[0]:
                    case Pass():
                        outputs.extend(self.step())
                        continue
                    case Added(number):
                        same = self._arrivals == number < len(jobs) and self.add(jobs[number]) == number
                    case Cancelled(number):
                        same = self.cancel(number)
                    case Loading(version, in_flight):
                        script.popleft()
                        self.load_weights((sources or {})[version], in_flight)  # type: ignore[arg-type]
                        continue
                if not same:
                    raise ReplayMismatch(f"{script[0]} does not apply")
                script.popleft()
        finally:
            self._script = None
        return [*outputs, *self._outputs]

    def _pass(self, begun_only: bool = False) -> None:
        """One forward pass, the draws of samples that are caught up, and goodbye to those that are done."""
        try:
            with torch.no_grad():
                foreseen, self._foreseen = self._foreseen, None
                work, entry = self._decide(begun_only, foreseen)
                if self.passes is not None:
                    self.passes.decided(work, entry, self.scheduler.waiting, self.memory, self.version)
                replayed = self.statistics.replayed
                ready = self._decode_by_graph(work, foreseen)
                if ready is None:
                    ready, hidden = self._compute(work)
                    self.generated_tokens += self.draws.draw(ready, hidden, self.version)
            finished = self._retire(ready)
        except BaseException:
            # Announced pages may hold nothing: what is in flight cannot be trusted.
            self._abandon()
            raise
        if finished:
            entry = dataclasses.replace(entry, finished=tuple(sequence.number for sequence in finished))
        self.log.append(entry)
        if self.passes is not None:
            self.passes.computed(finished, self.statistics.replayed > replayed)
        self.statistics.passes += 1

    def _decide(self, begun_only: bool, foreseen: Foreseen | None) -> tuple[list[tuple[Sequence, int]], Pass]:
        if self._script is None:
            return self.scheduler.decide(begun_only, foreseen)
        entry = self._script.popleft() if self._script else None
        if not isinstance(entry, Pass):
            raise ReplayMismatch(f"a pass is due, the log has {entry}")
        return self.scheduler.follow(entry)

    def _compute(self, work: list[tuple[Sequence, int]]) -> tuple[list[Sequence], Tensor]:
        """(samples that are caught up, bf16 [R, H] of their last tokens)."""
        ordered, batch = self.memory.batch(work)
        ids = [t for s, count in ordered for t in s.tokens[s.computed : s.computed + count]]
        cache = self.memory.cache

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.ops.attention_cached(q, k, v, cache, layer, batch)

        hidden = self.decoder.hidden(torch.tensor(ids), batch.positions, attend)
        ready, rows, row = [], [], -1
        for sequence, count in ordered:
            row += count
            self.statistics.prefill_tokens += count if sequence.remaining > 1 else 0
            sequence.computed += count
            if sequence.remaining == 0:
                ready.append(sequence)
                rows.append(row)
        return ready, hidden if len(rows) == hidden.shape[0] else hidden[torch.tensor(rows, dtype=torch.int64)]

    def _decode_by_graph(self, work: list[tuple[Sequence, int]], foreseen: Foreseen | None) -> list[Sequence] | None:
        """A whole pass, draws too, that is one new token of every sample; None where it is another, or there are no
        graphs."""
        graphs = self.graphs
        if graphs is None:
            return None
        if foreseen is not None and foreseen.holds(work):
            ready = foreseen.batch
        elif graphs.take(work):
            ready = [sequence for sequence, _ in work]
        else:
            return None
        common = self._common
        if common is None or common.batch is not ready:
            common = self._common = Common.of(ready, self.weights.config.vocabulary)
        found = graphs.run(ready, common.temperature, lambda: self._computed(common))
        if isinstance(found, Tensor):
            self.generated_tokens += self.draws.draw(ready, found, self.version)
        else:
            tokens, logprobs = found
            if min(tokens) < 0:
                refuse_nan(torch.tensor(tokens))
            raw = logprobs if common.raw else None
            self.generated_tokens += self.draws.append(ready, self.version, tokens, logprobs, raw)
        return ready

    def _computed(self, common: Common) -> None:
        """While a captured pass is computed: the books behind it, and the next pass as far as it can be known, to be
        replayed as soon as the tokens are there."""
        graphs, totals, batch = self.graphs, self.statistics, common.batch
        assert graphs is not None
        for sequence in batch:
            sequence.computed += 1
        totals.replayed, totals.captured, totals.foreseen = graphs.replayed, len(graphs.captured), graphs.foreseen
        if common.temperature is None or self._script is not None:
            return
        foreseen = self.scheduler.foresee(batch)
        if foreseen is not None and graphs.advance(batch, common.temperature):
            self._foreseen = foreseen

    def _retire(self, ready: list[Sequence]) -> list[Sequence]:
        """Hands out what is done."""
        if self._surely_goes_on(ready):
            return []
        ended = [(s, reason) for s in ready if (reason := end_of(s, self.decode)) is not None]
        for sequence, reason in ended:
            self.scheduler.remove(sequence)
            self._outputs.append(Output.of(sequence, self.name, reason))
            totals = self.statistics
            totals.finished += 1
            totals.preemptions += sequence.preempted
            totals.restarts += sequence.restarted
            totals.shared_tokens += sequence.shared_tokens
            totals.worst_wait = max(totals.worst_wait, sequence.waited)
        return [sequence for sequence, _ in ended]

    def _surely_goes_on(self, ready: list[Sequence]) -> bool:
        """The next pass is foreseen, so nobody ends by length; nor by a token."""
        if self._foreseen is None or self._common is None or self._common.stops is None:
            return False
        return self._common.stops.isdisjoint([sequence.tokens[-1] for sequence in ready])

    def _abandon(self) -> None:
        self._foreseen = None
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.remove(sequence)
        self.memory.forget()


def _gpu(operators: Operators, device: torch.device, mesh: Mesh | None) -> GraphDevice | None:
    """What captures where weights lie on a GPU, every provider can be captured, and nothing is exchanged."""
    if device.type != "cuda" or not operators.captures or (mesh is not None and mesh.size > 1):
        return None
    from rl_engine.engines.rollout.builtin.cuda_graphs import CudaGraphDevice

    return CudaGraphDevice(device)
