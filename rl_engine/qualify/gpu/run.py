"""The whole proof on one GPU: shapes of a model and its TP slices; every operator, controls; table, prices, digest."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rl_engine.models.config import ModelConfig
from rl_engine.ops import gemm_table, triton_gemm
from rl_engine.ops.gemm_table import Choice, NotQualified, Table
from rl_engine.ops.selected_logp.vocabulary import group_columns
from rl_engine.ops.triton_gemm import Tile
from rl_engine.qualify.cases import Case
from rl_engine.qualify.gpu import stress
from rl_engine.qualify.gpu.controls import wrong_product
from rl_engine.qualify.gpu.data import Inputs, differing, poisoned
from rl_engine.qualify.gpu.parts import collect, pool, submit
from rl_engine.qualify.gpu.products import ANCHOR, POINTS, UNIT_POINTS, Folds, Products, Shape, fold_tiles, tiles

# The parts of the proof beside the search for every product's kernel.
PROVERS = (
    *("rl_engine.qualify.gpu_attention", "rl_engine.qualify.gpu_rows", "rl_engine.qualify.gpu_logp"),
    "rl_engine.qualify.gpu.products",
)


@dataclasses.dataclass
class GpuQualification:
    """``prices``: shape -> rows -> (ours, native) microseconds; the other operators' are added to the record."""

    table: Table
    cases: list[Case]
    prices: dict[str, dict[int, tuple[float, float]]]
    seconds: float

    @property
    def failed(self) -> list[Case]:
        """Comparisons of chosen providers, and controls, that did not turn out as they must.

        A refuted candidate is no failure: it is named in the record and never chosen.
        """
        return [case for case in self.cases if not case.holds and case.operator not in ("product", "fold")]

    @property
    def refuted(self) -> list[Case]:
        return [case for case in self.cases if not case.holds and case.operator in ("product", "fold")]

    def record(self) -> dict[str, Any]:
        return {
            "digest": self.table.digest,
            "identity": self.table.identity,
            "seconds": round(self.seconds, 1),
            "cases": len(self.cases),
            "outputs": sum(case.elements for case in self.cases),
            "failed": [dataclasses.asdict(case) for case in self.failed],
            "refuted": [dataclasses.asdict(case) for case in self.refuted],
            "controls": [dataclasses.asdict(case) for case in self.cases if case.control],
            "prices": {name: {str(rows): pair for rows, pair in p.items()} for name, p in self.prices.items()},
        }


def shapes(config: ModelConfig, tp_sizes: Sequence[int] = (1,)) -> list[Shape]:
    """Every product of a model: linears in column slices (forward) and depth slices (dX), the head by groups."""
    c, found = config, []
    query, joined = c.heads * c.head_dim, (c.heads + 2 * c.kv_heads) * c.head_dim
    linears = [(joined, c.hidden, False), (c.hidden, query, True), (2 * c.intermediate, c.hidden, False)]
    linears.append((c.hidden, c.intermediate, True))
    for tp in tp_sizes:
        for columns, depth, residual in linears:
            if columns % tp or depth % tp:
                continue
            kinds = ("forward", "residual") if residual else ("forward",)
            found += [Shape(kind, columns // tp, depth) for kind in kinds]
            found += [Shape("dx", depth // tp, columns), Shape("fold", columns // tp, depth)]
    group = min(group_columns(c.vocabulary), c.vocabulary)
    found += [Shape("logits", c.vocabulary, c.hidden), Shape("logits", group, c.hidden)]
    found += [Shape("dh", c.hidden, group), Shape("fold", group, c.hidden)]
    return list(dict.fromkeys(found))


def model(config: ModelConfig) -> str:
    """The sizes that the kernels of a model's operators see, as the table names them."""
    c = config
    heads = f"{c.heads} and {c.kv_heads} heads of {c.head_dim}" + (" with QK norm" if c.qk_norm else "")
    return f"hidden {c.hidden}, inner {c.intermediate}, {heads}, vocabulary {c.vocabulary}"


def prove(
    config: ModelConfig,
    tp_sizes: Sequence[int] = (1,),
    points: Sequence[int] = POINTS,
    say: Callable[[str], None] = lambda line: None,
) -> GpuQualification:
    """Proves every operator and times every product; one to three minutes for one model on an H200.

    Raises:
        NotQualified: the driver does not say its version.
    """
    started, identity, inputs = time.perf_counter(), gemm_table.identity(), Inputs()
    wanted = shapes(config, tp_sizes)
    with pool() as processes:
        parts, kernels = submit(processes, config, PROVERS), warm(processes, wanted, points)
        cases, entries, prices, proven = list(controls(inputs)), {}, {}, {}
        concurrent.futures.wait(kernels)  # one that is not compiled by now is compiled where it is tried
        say(f"{time.perf_counter() - started:.0f} s: {len(kernels)} kernels of products compiled")
        cases += collect(parts, say)  # no product is timed while another process is at work on the device
    say(f"{time.perf_counter() - started:.0f} s: other operators compared")
    cases += stress.cases(config, say)
    say(f"{time.perf_counter() - started:.0f} s: every form repeated beside other work")
    for shape in wanted:
        prover = (Folds if shape.kind == "fold" else Products)(shape, inputs)
        rows = UNIT_POINTS if shape.kind == "fold" else tuple(points)
        if shape.kind == "logits" and shape.columns == config.vocabulary:
            rows = tuple(n for n in rows if n <= 256)  # decoding; scoring goes by groups
        try:
            entries[str(shape)], prices[str(shape)] = prover.choose(rows)
            if shape.kind != "fold":
                prover.census(max(rows))
            proven[str(shape)] = sorted(prover.proven)
        except NotQualified as error:  # the other shapes are still proven, and named where they fail
            cases.append(Case("linear", "every candidate", str(error), 1, 1))
        cases += prover.cases
        chosen = ", ".join(f"{n} {_name(c)} {c.microseconds:.0f}us" for n, c in entries.get(str(shape), ()))
        say(f"{time.perf_counter() - started:.0f} s: {shape}: {chosen}")
        torch.cuda.empty_cache()
    table = Table(identity, entries, proven=proven)
    body = [table.json(), [dataclasses.asdict(case) for case in cases], dataclasses.asdict(config)]
    table.digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    found = GpuQualification(table, cases, prices, time.perf_counter() - started)
    if not found.failed:
        table.models[model(config)] = table.digest
    return found


def kept(config: ModelConfig, tp_sizes: Sequence[int] = (1,)) -> dict[str, Any] | None:
    """The record of a fresh proof of these shapes on this device, driver, versions and sources; None without one."""
    try:
        table = gemm_table.current()
    except NotQualified:
        return None
    digest = table.models.get(model(config))
    if digest is None or any(str(shape) not in table.entries for shape in shapes(config, tp_sizes)):
        return None
    try:
        record = json.loads(record_path(digest).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("digest") == digest else None


def keep(found: GpuQualification) -> None:
    """Puts a proof in force and keeps its record; one that failed puts itself in the place of every earlier one."""
    if not found.failed:
        gemm_table.keep(found.table)
        write_record(found.record())
        return
    first = found.failed[0]
    reason = f"{first.operator}, {first.provider}: {first.what}; {len(found.failed)} in all"
    gemm_table.keep(Table(found.table.identity, {}, found.table.digest, failed=reason))


def write_record(record: dict[str, Any]) -> None:
    """Keeps a proof's record beside the table."""
    record_path(record["digest"]).write_text(json.dumps(record, indent=1))


def record_path(digest: str) -> Path:
    return gemm_table.path().with_name(f"gpu-proof-{digest[:16]}.json")


def _name(choice: Choice) -> str:
    if choice.tile is None:
        return "lt"
    t = choice.tile
    return f"{t.rows}x{t.columns}x{t.depth}" + ("s" if t.swap else "") + ("t" if t.tma else "")


def controls(inputs: Inputs, rows: int = 16, columns: int = 16, depth: int = 128) -> Iterator[Case]:
    """Wrong products at the smallest shape, on order-revealing data, before the last rounding."""
    a, b = inputs.order_revealing(rows, depth), inputs.weights(columns, depth)
    chain = poisoned(rows, columns, torch.float32)
    triton_gemm.product(a, b, chain, ANCHOR)
    size = chain.numel()
    right = poisoned(rows, columns, torch.float32)
    wrong_product(a, b, right)
    yield Case("controls", "triton", "the control's kernel without a mistake", size, differing(right, chain))
    for name, mistake in (("split-K", {"split": 2}), ("tf32", {"tf32": True})):
        out = poisoned(rows, columns, torch.float32)
        wrong_product(a, b, out, **mistake)
        yield Case("controls", "control", name, size, differing(out, chain), True)
    start = torch.randn((rows, columns), generator=inputs.random, device="cuda")
    out = start.clone()
    wrong_product(a, b, out, preload=True)
    yield Case("controls", "control", "a preloaded accumulator", size, differing(out, start + chain), True)


def warm(processes: ProcessPoolExecutor, wanted: Sequence[Shape], points: Sequence[int]) -> list[Future[None]]:
    """Compiles the candidates in processes of their own: Triton's cache on the disk hands them over."""
    jobs: set[Job] = set()
    for shape in wanted:
        if shape.kind == "fold":
            jobs |= {(shape.kind, tile, 2048, 512) for tile in fold_tiles()}
            jobs |= {("chain", ANCHOR, depth, 512) for depth in (1, 16, 17, 64)}  # of a unit, each another kernel
            continue
        for tile in {ANCHOR, *(tile for rows in points for tile in tiles(rows, shape.columns))}:
            tail = 0 if shape.depth % tile.depth == 0 else math.gcd(shape.depth, 16)
            jobs.add((shape.kind, tile, 2048 + tail, 512 + shape.columns % 16))
    return [processes.submit(_compile, job) for job in sorted(jobs, key=str)]


Job = tuple[str, Tile, int, int]  # kind, tile, depth, columns


def _compile(job: Job) -> None:
    """Runs a candidate once on small tensors; one that does not fit the device is refuted later, with its reason."""
    kind, tile, depth, columns = job
    try:
        if kind == "fold":
            dy, x = (torch.zeros((64, 512), dtype=torch.bfloat16, device="cuda") for _ in range(2))
            triton_gemm.fold(dy, x, torch.zeros((512, 512), device="cuda"), ((0, 64),), tile)
            torch.cuda.synchronize()
            return
        a, b = (torch.zeros((n, depth), dtype=torch.bfloat16, device="cuda") for n in (128, columns))
        if kind in ("dx", "dh", "chain"):
            b = torch.zeros((depth, columns), dtype=torch.bfloat16, device="cuda").T
        if kind == "chain":
            a = torch.zeros((depth, 128), dtype=torch.bfloat16, device="cuda").T
        for dtype in (torch.float32,) if kind in ("logits", "dh", "chain") else (torch.float32, torch.bfloat16):
            out = torch.zeros((128, columns), dtype=dtype, device="cuda")
            old = out if kind == "dh" else torch.zeros_like(out).bfloat16() if kind == "residual" else None
            triton_gemm.product(a, b, out, tile, old)
        torch.cuda.synchronize()
    except Exception:
        return
