"""Engines as another package would bring them: one that draws in its own way, and one that records nothing."""

from __future__ import annotations

import numpy as np
import torch

from rl_engine.config.plan import Plan, SamplingPlan
from rl_engine.engines.builtin import BuiltinTrainEngine
from rl_engine.engines.protocol import Capabilities, EngineEvidence, Held, Progress, RolloutHost, WeightSource
from rl_engine.engines.setup import read_weights, use_threads
from rl_engine.engines.snapshot import load_source, own_digests
from rl_engine.engines.types import Request, Sample, pack_retained
from rl_engine.models.decoder import Decoder
from rl_engine.ops import Operators
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.sample import DrawKey


class PlainRollout:
    """One sample after another, every token from a pass over all tokens before it: no cache, no batch, no graph."""

    capabilities = Capabilities(frozenset({"weights", "draws"}))

    def __init__(self, host: RolloutHost) -> None:
        use_threads(host.plan)
        self.name, self.version = host.engine, 0
        self.weights = read_weights(host.plan)
        ops = Operators(dict(host.plan.providers.rollout))
        self.decoder = Decoder(self.weights, ops, self.weights.config.max_positions)
        self.digests = own_digests(self.weights)

    @classmethod
    def processes(cls, plan: Plan) -> int:
        return 1

    @classmethod
    def open(cls, host: RolloutHost) -> PlainRollout:
        return cls(host)

    def generate(
        self,
        requests: list[Request],
        step: int,
        sampling: SamplingPlan,
        stop_tokens: tuple[int, ...],
        progress: Progress | None = None,
    ) -> list[Sample]:
        with torch.no_grad():
            return [self._sample(request, step, sampling, stop_tokens) for request in requests]

    def _sample(self, request: Request, step: int, s: SamplingPlan, stops: tuple[int, ...]) -> Sample:
        tokens, logprobs, sets, prompt = list(request.tokens), [], [], len(request.tokens)
        while len(tokens) - prompt < s.max_response_len and (len(tokens) == prompt or tokens[-1] not in stops):
            hidden = self.decoder.hidden_packed(torch.tensor(tokens), PackedLayout((len(tokens),), (1,)), False)
            key = DrawKey(s.rollout_seed, step, request.prompt, request.sample, len(tokens))
            drawn = self.decoder.draw(hidden[-1:], s.temperature, s.top_k, s.top_p, [key])
            tokens.append(int(drawn.tokens[0]))
            logprobs.append(float(drawn.logprobs[0]))
            if drawn.mask is not None:
                sets.append(pack_retained(drawn.mask[0].numpy(), self.weights.config.vocabulary))
        ids = np.array(tokens, dtype=np.int32)
        reason = "stop" if tokens[-1] in stops else "length"
        kept = tuple(sets) if sets else None
        values = np.array(logprobs, dtype=np.float32)
        identity = (request.prompt, request.sample, ids[:prompt], ids[prompt:])
        return Sample(*identity, values, kept, self.version, self.name, reason)

    def load_weights(self, source: WeightSource) -> None:
        self.digests, self.version = load_source(self.weights, source), source.version

    def held(self) -> list[Held]:
        rows = {name: (0, len(values)) for name, values in self.weights.export().items()}
        return [Held(0, self.version, rows, self.digests)]

    def evidence(self) -> list[EngineEvidence]:
        return [EngineEvidence(rank=0, device="cpu")]

    def close(self) -> None:
        """Nothing was started."""


class QuietTrainer(BuiltinTrainEngine):
    """The built-in trainer, which declares no records."""

    capabilities = Capabilities()

    def evidence(self) -> list[EngineEvidence]:
        return [EngineEvidence(rank=self.rank, device="cpu")]
