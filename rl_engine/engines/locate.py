"""Where two computations of one sample part: both engines run a recorded step again, and every operator is watched.

``python -m rl_engine.engines.locate --a RUN:SIDE --b RUN:SIDE --sample N --limit P --out FILE`` writes one JSON object
about the operators' rows at positions 0 to P of sample N of step 0. No Ray, one rank, weights from the checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_engine.config.plan import Plan
from rl_engine.engines.evidence import samples_of
from rl_engine.engines.setup import read_weights, rollout_engine, sampling_settings, train_engine, use_threads
from rl_engine.engines.snapshot import own_digests
from rl_engine.engines.types import Request, Sample, canonical
from rl_engine.numerics.bits import compare_bits
from rl_engine.ops import Operators
from rl_engine.ops.weight import Weight
from rl_engine.records.codec import decode
from rl_engine.records.errors import UserError
from rl_engine.records.reader import RunReader
from rl_engine.records.types import SampleBatch

# Operators' methods that a decoder calls once for each of its places, and the operator that each belongs to.
WATCHED = {
    "embedding": "embedding",
    "linear": "linear",
    "rms_norm": "rms_norm",
    "qk_norm": "qk_norm",
    "rope": "rope",
    "attention_packed": "attention",
    "attention_cached": "attention",
    "swiglu": "swiglu",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """One operator call of a forward pass: its number, layer (-1 outside layers), operator and weight."""

    number: int
    layer: int
    operator: str
    weight: str


class Watch:
    """Keeps the rows of one sample from every operator call of a decoder."""

    def __init__(self, ops: Operators, limit: int) -> None:
        self.limit = limit
        self.places: list[Place] = []
        self.rows: list[dict[int, Tensor]] = []
        self.logprobs: dict[int, float] = {}
        self._wanted: list[tuple[int, int]] | None = None  # (row of the pass, position in the sample)
        self._call = self._layer = 0
        for method, operator in WATCHED.items():
            setattr(ops, method, self._watched(getattr(ops, method), operator))
        ops.qk_norm_rope = self._watched_fused(ops)  # type: ignore[method-assign]

    def begin(self, wanted: list[tuple[int, int]]) -> None:
        """A forward pass starts; ``wanted`` rows are the sample's. The engine counts calls from here."""
        self._wanted, self._call, self._layer = [(r, p) for r, p in wanted if p <= self.limit], 0, -1

    def end(self) -> None:
        """What follows is no forward pass (a proof, the head)."""
        self._wanted = None

    def _watched(self, call: Callable[..., Tensor], operator: str) -> Callable[..., Tensor]:
        def watched(*arguments: Any, **words: Any) -> Tensor:
            out = call(*arguments, **words)
            if self._wanted is not None:
                self._keep(operator, arguments, out)
            return out

        return watched

    def _watched_fused(self, ops: Operators) -> Callable[..., tuple[Tensor, Tensor]]:
        """What comes out of the fused operator is kept as its rotation's; the norm inside, which is stored nowhere, is
        computed again by the same provider alone. So a side that fuses has the places of one that does not."""
        call = ops.qk_norm_rope

        def watched(q: Tensor, k: Tensor, q_norm: Weight, k_norm: Weight, eps: float, *rest: Any) -> Any:
            out = call(q, k, q_norm, k_norm, eps, *rest)
            if self._wanted is not None and ops.fuses_qk_norm(q.shape[2]):
                for x, weight in ((q, q_norm), (k, k_norm)):
                    self._keep("qk_norm", (x, weight), ops.provider("qk_norm").forward(x, weight, eps))
                for x in out:
                    self._keep("rope", (), x)
            return out

        return watched

    def _keep(self, operator: str, arguments: tuple[Any, ...], out: Tensor) -> None:
        name = arguments[1].name if len(arguments) > 1 and isinstance(arguments[1], Weight) else ""
        if name.startswith("model.layers."):
            self._layer = int(name.split(".")[2])
        elif name:
            self._layer = -1
        if self._call == len(self.places):
            self.places.append(Place(self._call, self._layer, operator, name))
            self.rows.append({})
        assert self.places[self._call].operator == operator, "forward passes call the same operators in the same order"
        assert self._wanted is not None
        for row, position in self._wanted:
            self.rows[self._call].setdefault(position, out[row].detach().flatten().to("cpu", copy=True))
        self._call += 1


def watch_rollout(plan: Plan, batch: SampleBatch, chosen: int, limit: int) -> Watch:
    """The rollout engine draws the whole step again; noise depends on identities, so the tokens come out the same."""
    weights = read_weights(plan)
    launched = dataclasses.replace(plan.engine, graph_capture_sizes=())  # a replayed graph calls no operator
    engine = rollout_engine(dataclasses.replace(plan, engine=launched), weights, "locate")
    watch = Watch(engine.ops, limit)
    samples = samples_of(batch)
    mine = samples[chosen]
    prompt = len(mine.prompt_tokens)
    inner_batch, inner_compute = engine.memory.batch, engine._compute

    def batch_of(work: Any) -> Any:
        ordered, paged = inner_batch(work)
        wanted, row = [], 0
        for sequence, count in ordered:
            request = sequence.job.request
            for offset in range(count):
                position = sequence.computed + offset
                same = request.prompt == mine.prompt and (request.sample == mine.sample or position < prompt)
                if same:  # samples of one prompt share the pages of its tokens: any of them may have computed them
                    wanted.append((row, position))
                row += 1
        watch.begin(wanted)
        return ordered, paged

    def compute(work: Any) -> Any:
        found = inner_compute(work)
        watch.end()
        return found

    engine.memory.batch, engine._compute = batch_of, compute  # type: ignore[method-assign]
    requests = [Request(s.prompt, s.sample, tuple(s.prompt_tokens.tolist())) for s in samples]
    stops = _stop_tokens(batch, samples)
    drawn = canonical(engine.generate(requests, 0, sampling_settings(plan.sampling, stops), None, ()))
    again = next(s for s in drawn if (s.prompt, s.sample) == (mine.prompt, mine.sample))
    count = min(limit + 1 - prompt, len(again.response_tokens) - 1, len(mine.response_tokens) - 1)
    if not np.array_equal(again.response_tokens[: count + 1], mine.response_tokens[: count + 1]):
        raise UserError("other tokens than those recorded", "the recorded step, drawn again", "is it the same machine?")
    watch.logprobs = {prompt - 1 + i: float(again.logprobs[i]) for i in range(count + 1)}
    return watch


def _stop_tokens(batch: SampleBatch, samples: list[Sample]) -> tuple[int, ...]:
    """The tokens that ended samples: enough to end them again."""
    return tuple(
        sorted(
            {
                int(sample.response_tokens[-1])
                for sample, record in zip(samples, batch.samples, strict=True)
                if record.finish_reason == "stop" and len(sample.response_tokens)
            }
        )
    )


def watch_train(plan: Plan, batch: SampleBatch, chosen: int, limit: int) -> Watch:
    """The trainer scores the whole step again, packed as it was."""
    engine = train_engine(plan)
    watch = Watch(engine.ops, limit)
    samples = samples_of(batch)
    inner = engine._logprobs

    def logprobs(decoder: Any, micro: Any, recompute: bool) -> Any:
        wanted: list[tuple[int, int]] = []
        if chosen in micro.indices:
            place = micro.indices.index(chosen)
            first, last = micro.layout.offsets[place : place + 2].tolist()
            wanted = [(row, row - first) for row in range(first, last)]
        watch.begin(wanted)
        found = inner(decoder, micro, recompute)
        watch.end()
        return found

    engine._logprobs = logprobs  # type: ignore[method-assign]
    scored = engine.score(samples)[chosen]
    prompt = len(samples[chosen].prompt_tokens)
    watch.logprobs = {prompt - 1 + i: float(value) for i, value in enumerate(scored)}
    return watch


def first_difference(a: Watch, b: Watch) -> dict[str, Any] | None:
    """The first operator, in the order of computation, with a row that differs; its first row and element."""
    for place, other, rows_a, rows_b in zip(a.places, b.places, a.rows, b.rows, strict=False):
        if place.operator != other.operator:
            raise UserError("two models of other structure", "the same decoder on both sides", "compare their plans")
        positions = [p for p in sorted(set(rows_a) & set(rows_b)) if not _equal(rows_a[p], rows_b[p])]
        if positions:
            x, y = rows_a[positions[0]], rows_b[positions[0]]
            found = compare_bits(_array(x), _array(y))
            element = found.first_index[0] if found.first_index else 0
            return {
                **dataclasses.asdict(place),
                "position": positions[0],
                "positions": len(positions),
                "of_positions": len(set(rows_a) & set(rows_b)),
                "element": element,
                "elements": found.count,
                "of_elements": found.total,
                "dtype": str(x.dtype).removeprefix("torch."),
                "a": f"{found.a_hex} ({float(x[element]):.9g})",
                "b": f"{found.b_hex} ({float(y[element]):.9g})",
            }
    return None


def _equal(x: Tensor, y: Tensor) -> bool:
    return bool(torch.equal(x.view(torch.uint8), y.view(torch.uint8)))


def _array(x: Tensor) -> np.ndarray:
    """The same bits as numpy holds them: bf16 as uint16."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def watch(run: str, chosen: int, limit: int) -> tuple[Watch, Plan, str]:
    """One side (``RUN:train`` or ``RUN:rollout``), computed again.

    Raises:
        UserError: another checkpoint than the run's, or more ranks than one.
    """
    folder, _, side = run.rpartition(":")
    reader = RunReader(folder)
    plan = decode(Plan, reader.plan().plan, "plan.json")
    shape = plan.topology
    ranks = max(shape.train_tp * shape.train_cp, shape.rollout_tp * shape.rollout_cp)
    if ranks > 1 or shape.rollout_engines > 1:
        raise UserError(f"{ranks} ranks, {shape.rollout_engines} engines", "one of each to compute again", "run it so")
    use_threads(plan)
    if own_digests(read_weights(plan)) != reader.weights_version(0).tensors:
        raise UserError(
            f"{plan.model_root}, which is not what the run started from", "its checkpoint", "restore the checkpoint"
        )
    view = watch_train if side == "train" else watch_rollout
    with torch.no_grad():
        return view(plan, reader.samples(0), chosen, limit), plan, side


def providers(plan: Plan, side: str) -> dict[str, str]:
    """Provider of every operator on a side."""
    return dict(plan.providers.train if side == "train" else plan.providers.rollout)


def _logp_bits(values: dict[int, float]) -> Iterator[tuple[int, int]]:
    for position, value in sorted(values.items()):
        yield position, int(np.float32(value).view(np.uint32))


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 with the JSON written, 2 with one line."""
    parser = argparse.ArgumentParser(prog="locate", description=__doc__)
    parser.add_argument("--a", required=True)
    parser.add_argument("--b", required=True)
    parser.add_argument("--sample", type=int, required=True)
    parser.add_argument("--limit", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    try:
        (a, plan_a, side_a), (b, plan_b, side_b) = (
            watch(run, arguments.sample, arguments.limit) for run in (arguments.a, arguments.b)
        )
        found = first_difference(a, b)
    except UserError as error:
        print(f"rlk-repro: {error}", file=sys.stderr)
        return 2
    if found is not None:
        found |= {"provider_a": providers(plan_a, side_a)[found["operator"]]}
        found |= {"provider_b": providers(plan_b, side_b)[found["operator"]]}
    bits = {"a": dict(_logp_bits(a.logprobs)), "b": dict(_logp_bits(b.logprobs))}
    arguments.out.write_text(json.dumps({"operators": len(a.places), "first": found, **bits}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
