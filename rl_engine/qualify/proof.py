"""Tries to refute the providers of a run on its real shapes, before it starts.

Every contract provider is compared with the operator's reference, as integer views, on random data and, where an order
of summation could hide, on order-revealing data: large values that cancel at moving places among small units. Stock
operators make no promise and are not judged. A GPU's providers are proven by ``rlk-repro qualify`` there
(``qualify/gpu``); here its kept proof must be fresh and cover the model's shapes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.models.sharding import LayoutRefused, Sharding, merged_names
from rl_engine.numerics.contract import Contract
from rl_engine.numerics.providers import Capabilities, capabilities
from rl_engine.ops import operators
from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import OPERATORS, provider
from rl_engine.ops.rms_norm import as_heads
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.selected_logp import LogpState
from rl_engine.ops.selected_logp.vocabulary import group_columns
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify import functions
from rl_engine.qualify.cases import Case
from rl_engine.qualify.shared import shared

MAX_COLUMNS = 512  # output columns that the slow reference computes of one product
LARGE = 4194304.0  # 2^22
UNIT = 0.30078125  # a bf16 value
FALLBACK_ROWS = 512
WITH_FUNCTIONS = ("attention", "swiglu", "selected_logp", "sample")  # which call exp, log or log1p


@dataclasses.dataclass(frozen=True)
class Qualification:
    """The proof's result; ``digest`` covers contract, kernels, versions, shapes and every case."""

    cases: tuple[Case, ...]
    digest: str
    seconds: float

    @property
    def failed(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if not case.holds)


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


Pair = tuple[str, Tensor, Tensor]  # (what, the provider's result, the reference's)


class _Prover:
    """Runs one operator's provider and its reference on the same inputs."""

    def __init__(self, config: ModelConfig, names: dict[str, str], rows: tuple[int, ...]) -> None:
        self.config, self.names, self.rows = config, names, rows
        self.random = torch.Generator().manual_seed(20251)
        self.layout = PackedLayout((1, 17, 85), (1, 2))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).bfloat16()

    def weight(self, value: Tensor) -> Weight:
        return Weight("proof", value.bfloat16(), (Part("proof", 0, value.shape[0]),))

    def cases(self) -> Iterator[Case]:
        provers: dict[str, Callable[[Any, Any], Iterator[Pair]]] = {
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
            able = capabilities(name)
            if not able.contract or able.proven_apart or (operator == "qk_norm" and not self.config.qk_norm):
                continue
            tested, reference = provider(operator, name), provider(operator, "reference")
            for what, found, expected in provers[operator](tested, reference):
                yield Case(operator, name, what, expected.numel(), differing(found, expected))
        by_library = [self.names[op] for op in WITH_FUNCTIONS if capabilities(self.names[op]).compiled]
        if by_library:
            for what, found, expected in functions.pairs():
                yield Case("functions", by_library[0], what, expected.numel(), differing(found, expected))

    def _by_library(self, operator: str) -> bool:
        """Whether the order of its products is the BLAS library's, which no reference has."""
        return capabilities(self.names[operator]).gemm != "chain"

    def products(self) -> list[tuple[str, int, int]]:
        """(name, columns, depth) of the model's linears."""
        c = self.config
        return [
            ("qkv", (c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
            ("o", c.hidden, c.heads * c.head_dim),
            ("gate_up", 2 * c.intermediate, c.hidden),
            ("down", c.hidden, c.intermediate),
        ]

    def linear(self, tested: Any, reference: Any) -> Iterator[Pair]:
        for name, columns, depth in self.products():
            columns = min(columns, MAX_COLUMNS) - (columns > MAX_COLUMNS)  # an odd count where it is cut
            weight = self.weight(torch.randn(columns, depth, generator=self.random))
            if self._by_library("linear"):
                yield from self._fallback(name, tested, weight, depth)
                continue
            for rows in self.rows:
                x, residual = order_revealing(rows, depth, self.random), self.normal(rows, columns)
                yield (
                    f"{name} {rows} rows, residual",
                    tested.forward(x, self.weight(torch.ones(columns, depth)), residual),
                    reference.forward(x, self.weight(torch.ones(columns, depth)), residual),
                )
            yield from self._linear_backward(name, tested, reference, weight, depth)
            yield from self._head_products(name, weight)

    def _fallback(self, name: str, tested: Any, weight: Weight, depth: int) -> Iterator[Pair]:
        """The order without a compiler is the BLAS library's own: it is held against itself on larger batches."""
        whole, dy = self.normal(FALLBACK_ROWS, depth), self.normal(FALLBACK_ROWS, weight.shape[0])
        out, dx = tested.forward(whole, weight, None), tested.input_gradient(dy, weight)
        for rows in (*self.rows, 200):
            yield f"{name} {rows} rows in a batch", tested.forward(whole[:rows], weight, None), out[:rows]
            yield f"{name} dX {rows} rows in a batch", tested.input_gradient(dy[:rows], weight), dx[:rows]

    def _linear_backward(self, name: str, tested: Any, reference: Any, weight: Weight, depth: int) -> Iterator[Pair]:
        layout = PackedLayout((1, 17, 45, 97), (1, 2, 1))
        dy = order_revealing(weight.shape[0], layout.tokens, self.random).T.contiguous()
        x = self.normal(layout.tokens, depth)
        dense = order_revealing(layout.tokens, weight.shape[0], self.random)
        ones = self.weight(torch.ones(weight.shape))
        yield f"{name} dX", tested.input_gradient(dense, ones), reference.input_gradient(dense, ones)
        found, expected = torch.full(weight.shape, 0.5), torch.full(weight.shape, 0.5)
        tested.add_weight_gradient(dy, x, layout, found)
        reference.add_weight_gradient(dy, x, layout, expected)
        yield f"{name} dW", found, expected

    def lm_head(self, tested: Any, reference: Any) -> Iterator[Pair]:
        c = self.config
        columns = min(c.vocabulary, MAX_COLUMNS - 1)
        weight = self.weight(torch.randn(columns, c.hidden, generator=self.random))
        if self._by_library("lm_head"):
            whole = self.normal(FALLBACK_ROWS, c.hidden)
            out = tested.logits(whole, weight)
            for rows in self.rows:
                yield f"{rows} rows in a batch", tested.logits(whole[:rows], weight), out[:rows]
            return
        yield from self._head_products("head", weight)

    def _head_products(self, name: str, weight: Weight) -> Iterator[Pair]:
        """A product before its last rounding: rows through every register tile, plain and packed weights, a slice of
        columns, and the two gradients, on data that shows another order."""
        tested, reference = provider("lm_head", self.names["lm_head"]), provider("lm_head", "reference")
        columns, depth = weight.shape
        rows = order_revealing(max(self.rows), depth, self.random)
        ones = self.weight(torch.ones(columns, depth))
        ones.value[:, ::7] = 2.0
        expected = reference.logits(rows, ones)
        random = self.normal(max(self.rows), depth)
        expected_random = reference.logits(random, weight)
        for packed in (False, True):
            if packed and capabilities(self.names["lm_head"]).packing:
                packer = operators.provider("linear", self.names["lm_head"])
                packer.pack(ones)
                packer.pack(weight)
            for count in self.rows:
                where = f"{name} {count} rows{', packed' if packed else ''}"
                yield f"{where}, order", tested.logits(rows[:count], ones), expected[:count]
                yield f"{where}, fp32", tested.logits(random[:count], weight), expected_random[:count]
            last = columns - columns % 3
            yield f"{name} columns", tested.logits(rows, ones, (32, last)), expected[:, 32:last]
        ones.packed = weight.packed = None
        dz, span = order_revealing(max(self.rows), columns, self.random), (0, columns)
        found, wanted = torch.zeros(max(self.rows), depth), torch.zeros(max(self.rows), depth)
        tested.add_input_gradient(dz, ones, span, found)
        reference.add_input_gradient(dz, ones, span, wanted)
        yield f"{name} dH, fp32", found, wanted

    def _norm(self, tested: Any, reference: Any, shape: tuple[int, ...]) -> Iterator[Pair]:
        weight, x, dy = self.weight(self.normal(shape[-1])), self.normal(*shape), self.normal(*shape)
        eps = self.config.norm_eps
        yield "forward", tested.forward(x, weight, eps), reference.forward(x, weight, eps)
        found, expected = (p.backward(dy, x, weight, eps, True) for p in (tested, reference))
        yield "backward", found[0], expected[0]
        terms = as_heads(expected[1])
        yield "gain", tested.unit_sums(terms, self.layout), reference.unit_sums(terms, self.layout)

    def rms_norm(self, tested: Any, reference: Any) -> Iterator[Pair]:
        yield from self._norm(tested, reference, (self.layout.tokens, self.config.hidden))

    def qk_norm(self, tested: Any, reference: Any) -> Iterator[Pair]:
        yield from self._norm(tested, reference, (self.layout.tokens, self.config.heads, self.config.head_dim))

    def rope(self, tested: Any, reference: Any) -> Iterator[Pair]:
        c, table = self.config, RopeTable.build(self.config.inverse_frequencies(), 128)
        x = self.normal(self.layout.tokens, c.heads, c.head_dim)
        for sign in (1.0, -1.0):
            yield (
                f"sign {sign:+.0f}",
                tested.rotate(x, self.layout.positions, table, sign),
                reference.rotate(x, self.layout.positions, table, sign),
            )

    def attention(self, tested: Any, reference: Any) -> Iterator[Pair]:
        c = self.config
        if self._by_library("attention"):
            reference = tested
        group, width = c.heads // c.kv_heads, c.head_dim
        layout = PackedLayout((1, 63, 66), (3,))
        q, dout = self.normal(layout.tokens, 2 * group, width), self.normal(layout.tokens, 2 * group, width)
        k, v = self.normal(layout.tokens, 2, width), self.normal(layout.tokens, 2, width)
        out, lse = tested.forward_packed(q, k, v, layout)
        expected, expected_lse = reference.forward_packed(q, k, v, layout)
        yield "forward", out, expected
        yield "LSE, fp32", lse, expected_lse
        yield "decode", self._decode(tested, q, k, v, layout), out
        yield from self._attention_backward(tested, reference, q, k, v, dout, layout)
        # One boundary of KV splits; the reference is slow, so one head.
        layout = PackedLayout((1030,), (1,))
        q, k, v = (self.normal(1030, 1, width) for _ in range(3))
        out, lse = tested.forward_packed(q, k, v, layout)
        expected, expected_lse = reference.forward_packed(q, k, v, layout)
        yield "forward over a split", out, expected
        yield "LSE over a split, fp32", lse, expected_lse
        yield "decode over a split", self._decode(tested, q, k, v, layout), out

    def _attention_backward(
        self, tested: Any, reference: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, layout: PackedLayout
    ) -> Iterator[Pair]:
        """Gradients of all tokens and of runs that cut blocks; dO cancels across heads, which shows their order."""
        heads = q.shape[1] // 2
        loud = dout.clone()
        if heads > 1:
            loud[:, 0], loud[:, 1] = dout[:, 0] * LARGE, dout[:, 0] * -LARGE
            q = q.clone()
            q[:, 1] = q[:, 0]
        _, lse = reference.forward_packed(q, k, v, layout)
        for what, gradient in (("", dout), (", order", loud)):
            delta = torch.zeros_like(lse)
            for runs in (((0, 0, 1), (1, 0, 63), (2, 0, 66)), ((1, 7, 40), (2, 30, 36))):
                found = tested.backward_runs(gradient, q, k, v, lse, delta, layout, runs)
                wanted = reference.backward_runs(gradient, q, k, v, lse, delta, layout, runs)
                for name, a, b in zip(("dq", "dk", "dv"), found, wanted, strict=True):
                    yield f"{name} of {len(runs)} runs{what}", a, b

    @staticmethod
    def _decode(tested: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        """Chunked prefill, then the last tokens one by one, over pages of 16."""
        pages = sum(-(-length // 16) for length in layout.lengths)
        cache = tested.new_cache(1, k.shape[1], k.shape[2], pages, 16, k.device)
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

    def swiglu(self, tested: Any, reference: Any) -> Iterator[Pair]:
        x, da = self.normal(33, 2 * self.config.intermediate), self.normal(33, self.config.intermediate)
        yield "forward", tested.forward(x), reference.forward(x)
        yield "backward", tested.backward(da, x), reference.backward(da, x)

    def selected_logp(self, tested: Any, reference: Any) -> Iterator[Pair]:
        vocabulary, rows = self.config.vocabulary, 5
        z = torch.randn(rows, vocabulary, generator=self.random) * 4
        targets = torch.randint(0, vocabulary, (rows,), generator=self.random)
        for temperature in (1.0, 0.7):
            found, expected = (p.from_logits(z, targets, temperature, None) for p in (tested, reference))
            yield f"logp T={temperature}", found[0], expected[0]
            yield f"entropy T={temperature}", found[1], expected[1]
        mask = torch.randint(0, 256, (rows, -(-vocabulary // 8)), generator=self.random).to(torch.uint8)
        mask[torch.arange(rows), targets // 8] |= (1 << (targets % 8)).to(torch.uint8)
        found, expected = (p.from_logits(z, targets, 0.7, mask) for p in (tested, reference))
        yield "logp, retained set", found[0], expected[0]
        states = []
        width = group_columns(vocabulary)
        for p in (tested, reference):
            state = LogpState.empty(rows)
            for first in range(0, vocabulary, width):
                p.merge_columns(z[:, first : first + width], first, vocabulary, 1.0, None, targets, state)
            states.append(state)
        yield "groups one by one", states[0].l, states[1].l
        c = torch.randn(rows, generator=self.random)
        for what, bits in (("dz", None), ("dz, retained set", mask)):
            dz = [p.logits_gradient(z[:, :width], 0, 1.0, bits, targets, states[1], c) for p in (tested, reference)]
            yield what, dz[0], dz[1]

    def embedding(self, tested: Any, reference: Any) -> Iterator[Pair]:
        ids, rows = torch.randint(0, 9, (63,), generator=self.random), self.normal(63, self.config.hidden)
        found, expected = torch.zeros(9, self.config.hidden), torch.zeros(9, self.config.hidden)
        tested.lookup_gradient(ids, rows, found)
        reference.lookup_gradient(ids, rows, expected)
        yield "gradient", found, expected

    def sample(self, tested: Any, reference: Any) -> Iterator[Pair]:
        z = torch.randn(4, self.config.vocabulary, generator=self.random) * 2
        keys = [DrawKey(7, 3, row, 2, 100 + row) for row in range(4)]
        mask = torch.randint(0, 256, (4, -(-self.config.vocabulary // 8)), generator=self.random).to(torch.uint8)
        for what, bits in (("", None), (", retained set", mask)):
            found, expected = (p.best(z, 0, 0.7, bits, keys) for p in (tested, reference))
            yield f"scores{what}", found[0], expected[0]
            yield f"tokens{what}", found[1], expected[1]

    def adamw(self, tested: Any, reference: Any) -> Iterator[Pair]:
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

    def grad_norm(self, tested: Any, reference: Any) -> Iterator[Pair]:
        grad = torch.randn(10007, generator=self.random) * torch.exp(torch.randn(10007, generator=self.random) * 6)
        yield "bins", tested.bins(grad), reference.bins(grad)


def prove(
    config: ModelConfig,
    sides: Sequence[Mapping[str, str]],
    contract: Contract,
    rows: tuple[int, ...] = (1, 2, 3, 8, 12, 13, 97),
    folder: Path | None = None,
    tp_sizes: Sequence[int] = (1,),
) -> Qualification:
    """Compares every contract provider of a run on the model's shapes; a few seconds.

    Args:
        config: the model's shape.
        sides: operator -> provider, for each side of the run; equal sides are proven once.
        contract: the contract in force; its digest enters the qualification's.
        rows: row counts of the products.
        folder: private to a run; its processes on this machine compare once (:mod:`rl_engine.qualify.shared`).
        tp_sizes: tensor-parallel ranks of the run's sides, whose slices a GPU's own proof must hold.
    """
    started = time.perf_counter()
    facts = {
        "contract": contract.digest(),
        "kernels": _kernels(sides),
        "operators": _sources(),
        "rope_table": RopeTable.build(config.inverse_frequencies(), config.max_positions).digest(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": dataclasses.asdict(config),
    }

    def compare() -> list[dict[str, Any]]:
        with torch.no_grad():
            distinct = {tuple(sorted(side.items())): dict(side) for side in sides}
            found = (case for names in distinct.values() for case in _Prover(config, names, rows).cases())
            return [dataclasses.asdict(case) for case in found]

    asked = {"proof": facts, "sides": [dict(side) for side in sides], "rows": list(rows), "library": _library(sides)}
    found = compare() if folder is None else shared(folder, asked, compare)
    cases = tuple(Case(**case) for case in found)
    on_gpu, table = _some(sides, lambda able: able.proven_apart), ""
    if on_gpu:
        table, missing = gpu_table(config, tp_sizes)
        cases += missing
    body = {"gpu_table": table, **facts, "cases": [dataclasses.asdict(case) for case in cases]}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return Qualification(cases, digest, time.perf_counter() - started)


def gpu_table(config: ModelConfig, tp_sizes: Sequence[int] = (1,)) -> tuple[str, tuple[Case, ...]]:
    """(digest of the GPU's own proof, one failed case where it is missing, stale, or of another model or cut).

    ``tp_sizes`` are the tensor-parallel ranks of either side; context-parallel ranks ask for no other product.
    """
    from rl_engine.ops import gemm_table
    from rl_engine.qualify.gpu.run import model, shapes

    try:
        table = gemm_table.current()
        wanted = [*map(str, shapes(config)), *(name for tp in tp_sizes for name in slices(config, tp))]
        lacking = [name for name in dict.fromkeys(wanted) if name not in table.entries]
        if lacking:
            cut = "".join(f" --tp {tp}" for tp in sorted(set(tp_sizes)) if tp > 1)
            told = f"{len(lacking)} shapes of this model were not proven, first {lacking[0]}"
            raise gemm_table.NotQualified(told + (f": run rlk-repro qualify{cut} with this model" if cut else ""))
        if model(config) not in table.models:
            raise gemm_table.NotQualified(f"attention and row operators were not proven for {model(config)}")
    except (gemm_table.NotQualified, LayoutRefused) as error:
        return "", (Case("linear", "cublaslt", str(error), 1, 1),)
    return table.models[model(config)], ()


def slices(config: ModelConfig, tp: int) -> list[str]:
    """The table's names of every linear product that a rank of ``tp`` asks for, uneven cuts as they are.

    The head asks for the nearest proven width, and dW takes any number of rows of a proven depth under CP.

    Raises:
        LayoutRefused: the model has no such cut.
    """
    from rl_engine.ops import gemm_table

    found: list[str] = []
    rows = config.tensor_shapes()
    for rank in range(tp):
        cut = Sharding(config, tp, rank)
        for merged, parts in merged_names(config).items():
            if not merged.startswith("model.layers.0.") or len(rows[parts[0]]) == 1:
                continue
            columns, depth = sum(cut.part_rows(merged, rank)), rows[parts[0]][1]
            first, last = cut.inputs(merged, rank)
            forward = "residual" if merged.endswith(("o_proj.weight", "down_proj.weight")) else "forward"
            whole = sum(rows[part][0] for part in parts)
            wanted = ((forward, columns, depth), ("dx", last - first, whole), ("fold", columns, depth))
            found += [gemm_table.key(*shape) for shape in wanted]
    return list(dict.fromkeys(found))


def _sources() -> str:
    """SHA-256 over the operators' Python files: what the kernels' own key does not cover."""
    digest, folder = hashlib.sha256(), Path(operators.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _some(sides: Sequence[Mapping[str, str]], able: Callable[[Capabilities], bool]) -> bool:
    """Whether a provider of a side is ``able``."""
    return any(able(capabilities(name)) for side in sides for name in side.values())


def _library(sides: Sequence[Mapping[str, str]]) -> str:
    """SHA-256 of the C kernels that this process has loaded, or empty where no side uses them."""
    if not _some(sides, lambda able: able.compiled):
        return ""
    from rl_engine.ops.library import loaded_digest

    return loaded_digest()


def _kernels(sides: Sequence[Mapping[str, str]]) -> str:
    if not _some(sides, lambda able: able.compiled):
        return ""
    from rl_engine.ops.library import build_key

    return build_key()
