"""Tries to refute the providers of a run on its real shapes, before it starts.

Every contract provider is compared with the operator's reference, as integer views, on random data and, where an order
of summation could hide, on order-revealing data: large values that cancel at moving places among small units. Stock
operators make no promise and are not judged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.numerics.contract import Contract
from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import OPERATORS, provider
from rl_engine.ops.rms_norm import as_heads
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.selected_logp import LogpState, group_columns
from rl_engine.ops.weight import Part, Weight

MAX_COLUMNS = 512  # output columns that the slow reference computes of one product
LARGE = 4194304.0  # 2^22
UNIT = 0.30078125  # a bf16 value


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison. ``differing`` of ``elements`` outputs differ in bits."""

    operator: str
    provider: str
    what: str
    elements: int
    differing: int


@dataclasses.dataclass(frozen=True)
class Qualification:
    """The proof's result; ``digest`` covers contract, kernels, versions, shapes and every case."""

    cases: tuple[Case, ...]
    digest: str
    seconds: float

    @property
    def failed(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.differing)


def differing(a: Tensor, b: Tensor) -> int:
    """Elements that differ as integer views."""
    views = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), 1)
    if a.dtype in views:
        a, b = a.contiguous().view(views[a.dtype]), b.contiguous().view(views[b.dtype])
    return int((a != b).sum())


def order_revealing(rows: int, depth: int, generator: torch.Generator) -> Tensor:
    """bf16 [rows, depth]: small equal units, and +2^22, -2^22 at two moving places of every row.

    Beside 2^22 fp32 has a spacing of 1/2: the unit is no multiple of it, so each partial sum rounds and shows its
    order.
    """
    x = torch.full((rows, depth), UNIT)
    if depth >= 3:
        places = torch.stack([torch.randperm(depth, generator=generator)[:2] for _ in range(rows)])
        x[torch.arange(rows), places[:, 0]] = LARGE
        x[torch.arange(rows), places[:, 1]] = -LARGE
    return x.bfloat16()


class _Prover:
    """Runs one operator's provider and its reference on the same inputs."""

    def __init__(self, config: ModelConfig, names: dict[str, str], rows: tuple[int, ...]) -> None:
        self.config, self.names, self.rows = config, names, rows
        self.random = torch.Generator().manual_seed(20251)
        self.layout = PackedLayout((1, 17, 45), (1, 2))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).bfloat16()

    def weight(self, value: Tensor) -> Weight:
        return Weight("proof", value.bfloat16(), (Part("proof", 0, value.shape[0]),))

    def cases(self) -> Iterator[Case]:
        provers: dict[str, Callable[[Any, Any], Iterator[tuple[str, Tensor, Tensor]]]] = {
            "linear": self.linear,
            "lm_head": self.lm_head,
            "rms_norm": self.rms_norm,
            "qk_norm": self.qk_norm,
            "rope": self.rope,
            "attention": self.attention,
            "swiglu": self.swiglu,
            "selected_logp": self.selected_logp,
            "embedding": self.embedding,
            "sample": self.sample,
            "adamw": self.adamw,
            "grad_norm": self.grad_norm,
        }
        for operator in OPERATORS:
            name = self.names[operator]
            if name == "stock" or (operator == "qk_norm" and not self.config.qk_norm):
                continue
            tested, reference = provider(operator, name), provider(operator, "reference")
            for what, found, expected in provers[operator](tested, reference):
                yield Case(operator, name, what, expected.numel(), differing(found, expected))

    def products(self) -> list[tuple[str, int, int]]:
        """(name, columns, depth) of the model's linears."""
        c = self.config
        return [
            ("qkv", (c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
            ("o", c.hidden, c.heads * c.head_dim),
            ("gate_up", 2 * c.intermediate, c.hidden),
            ("down", c.hidden, c.intermediate),
        ]

    def linear(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        # The fallback without a compiler has an order of its own: it is held against itself on larger batches.
        exact = self.names["linear"] != "torch"
        for name, columns, depth in self.products():
            columns = min(columns, MAX_COLUMNS) - (columns > MAX_COLUMNS)  # an odd count where it is cut
            weight = self.weight(torch.randn(columns, depth, generator=self.random))
            revealing = self.weight(torch.ones(columns, depth))
            for rows in self.rows:
                x, hidden = self.normal(rows, depth), order_revealing(rows, depth, self.random)
                residual = self.normal(rows, columns)
                if exact:
                    yield f"{name} {rows} rows", tested.forward(x, weight, None), reference.forward(x, weight, None)
                    yield (
                        f"{name} {rows} rows, order",
                        tested.forward(hidden, revealing, residual),
                        reference.forward(hidden, revealing, residual),
                    )
                else:
                    whole = self.normal(max(self.rows) + 16, depth)
                    yield (
                        f"{name} {rows} rows in a batch",
                        tested.forward(whole[:rows], weight, None),
                        tested.forward(whole, weight, None)[:rows],
                    )
            if exact:
                yield from self._linear_backward(name, tested, reference, weight, depth)

    def _linear_backward(
        self, name: str, tested: Any, reference: Any, weight: Weight, depth: int
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        tokens = self.layout.tokens
        dy, x = self.normal(tokens, weight.shape[0]), self.normal(tokens, depth)
        yield f"{name} dX", tested.input_gradient(dy, weight), reference.input_gradient(dy, weight)
        found, expected = torch.full(weight.shape, 0.5), torch.full(weight.shape, 0.5)
        tested.add_weight_gradient(dy, x, self.layout, found)
        reference.add_weight_gradient(dy, x, self.layout, expected)
        yield f"{name} dW", found, expected

    def lm_head(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        c = self.config
        columns = min(c.vocabulary, MAX_COLUMNS - 1)
        weight = self.weight(torch.randn(columns, c.hidden, generator=self.random))
        revealing = self.weight(torch.ones(columns, c.hidden))
        for rows in self.rows:
            if self.names["lm_head"] == "torch":
                whole = self.normal(max(self.rows) + 16, c.hidden)
                yield (
                    f"{rows} rows in a batch",
                    tested.logits(whole[:rows], weight),
                    tested.logits(whole, weight)[:rows],
                )
                continue
            x, hidden = self.normal(rows, c.hidden), order_revealing(rows, c.hidden, self.random)
            yield f"{rows} rows", tested.logits(x, weight), reference.logits(x, weight)
            yield f"{rows} rows, order", tested.logits(hidden, revealing), reference.logits(hidden, revealing)

    def _norm(self, tested: Any, reference: Any, shape: tuple[int, ...]) -> Iterator[tuple[str, Tensor, Tensor]]:
        weight, x, dy = self.weight(self.normal(shape[-1])), self.normal(*shape), self.normal(*shape)
        eps = self.config.norm_eps
        yield "forward", tested.forward(x, weight, eps), reference.forward(x, weight, eps)
        found, expected = (p.backward(dy, x, weight, eps, True) for p in (tested, reference))
        yield "backward", found[0], expected[0]
        terms = as_heads(expected[1])
        yield "gain", tested.unit_sums(terms, self.layout), reference.unit_sums(terms, self.layout)

    def rms_norm(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        yield from self._norm(tested, reference, (self.layout.tokens, self.config.hidden))

    def qk_norm(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        yield from self._norm(tested, reference, (self.layout.tokens, self.config.heads, self.config.head_dim))

    def rope(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        c, table = self.config, RopeTable.build(self.config.inverse_frequencies(), 64)
        x = self.normal(self.layout.tokens, c.heads, c.head_dim)
        for sign in (1.0, -1.0):
            yield (
                f"sign {sign:+.0f}",
                tested.rotate(x, self.layout.positions, table, sign),
                reference.rotate(x, self.layout.positions, table, sign),
            )

    def attention(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        c = self.config
        if self.names["attention"] == "torch":
            reference = tested
        group = c.heads // c.kv_heads
        for lengths in ((1, 63, 66), (1030,)):
            width, layout = c.head_dim, PackedLayout(lengths, (len(lengths),))
            q = self.normal(layout.tokens, group, width)
            k, v = self.normal(layout.tokens, 1, width), self.normal(layout.tokens, 1, width)
            if lengths == (1030,):  # one KV split boundary; the reference is slow, so one head
                q = q[:, :1].contiguous()
            out, lse = tested.forward_packed(q, k, v, layout)
            expected, expected_lse = reference.forward_packed(q, k, v, layout)
            yield f"forward {lengths}", out, expected
            yield f"LSE {lengths}", lse, expected_lse
            if lengths != (1030,):
                dout = self.normal(*q.shape)
                found = tested.backward_packed(dout, q, k, v, out, lse, layout)
                wanted = reference.backward_packed(dout, q, k, v, out, lse, layout)
                for name, a, b in zip(("dq", "dk", "dv"), found, wanted, strict=True):
                    yield f"{name} {lengths}", a, b
            yield f"decode {lengths}", self._decode(tested, q, k, v, layout), out

    @staticmethod
    def _decode(tested: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        """Chunked prefill, then the last tokens one by one, over pages of 16."""
        pages = sum(-(-length // 16) for length in layout.lengths)
        cache = tested.new_cache(1, k.shape[1], k.shape[2], pages, 16)
        outs = []
        for first, last in zip(layout.offsets[:-1].tolist(), layout.offsets[1:].tolist(), strict=True):
            handle, start = cache.join(), 0
            while first + start < last:
                left = last - first - start
                count = min(left - 3, 100) if left > 3 else 1
                part = slice(first + start, first + start + count)
                batch = cache.batch([handle], [start], [count])
                outs.append(tested.cached(q[part], k[part], v[part], cache, 0, batch))
                start += count
        return torch.cat(outs)

    def swiglu(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        x, da = self.normal(33, 2 * self.config.intermediate), self.normal(33, self.config.intermediate)
        yield "forward", tested.forward(x), reference.forward(x)
        yield "backward", tested.backward(da, x), reference.backward(da, x)

    def selected_logp(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        vocabulary, rows = self.config.vocabulary, 5
        z = torch.randn(rows, vocabulary, generator=self.random) * 4
        targets = torch.randint(0, vocabulary, (rows,), generator=self.random)
        for temperature in (1.0, 0.7):
            found, expected = (p.from_logits(z, targets, temperature, None) for p in (tested, reference))
            yield f"logp T={temperature}", found[0], expected[0]
            yield f"entropy T={temperature}", found[1], expected[1]
        states = []
        width = group_columns(vocabulary)
        for p in (tested, reference):
            state = LogpState.empty(rows)
            for first in range(0, vocabulary, width):
                p.merge_columns(z[:, first : first + width], first, vocabulary, 1.0, None, targets, state)
            states.append(state)
        yield "groups one by one", states[0].l, states[1].l
        c = torch.randn(rows, generator=self.random)
        dz = [p.logits_gradient(z[:, :width], 0, 1.0, None, targets, states[1], c) for p in (tested, reference)]
        yield "dz", dz[0], dz[1]

    def embedding(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        ids, rows = torch.randint(0, 9, (63,), generator=self.random), self.normal(63, self.config.hidden)
        found, expected = torch.zeros(9, self.config.hidden), torch.zeros(9, self.config.hidden)
        tested.lookup_gradient(ids, rows, found)
        reference.lookup_gradient(ids, rows, expected)
        yield "gradient", found, expected

    def sample(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        z = torch.randn(4, self.config.vocabulary, generator=self.random) * 2
        keys = [DrawKey(7, 3, row, 2, 100 + row) for row in range(4)]
        yield "draw", tested.draw(z, 1.0, None, keys), reference.draw(z, 1.0, None, keys)

    def adamw(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        scalars = AdamScalars.at(3, 1e-3, 0.9, 0.98, 1e-8, 0.1)
        start = [torch.randn(1003, generator=self.random) for _ in range(3)]
        start[2] = start[2].abs()
        grad = torch.randn(1003, generator=self.random)
        results = []
        for p in (tested, reference):
            tensors = [x.clone() for x in start]
            weight = torch.empty(1003, dtype=torch.bfloat16)
            p.update(*tensors, grad, weight, 0.5, scalars)
            results.append((*tensors, weight))
        yield from zip(("master", "m", "v", "weight"), *results, strict=True)

    def grad_norm(self, tested: Any, reference: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        grad = torch.randn(10007, generator=self.random) * torch.exp(torch.randn(10007, generator=self.random) * 6)
        yield "bins", tested.bins(grad), reference.bins(grad)


def prove(
    config: ModelConfig, sides: Sequence[Mapping[str, str]], contract: Contract, rows: tuple[int, ...] = (1, 3, 16, 33)
) -> Qualification:
    """Compares every contract provider of a run on the model's shapes; a few seconds.

    Args:
        config: the model's shape.
        sides: operator -> provider, for each side of the run; equal sides are proven once.
        contract: the contract in force; its digest enters the qualification's.
        rows: row counts of the products.
    """
    started = time.perf_counter()
    with torch.no_grad():
        distinct = {tuple(sorted(side.items())): dict(side) for side in sides}
        cases = tuple(case for names in distinct.values() for case in _Prover(config, names, rows).cases())
    body = {
        "contract": contract.digest(),
        "kernels": _kernels(sides),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": dataclasses.asdict(config),
        "cases": [dataclasses.asdict(case) for case in cases],
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return Qualification(cases, digest, time.perf_counter() - started)


def _kernels(sides: Sequence[Mapping[str, str]]) -> str:
    if not any("cpu" in side.values() for side in sides):
        return ""
    from rl_engine.ops.library import build_key

    return build_key()
