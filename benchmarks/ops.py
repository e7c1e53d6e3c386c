"""Every operator of the model at its real shapes: the consistent provider against torch's own, over row counts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import workload
from benchmarks.measure import Case, Report, in_turns
from rl_engine.models.config import ModelConfig
from rl_engine.ops import Operators
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.weight import Part, Weight

TURN_SECONDS = 0.02  # a turn repeats a call until it takes about this long
CONTEXT = 256  # tokens in the KV cache of every row of "attention decode"

Run = Callable[[], object]


def main(options: argparse.Namespace) -> Report:
    """Forward as in rollout (packed weights) at every row count; forward and backward as in training at the larger."""
    provider = workload.start(options)
    config = workload.shape(options)
    rows = (1, 4, 16, 64, 256, 1024) if options.full else (1, 16, 256)
    sides = {mode: _Side(workload.operators(mode, provider), config) for mode in ("native", "consistency")}
    report = Report("ops", workload.about(options, provider, config))
    for count in rows:
        for training in (False, True) if count >= 64 else (False,):
            for name in CALLS:
                if training and name in FORWARD_ONLY:
                    continue
                runs = {mode: side.run(name, count, training) for mode, side in sides.items()}
                title = f"{name} {count} rows" + (", with backward" if training else "")
                timings = in_turns(runs, options.rounds, repeat=_repeat(runs["native"]))
                report.cases.append(Case(title, 1, "calls", timings))
    return report


def _repeat(run: Run) -> int:
    run()
    started = time.perf_counter()
    run()
    return max(1, min(200, int(TURN_SECONDS / (time.perf_counter() - started + 1e-9))))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


class _Side:
    """One mode's operators and weights."""

    def __init__(self, ops: Operators, config: ModelConfig) -> None:
        self.ops, self.config = ops, config
        c = config
        shapes = {
            "qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
            "o": (c.hidden, c.heads * c.head_dim),
            "gate_up": (2 * c.intermediate, c.hidden),
            "down": (c.hidden, c.intermediate),
            "head": (c.vocabulary, c.hidden),
            "norm": (c.hidden,),
        }
        self.rollout, self.train = ({name: _weight(name, shape) for name, shape in shapes.items()} for _ in range(2))
        ops.pack([w for w in self.rollout.values() if len(w.shape) == 2 and w.name != "head"], drop_value=True)
        ops.pack([self.rollout["head"]], drop_value=False)
        for weight in self.train.values():
            weight.enable_training()
            weight.value.requires_grad_(True)
        self.table = RopeTable.build(config.inverse_frequencies(), 4096)

    def run(self, name: str, rows: int, training: bool) -> Run:
        """One call of an operator on ``rows`` rows, with its backward pass where ``training``."""
        weights = self.train if training else self.rollout
        call, inputs = CALLS[name](self, rows, weights)
        if not training:
            return _without_gradient(call)
        for x in inputs:
            x.requires_grad_(True)
        upstream = torch.ones_like(_without_gradient(call)())

        def forward_and_backward() -> None:
            call().backward(upstream)
            for x in (*inputs, *(weight.value for weight in weights.values())):
                x.grad = None
            for weight in weights.values():
                weight.lookups.clear()

        return forward_and_backward


def _weight(name: str, shape: tuple[int, ...]) -> Weight:
    value = _normal(*shape) * (shape[-1] ** -0.5 if len(shape) == 2 else 1.0)
    return Weight(name, value, (Part(name, 0, shape[0]),))


def _without_gradient(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return call()

    return run


Made = tuple[Callable[[], Tensor], tuple[Tensor, ...]]  # the call, and the inputs that take a gradient


def _linear(name: str) -> Callable[[_Side, int, dict[str, Weight]], Made]:
    def make(side: _Side, rows: int, weights: dict[str, Weight]) -> Made:
        weight, layout = weights[name], PackedLayout((rows,), (1,))
        x = _normal(rows, weight.shape[1])
        residual = _normal(rows, weight.shape[0]) if name in ("o", "down") else None
        return lambda: side.ops.linear(x, weight, residual, layout), (x,)

    return make


def _norm(side: _Side, rows: int, weights: dict[str, Weight]) -> Made:
    x, layout = _normal(rows, side.config.hidden), PackedLayout((rows,), (1,))
    return lambda: side.ops.rms_norm(x, weights["norm"], side.config.norm_eps, layout), (x,)


def _rope(side: _Side, rows: int, weights: dict[str, Weight]) -> Made:
    x, positions = _normal(rows, side.config.heads, side.config.head_dim), torch.arange(rows)
    return lambda: side.ops.rope(x, positions, side.table), (x,)


def _swiglu(side: _Side, rows: int, weights: dict[str, Weight]) -> Made:
    x = _normal(rows, 2 * side.config.intermediate)
    return lambda: side.ops.swiglu(x), (x,)


def _attention(side: _Side, rows: int, weights: dict[str, Weight]) -> Made:
    c, layout = side.config, PackedLayout((rows,), (1,))
    q, k, v = (_normal(rows, heads, c.head_dim) for heads in (c.heads, c.kv_heads, c.kv_heads))
    return lambda: side.ops.attention_packed(q, k, v, layout), (q, k, v)


def _decode(side: _Side, rows: int, weights: dict[str, Weight]) -> Made:
    """One new token of ``rows`` samples that hold CONTEXT tokens already."""
    c, page = side.config, 64
    cache = side.ops.new_cache(1, c.kv_heads, c.head_dim, rows * (CONTEXT // page + 1), page)
    handles = [cache.join() for _ in range(rows)]
    q, k, v = (_normal(rows, heads, c.head_dim) for heads in (c.heads, c.kv_heads, c.kv_heads))
    filled = [_normal(rows * CONTEXT, heads, c.head_dim) for heads in (c.heads, c.kv_heads, c.kv_heads)]
    with torch.no_grad():
        side.ops.attention_cached(*filled, cache, 0, cache.batch(handles, [0] * rows, [CONTEXT] * rows))
    batch = cache.batch(handles, [CONTEXT] * rows, [1] * rows)
    return lambda: side.ops.attention_cached(q, k, v, cache, 0, batch), ()


def _head(side: _Side, rows: int, weights: dict[str, Weight]) -> Made:
    x = _normal(rows, side.config.hidden)
    return lambda: side.ops.logits(x, weights["head"]), ()


def _logp(side: _Side, rows: int, weights: dict[str, Weight]) -> Made:
    z, targets = _normal(rows, side.config.vocabulary).float(), torch.arange(rows)
    return lambda: side.ops.logp_from_logits(z, targets, 1.0, None)[0], ()


def _score(side: _Side, rows: int, weights: dict[str, Weight]) -> Made:
    """Head and logprob together, as the trainer calls them."""
    x, targets, layout = _normal(rows, side.config.hidden), torch.arange(rows), PackedLayout((rows,), (1,))
    return lambda: side.ops.score(x, weights["head"], targets, 1.0, None, layout, torch.arange(rows))[0], (x,)


CALLS: dict[str, Callable[[_Side, int, dict[str, Weight]], Made]] = {
    **{f"linear {name}": _linear(name) for name in ("qkv", "o", "gate_up", "down")},
    "rms_norm": _norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "attention": _attention,
    "attention decode": _decode,
    "lm_head": _head,
    "selected_logp": _logp,
    "lm_head + selected_logp": _score,
}
FORWARD_ONLY: tuple[str, ...] = ("attention decode", "lm_head", "selected_logp")


def names() -> Iterator[str]:
    """The operators that are timed."""
    yield from CALLS
