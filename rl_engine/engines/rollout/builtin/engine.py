"""The built-in rollout engine: batched generation over a KV cache, prefill in chunks, samples join and leave each step.

A sample's tokens and logprobs depend on its identity and the weights alone: noise is keyed by (seed, step, prompt,
sample, position), and no operator looks at another row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_engine.engines.snapshot import load_snapshot
from rl_engine.engines.types import Request, RetainedRow, Sample, SamplingSettings, WeightSnapshot, pack_retained
from rl_engine.models.decoder import Decoder
from rl_engine.models.weights import ModelWeights
from rl_engine.ops import Operators
from rl_engine.ops.sample import DrawKey

Progress = Callable[[int, int], None]  # (finished samples, all samples)


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """None of these changes a bit: ``max_batch`` samples at once, ``chunk`` prefill tokens of a sample per pass,
    ``page`` tokens per KV page."""

    max_batch: int = 64
    chunk: int = 512
    page: int = 64


@dataclasses.dataclass
class _Active:
    """A sample being drawn: ``tokens`` are known, the first ``computed`` of them are in the cache."""

    request: Request
    handle: int
    tokens: list[int]
    computed: int = 0
    logprobs: list[float] = dataclasses.field(default_factory=list)
    retained: list[RetainedRow] = dataclasses.field(default_factory=list)

    @property
    def responses(self) -> int:
        return len(self.tokens) - len(self.request.tokens)


class RolloutEngine:
    """One rank.

    Args:
        weights: the model; the engine owns it.
        operators: providers of the rollout side.
        positions: longest prompt plus response.
        name: engine's name in the evidence.
    """

    def __init__(
        self,
        weights: ModelWeights,
        operators: Operators,
        positions: int,
        settings: RolloutSettings,
        name: str = "rollout-0",
    ) -> None:
        self.weights, self.ops, self.settings, self.name = weights, operators, settings, name
        self.decoder = Decoder(weights, operators, positions)
        self.positions = positions
        self.version = 0
        self.generated_tokens = 0
        self._prepare()

    def _prepare(self) -> None:
        matrices = [w for w in self.weights if len(w.shape) == 2 and w is not self.weights.embedding]
        self.ops.pack(matrices, drop_value=True)
        if self.weights.config.tied:
            self.ops.pack([self.weights.embedding], drop_value=False)

    def load_weights(self, snapshot: WeightSnapshot) -> dict[str, str]:
        """Replaces the weights between two generations; the digests of what arrived."""
        digests = load_snapshot(self.weights, snapshot)
        self._prepare()
        self.version = snapshot.version
        return digests

    def generate(
        self, requests: list[Request], step: int, sampling: SamplingSettings, progress: Progress | None = None
    ) -> list[Sample]:
        """One sample per request, in the requests' order.

        Raises:
            ValueError: an empty prompt, or one that leaves no room for ``max_response_len`` tokens.
        """
        for request in requests:
            if not request.tokens:
                raise ValueError(f"prompt {request.prompt} has no token")
            if len(request.tokens) + sampling.max_response_len > self.positions:
                raise ValueError(
                    f"prompt {request.prompt} has {len(request.tokens)} tokens: with {sampling.max_response_len} "
                    f"response tokens it exceeds {self.positions} positions"
                )
        with torch.no_grad():
            return _Generation(self, requests, step, sampling, progress).run()


class _Generation:
    """One call of :meth:`RolloutEngine.generate`."""

    def __init__(
        self,
        engine: RolloutEngine,
        requests: list[Request],
        step: int,
        sampling: SamplingSettings,
        progress: Progress | None,
    ) -> None:
        self.engine, self.step, self.sampling, self.progress = engine, step, sampling, progress
        self.waiting = list(reversed(list(enumerate(requests))))
        self.order: dict[int, int] = {}
        self.active: list[_Active] = []
        self.done: dict[int, Sample] = {}
        self.total = len(requests)
        page = engine.settings.page
        lengths = sorted((len(r.tokens) + sampling.max_response_len for r in requests), reverse=True)
        pages = sum(-(-length // page) for length in lengths[: engine.settings.max_batch])
        config = engine.weights.config
        self.cache: Any = engine.ops.new_cache(config.layers, config.kv_heads, config.head_dim, pages, page)

    def run(self) -> list[Sample]:
        while self.waiting or self.active:
            while self.waiting and len(self.active) < self.engine.settings.max_batch:
                number, request = self.waiting.pop()
                active = _Active(request, self.cache.join(), list(request.tokens))
                self.order[active.handle] = number
                self.active.append(active)
            self._pass()
            self._retire()
        return [self.done[number] for number in range(self.total)]

    def _pass(self) -> None:
        """One forward pass: a prefill chunk or one token of every active sample; draws where a sample is caught up."""
        chunk = self.engine.settings.chunk
        starts = [a.computed for a in self.active]
        counts = [min(len(a.tokens) - a.computed, chunk) for a in self.active]
        batch = self.cache.batch([a.handle for a in self.active], starts, counts)
        ids = [t for a, s, n in zip(self.active, starts, counts, strict=True) for t in a.tokens[s : s + n]]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.engine.ops.attention_cached(q, k, v, self.cache, layer, batch)

        hidden = self.engine.decoder.hidden(torch.tensor(ids), batch.positions, attend)
        ready, rows = [], []
        last_rows = (batch.q_offsets[1:] - 1).tolist()
        for active, count, row in zip(self.active, counts, last_rows, strict=True):
            active.computed += count
            if active.computed == len(active.tokens):
                ready.append(active)
                rows.append(row)
        if ready:
            self._draw(ready, hidden[torch.tensor(rows)])

    def _draw(self, ready: list[_Active], hidden: Tensor) -> None:
        sampling = self.sampling
        vocabulary = self.engine.weights.config.vocabulary
        keys = [DrawKey(sampling.seed, self.step, a.request.prompt, a.request.sample, len(a.tokens)) for a in ready]
        drawn = self.engine.decoder.draw(hidden, sampling.temperature, sampling.top_k, sampling.top_p, keys)
        bits = None if drawn.mask is None else drawn.mask.numpy()
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        for row, (active, token, logprob) in enumerate(zip(ready, tokens, logprobs, strict=True)):
            active.tokens.append(token)
            active.logprobs.append(logprob)
            if bits is not None:
                active.retained.append(pack_retained(bits[row], vocabulary))
        self.engine.generated_tokens += len(ready)

    def _retire(self) -> None:
        finished = []
        for active in self.active:
            if not active.responses:
                continue
            stopped = active.tokens[-1] in self.sampling.stop_tokens
            if stopped or active.responses >= self.sampling.max_response_len:
                finished.append(active)
                self.done[self.order[active.handle]] = self._sample(active, "stop" if stopped else "length")
        if finished:
            self.cache.leave([active.handle for active in finished])
            self.active = [active for active in self.active if active not in finished]
            if self.progress is not None:
                self.progress(len(self.done), self.total)

    def _sample(self, active: _Active, reason: str) -> Sample:
        return Sample(
            prompt=active.request.prompt,
            sample=active.request.sample,
            prompt_tokens=np.array(active.request.tokens, dtype=np.int32),
            response_tokens=np.array(active.tokens[len(active.request.tokens) :], dtype=np.int32),
            logprobs=np.array(active.logprobs, dtype=np.float32),
            retained=tuple(active.retained) if active.retained else None,
            weight_version=self.engine.version,
            engine=self.engine.name,
            finish_reason=reason,
        )
