"""Matrix products: every candidate against the anchor on a shape, at every row range; times; the fastest that held.

The anchor is one plain Triton tile. A candidate is held against its bits on order-revealing and on random data, in fp32
where it writes fp32 (a Triton tile always does here) and in bf16 where an algorithm of cuBLASLt is made for bf16. The
chosen one is tried again at odd row counts, on views inside NaN, and writing into NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.ops import cublaslt, gemm_table, triton_gemm
from rl_engine.ops.gemm_table import Choice
from rl_engine.ops.triton_gemm import Tile
from rl_engine.qualify.cases import Case, close
from rl_engine.qualify.gpu.data import Inputs, differing, in_nan, poisoned
from rl_engine.qualify.gpu.timing import Run, copies, microseconds

ANCHOR = Tile(64, 64, 64, 4, 3)
POINTS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
UNIT_POINTS = (64, 256, 1024, 4096)
FOLD_ROWS = 8192  # tokens that a fold's candidates are timed on
ALGORITHMS = 8
CLOSE, FINALISTS = 1.12, 4  # candidates whose times are too close after a few calls
# Row counts whose first ranks are proven beside the points, odd ones among them.
CENSUS = (
    *range(8, 513, 8),
    *range(37, 513, 64),
    *range(544, 1025, 32),
    *range(573, 1025, 128),
    *range(1152, 8193, 256),
)
CENSUS_RANKS = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """``kind`` of the table, and the product's own columns and depth."""

    kind: str
    columns: int
    depth: int

    def __str__(self) -> str:
        return gemm_table.key(self.kind, self.columns, self.depth)


def _tma(rows: int, columns: int, depth: int, warps: int, stages: int, **more: int) -> Tile:
    return Tile(rows, columns, depth, warps, stages, tma=True, **more)  # type: ignore[arg-type]


def tiles(rows: int, columns: int) -> list[Tile]:
    """Triton's candidates for a row count, the pointer tiles of unaligned operands among them."""
    plain = triton_gemm.default_tile(rows, columns, tma=False)
    if rows <= 16:
        swapped = [Tile(64, 16, 128, 4, 5, swap=True)]
        swapped += [_tma(64, 16, depth, 4, stages, swap=True) for depth, stages in ((256, 5), (128, 8))]
        return [plain, Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 4), _tma(16, 32, 256, 4, 5), *swapped]
    if rows <= 64:
        found = [_tma(64, 64, 128, 4, 6), _tma(64, 64, 64, 4, 4), _tma(64, 32, 128, 4, 6), _tma(64, 32, 128, 4, 4)]
        return [plain, *found, _tma(64, 64, 128, 4, 5, swap=True), _tma(64, 32, 128, 4, 5, swap=True)]
    if rows <= 128:
        found = [_tma(128, 64, 128, 4, 4), _tma(64, 64, 128, 4, 5), _tma(128, 64, 64, 4, 3)]
        return [plain, *found, _tma(64, 128, 128, 4, 4, swap=True)]
    if rows <= 1024:
        found = [_tma(128, 128, 64, 4, 5), _tma(64, 128, 64, 4, 6), _tma(128, 128, 64, 8, 5, persistent=1)]
        return [plain, *found, _tma(128, 256, 64, 8, 4), _tma(128, 256, 64, 8, 3)]
    return [plain, _tma(128, 256, 64, 8, 3), _tma(128, 256, 64, 8, 4, persistent=1)]


def fold_tiles() -> list[Tile]:
    hopper = triton_gemm.FOLD_HOPPER
    specialized = [dataclasses.replace(hopper, group=group) for group in (4, 8)]
    found = [triton_gemm.FOLD_POINTERS, triton_gemm.FOLD_TILE, _tma(128, 128, 64, 8, 6), _tma(128, 256, 64, 16, 4)]
    return found + (specialized if torch.cuda.get_device_capability()[0] == 9 else [])


def outside(kind: str) -> torch.dtype:
    return torch.float32 if kind in ("logits", "dh", "fold") else torch.bfloat16


def ranked(sound: Sequence[Choice], runs: Mapping[str, Sequence[Run]]) -> tuple[list[Choice], float]:
    """(the candidates with their times, fastest first; native's time). ``runs``: a candidate's place, or ``native``.

    Few calls tell far candidates apart; those within CLOSE of the fastest are timed again, in turns, for longer.
    """
    found = microseconds(runs, 0.002)
    best = min((found[str(i)] for i in range(len(sound))), default=0.0)
    close = [str(i) for i in range(len(sound)) if found[str(i)] <= CLOSE * best]
    if len(close) > 1:
        names = [*sorted(close, key=found.__getitem__)[:FINALISTS], "native"]
        found |= microseconds({name: runs[name] for name in names}, 0.01)
        rest = max(found[name] for name in names[:-1])
        found |= {name: max(found[name], rest) for name in close if name not in names}
    timed = [dataclasses.replace(c, microseconds=round(found[str(i)], 2)) for i, c in enumerate(sound)]
    return sorted(timed, key=lambda c: c.microseconds), found["native"]


class Products:
    """Candidates, proof and times of one shape."""

    def __init__(self, shape: Shape, inputs: Inputs) -> None:
        self.shape, self.inputs = shape, inputs
        self.dtype = outside(shape.kind)
        self.cases: list[Case] = []
        self.proven: set[str] = set()

    def operand(self, weight: Tensor) -> Tensor:
        """The second operand [columns, depth] as the operator has it: dX and dH read the weight across."""
        return weight.T.contiguous().T if self.shape.kind in ("dx", "dh") else weight

    def search(self, rows: int) -> Iterator[tuple[list[Choice], float]]:
        """Yields (every candidate with its time, fastest first; native's time) of a row count."""
        shape = self.shape
        b = [self.operand(self.inputs.normal(shape.columns, shape.depth, scale=0.02))]
        b += [b[0].clone(memory_format=torch.preserve_format) for _ in range(self._sets(rows) - 1)]
        a = [self.inputs.normal(rows, shape.depth) for _ in b]
        out = [torch.empty((rows, shape.columns), dtype=self.dtype, device="cuda") for _ in b]
        old = self._old(out)
        sound = self._sound(self.candidates(a[0], b[0], out[0], old[0]), rows)
        runs = {
            str(index): [lambda c=c, i=i: gemm_table.run(c, a[i], b[i], out[i], old[i]) for i in range(len(b))]
            for index, c in enumerate(sound)
        }
        runs["native"] = [lambda i=i: torch.mm(a[i], b[i].T) for i in range(len(b))]
        yield ranked(sound, runs)

    def _sets(self, rows: int) -> int:
        shape = self.shape
        width = 4 if self.dtype == torch.float32 else 2
        size = 2 * shape.depth * (rows + shape.columns) + width * rows * shape.columns
        return copies(size, 6)

    def _old(self, out: list[Tensor]) -> list[Tensor | None]:
        if self.shape.kind == "dh":
            return list(out)
        if self.shape.kind == "residual":
            return [self.inputs.normal(*x.shape) for x in out]
        return [None for _ in out]

    def candidates(self, a: Tensor, b: Tensor, out: Tensor, old: Tensor | None) -> list[Choice]:
        """Tiles for the rows, and what cuBLASLt's search names for the same product, without a split."""
        found = [Choice(tile, None) for tile in tiles(a.shape[0], self.shape.columns)]
        if torch.version.cuda is None or self.shape.depth % 8 or self.shape.columns % 8:
            return found
        plan = cublaslt.plan(cublaslt.describe(a, b, out, old), out.device.index)
        return found + [Choice(None, algorithm.hex()) for algorithm, _ in plan.search(ALGORITHMS)]

    def data(self, kind: str, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
        shape = self.shape
        if kind == "order":
            a, b = self.inputs.order_revealing(rows, shape.depth), self.inputs.weights(shape.columns, shape.depth)
        else:
            a, b = (self.inputs.normal(n, shape.depth) for n in (rows, shape.columns))
        old = None
        if shape.kind in ("dh", "residual"):
            old = (torch.randn((rows, shape.columns), generator=self.inputs.random, device="cuda") * 3).to(self.dtype)
        return a, self.operand(b), old

    def anchor(self, a: Tensor, b: Tensor, old: Tensor | None) -> Tensor:
        """fp32 [rows, columns] before the last rounding."""
        out = poisoned(a.shape[0], b.shape[0], torch.float32)
        triton_gemm.product(a, b, out, ANCHOR)
        return out if old is None else old.float() + out

    def _sound(self, choices: list[Choice], rows: int) -> list[Choice]:
        """The candidates that hold on both kinds of data; every comparison is recorded."""
        for kind in ("order", "random"):
            a, b, old = self.data(kind, rows)
            expected, what = self.anchor(a, b, old), f"{self.shape} {rows} rows, {kind}"
            choices = [choice for choice in choices if self._compare(choice, a, b, old, expected, what)]
        self.proven |= {choice.algorithm for choice in choices if choice.algorithm}
        return choices

    def _compare(self, choice: Choice, a: Tensor, b: Tensor, old: Tensor | None, expected: Tensor, what: str) -> bool:
        fp32 = choice.tile is not None  # a tile is compared before the last rounding
        out = poisoned(a.shape[0], b.shape[0], torch.float32 if fp32 else self.dtype)
        if self.shape.kind == "dh" and old is not None:
            out = old.clone()
            old = out
        try:
            gemm_table.run(choice, a, b, out, old)
            count = differing(out, expected.to(out.dtype))
        except Exception as error:  # a candidate that does not run is no candidate; the reason is kept
            what, count = f"{what}: {' '.join(str(error).split())[:80]}", out.numel()
        self.cases.append(Case("product", choice.provider, what, out.numel(), count))
        return count == 0

    def again(self, choice: Choice, rows: int) -> bool:
        """The chosen candidate at a row count of the range's inside, views inside NaN, a product written into NaN."""
        before = len(self.cases)
        a, b, old = self.data("order", rows)
        views = [in_nan(a), in_nan(b.T).T if self.shape.kind in ("dx", "dh") else in_nan(b)]
        expected = self.anchor(a, b, old)
        surround = poisoned(rows + 2, self.shape.columns + 16, self.dtype)
        out = surround[1:-1, 8 : 8 + self.shape.columns]
        if self.shape.kind == "dh" and old is not None:
            out.copy_(old)
            old = out
        if not gemm_table.aligned(*views, out):
            return True
        gemm_table.run(choice, *views, out, old)
        wrong = differing(out, expected.to(self.dtype))
        wrong += int((~surround.isnan()).sum()) - int((~out.isnan()).sum())  # written outside
        self.cases.append(Case("product", choice.provider, f"{self.shape} {rows} rows, inside NaN", out.numel(), wrong))
        return all(case.holds for case in self.cases[before:])

    def census(self, most: int) -> None:
        """Proves what the library ranks first at row counts up to ``most``, each where it first appears."""
        shape, found = self.shape, {}
        if torch.version.cuda is None or shape.depth % 8 or shape.columns % 8:
            return
        b = self.operand(self.inputs.weights(shape.columns, shape.depth))
        for rows in (rows for rows in CENSUS if rows <= most):
            a = torch.empty((rows, shape.depth), dtype=torch.bfloat16, device="cuda")
            out = torch.empty((rows, shape.columns), dtype=self.dtype, device="cuda")
            old = out if shape.kind in ("dh", "residual") else None
            plan = cublaslt.Plan(cublaslt.describe(a, b, out, old), out.device.index)
            for algorithm, _ in plan.search(CENSUS_RANKS):
                found.setdefault(algorithm.hex(), rows)
            plan.close()
        for rows in sorted(set(found.values())):
            fresh = [name for name, first in found.items() if first == rows and name not in self.proven]
            if fresh:
                self._sound([Choice(None, name) for name in fresh], rows)

    def choose(self, points: tuple[int, ...]) -> tuple[list[tuple[int, Choice]], dict[int, tuple[float, float]]]:
        """([(rows, choice)] of every range, rows -> (chosen, native) microseconds).

        Raises:
            NotQualified: no candidate held at a row count.
        """
        entries, prices, below = [], {}, 0
        for rows in points:
            for candidates, native in self.search(rows):
                inner = [rows, *({below + 1, (below + rows) // 2 | 1} - {rows, 0})]
                chosen = next((c for c in candidates if all(self.again(c, n) for n in inner if n <= rows)), None)
                if chosen is None:
                    raise gemm_table.NotQualified(f"no candidate holds for {self.shape} at {rows} rows")
                entries.append((rows, chosen))
                prices[rows] = (chosen.microseconds, native)
            below = rows
        return entries, prices


class Folds(Products):
    """dW: one chain per fold unit, added into a gradient that is not zero. ``columns`` x ``depth`` is the gradient."""

    def choose(self, points: tuple[int, ...]) -> tuple[list[tuple[int, Choice]], dict[int, tuple[float, float]]]:
        entries, prices = [], {}
        for unit in points:
            found, native = self._timed(unit)
            chosen = next((c for c in found if self._odd(c, unit)), None)
            if chosen is None:
                raise gemm_table.NotQualified(f"no candidate holds for {self.shape} with units of {unit}")
            entries.append((unit, chosen))
            prices[unit] = (chosen.microseconds, native)
        return entries, prices

    def _timed(self, unit: int) -> tuple[list[Choice], float]:
        n, k = self.shape.columns, self.shape.depth
        bounds = tuple((first, first + unit) for first in range(0, FOLD_ROWS, unit))
        dy, x = self.inputs.normal(FOLD_ROWS, n), self.inputs.normal(FOLD_ROWS, k)
        grad = torch.zeros((n, k), device="cuda")
        choices = [Choice(tile, None) for tile in fold_tiles()]
        if torch.version.cuda is not None and not (n % 8 or k % 8):
            product = cublaslt.describe(dy[:unit].T, x[:unit].T, grad, add=True)
            choices += [Choice(None, a.hex()) for a, _ in cublaslt.plan(product, 0).search(ALGORITHMS)]
        sound = [c for c in choices if self._proof(c, bounds, "whole steps")]
        self.proven |= {choice.algorithm for choice in sound if choice.algorithm}
        runs = {str(i): [lambda c=c: run_fold(c, dy, x, grad, bounds)] for i, c in enumerate(sound)}
        runs["native"] = [lambda: torch.mm(dy.T, x)]
        return ranked(sound, runs)

    def _odd(self, choice: Choice, unit: int) -> bool:
        lengths = [1, 15, 16, 17, 37, max(1, unit - 1), unit, unit // 3 + 1]
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return self._proof(choice, tuple(zip([0, *ends[:-1]], ends, strict=True)), "odd units")

    def _proof(self, choice: Choice, bounds: triton_gemm.Bounds, what: str) -> bool:
        n, k, tokens = self.shape.columns, self.shape.depth, bounds[-1][1]
        before = len(self.cases)
        for kind in ("order", "random", "an empty gradient"):
            empty = kind == "an empty gradient"
            if empty and choice.algorithm is None:
                continue  # a tile reads the gradient, which is filled with +0 before
            scale = 2.0**-75 if empty else 1.0  # sums at the edge of fp32, where a zero could take a sign
            dy, x = self.inputs.normal(tokens, n, scale=scale), self.inputs.normal(tokens, k, scale=scale)
            if kind == "order":
                dy = self.inputs.order_revealing(n, tokens).T.contiguous()
                x = self.inputs.weights(k, tokens).T.contiguous()
            start = torch.randn((n, k), generator=self.inputs.random, device="cuda")
            expected = torch.zeros_like(start) if empty else start.clone()
            start = poisoned(n, k, torch.float32) if empty else start
            for first, last in bounds:
                chain = poisoned(n, k, torch.float32)
                triton_gemm.product(dy[first:last].T, x[first:last].T, chain, ANCHOR)
                expected += chain
            label = f"{self.shape} units of {bounds[0][1] - bounds[0][0]}, {what}, {kind}"
            try:
                run_fold(choice, dy, x, start, bounds, empty=empty)
                count = differing(start, expected)
            except Exception as error:  # as in Products._compare
                label, count = f"{label}: {' '.join(str(error).split())[:80]}", start.numel()
            self.cases.append(Case("fold", choice.provider, label, start.numel(), count))
        return all(case.holds for case in self.cases[before:])


def run_fold(
    choice: Choice, dy: Tensor, x: Tensor, grad: Tensor, bounds: triton_gemm.Bounds, *, empty: bool = False
) -> None:
    """grad += the units' chains; with ``empty`` an algorithm writes the first one over whatever grad holds."""
    if choice.tile is not None:
        triton_gemm.fold(dy, x, grad, bounds, choice.tile)
        return
    algorithm = bytes.fromhex(choice.algorithm or "")
    for index, (first, last) in enumerate(bounds):
        add = index > 0 or not empty
        cublaslt.product(dy[first:last].T, x[first:last].T, grad, algorithm, add=add)


PARTS = ("unaligned",)


def unaligned(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """What is a product and in no table, as one part of the proof."""
    del config  # such operands have no model's size
    yield from tails(inputs)


def tails(inputs: Inputs) -> Iterator[Case]:
    """K tails, denormals and odd strides: pointer tiles against the anchor, which pads nothing either.

    Such operands reach a pointer tile without being asked for in the table, so a difference here is a failure and no
    refuted candidate.
    """
    for depth in (1, 15, 16, 17, 37):
        for rows in (1, 3, 17, 97):
            for kind in ("order", "random", "denormal"):
                a = inputs.order_revealing(rows, depth) if kind == "order" else inputs.normal(rows, depth)
                b = inputs.weights(61, depth) if kind == "order" else inputs.normal(61, depth)
                if kind == "denormal":
                    a = a * math.ldexp(1.0, -130)
                expected = poisoned(rows, 61, torch.float32)
                triton_gemm.product(a, b, expected, ANCHOR)
                if kind == "random":
                    what, exact = f"K {depth}, {rows} rows, the anchor, fp64", a.double() @ b.double().T
                    yield close("linear", what, expected, exact, 0.0, 1e-4 * depth**0.5)
                padded = [torch.nn.functional.pad(x, (0, -depth % 64)) for x in (a, b)]
                candidates: dict[str, Callable[[Tensor], None]] = {
                    "zero tail": lambda out, p=padded: triton_gemm.product(*p, out, ANCHOR),
                    "tile 16": lambda out, a=a, b=b: triton_gemm.product(a, b, out, Tile(16, 32, 128, 4, 4)),
                    "tile 128": lambda out, a=a, b=b: triton_gemm.product(a, b, out, Tile(128, 128, 64, 8, 3)),
                    "swapped": lambda out, a=a, b=b: triton_gemm.product(a, b, out, Tile(64, 16, 128, 4, 5, swap=True)),
                }
                for name, run in candidates.items():
                    out = poisoned(rows, 61, torch.float32)
                    run(out)
                    what = f"K {depth}, {rows} rows, {kind}, {name}"
                    yield Case("linear", "triton", what, out.numel(), differing(out, expected))
