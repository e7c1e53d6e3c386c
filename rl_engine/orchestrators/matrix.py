"""``verify --matrix``: the same run on many layouts, one after the other, compared with the first in every bit."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_engine.checks.compare import compare_runs
from rl_engine.config.options import BY_NAME
from rl_engine.config.plan import Plan
from rl_engine.config.preflight import check_inputs, refuse_unbuilt
from rl_engine.config.resolve import Request, ResolvedPlan, resolve
from rl_engine.config.topology import GUIDE_MATRIX
from rl_engine.orchestrators.interrupts import interruptible
from rl_engine.records.environment import utc_now
from rl_engine.records.errors import UserError
from rl_engine.records.matrix import CellStatus, MatrixCell, MatrixRecord, matrix_path, write_matrix
from rl_engine.records.reader import RunReader

TRAIN_SHAPES = ((1, 8), (2, 4), (4, 2), (8, 1))
ROLLOUT_SHAPES = tuple((tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8)
# Parts of the model that ``modules`` leaves stock, one at a time: each is a control that shows its own share.
MODULES = {
    "attention": "attention,rope,qk_norm",
    "ffn": "linear,swiglu",
    "norms": "rms_norm",
    "logp": "selected_logp@rollout",
}
FLAGS = ("tp_size", "cp_size", "rollout_tp_size", "rollout_cp_size")
FORM = "a JSON list of [train TP, train CP, rollout TP, rollout CP]"


@dataclasses.dataclass(frozen=True)
class Layout:
    """One cell to run: TP and CP of both sides (None: the command line's own), and operators that stay stock."""

    shape: tuple[int, int, int, int] | None
    native: str = ""


def layouts(name: str) -> list[Layout]:
    """The cells of a matrix by its name, or from a file.

    Raises:
        UserError: neither a known name nor a readable file of layouts.
    """
    if name == "guide":
        return [Layout((*train, *rollout)) for train, rollout in GUIDE_MATRIX]
    if name == "full":
        return [Layout((*train, *rollout)) for train in TRAIN_SHAPES for rollout in ROLLOUT_SHAPES]
    if name == "modules":
        return [Layout(None), *(Layout(None, operators) for operators in MODULES.values())]
    path = Path(name)
    if not path.is_file():
        raise UserError(f"--matrix {name}", "guide, full, modules or a file", f"a file is {FORM}")
    try:
        body = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--matrix {name} that cannot be read ({error})", FORM, "[[1, 1, 1, 1], [3, 1, 1, 1]]"
        ) from None
    if not isinstance(body, list) or not body or len(body) > 256:
        raise UserError(f"--matrix {name} without a list of 1 to 256 layouts", FORM, "[[1, 1, 1, 1], [3, 1, 1, 1]]")
    for entry in body:
        good = isinstance(entry, list) and len(entry) == 4 and all(type(n) is int and n > 0 for n in entry)
        if not good:
            raise UserError(f"{str(entry)[:80]} in --matrix {name}", FORM, "[[1, 1, 1, 1], [3, 1, 1, 1]]")
    return [Layout(tuple(entry)) for entry in body]


def main(resolved: Sequence[ResolvedPlan], *, matrix: str, json_output: bool, request: Request) -> int:
    """Runs every layout and writes the ledger after each; 0 when all agree, 1 otherwise.

    Raises:
        UserError: no layout can be run, or the matrix is none.
        KeyboardInterrupt: Ctrl-C; the ledger says what had run.
    """
    plan = resolved[0].plan
    if plan.mode != "consistency" or len(resolved) > 1:
        mode = str(request.flags["mode"])
        raise UserError(f"--matrix with --mode {mode}", "--mode consistency", "leave --mode out")
    record = MatrixRecord(
        matrix_id=plan.run_id, name=matrix, time=utc_now(), device="not recorded", reference="", cells=()
    )
    wanted = [_planned(request, plan.run_id, number, layout) for number, layout in enumerate(layouts(matrix), 1)]
    if not any(isinstance(item, ResolvedPlan) for item, _ in wanted):
        first = next(item for item, _ in wanted if isinstance(item, UserError))
        found = f"--matrix {matrix} without a layout that can run here; the first: {first.found}"
        raise UserError(found, first.expected, f"a file of layouts: {FORM}")
    root = Path(plan.output_root)
    if matrix_path(root, plan.run_id).exists():
        raise UserError(f"{matrix_path(root, plan.run_id)} already there", "a new matrix", "choose another --run-id")
    root.mkdir(parents=True, exist_ok=True)
    cells = [_cell(item, layout, plan) for item, layout in wanted]
    for number, (item, layout) in enumerate(wanted):
        if isinstance(item, ResolvedPlan):
            _say(f"layout {number + 1} of {len(wanted)}: {words(cells[number])}")
            arguments = command(request, layout, item.plan.run_id)
            cells[number] = _run(item.plan, cells[number], record.reference, arguments)
            if not record.reference and cells[number].status == "equal":
                device = _device(Path(item.plan.run_dir))
                record = dataclasses.replace(record, reference=item.plan.run_id, device=device)
        record = dataclasses.replace(record, cells=tuple(cells))
        write_matrix(root, record)
    _print(record, matrix_path(root, record.matrix_id), json_output)
    return 0 if all(cell.status in ("equal", "control") for cell in cells) else 1


def _planned(request: Request, name: str, number: int, layout: Layout) -> tuple[ResolvedPlan | UserError, Layout]:
    """The plan of one cell, or why there is none."""
    flags = cell_flags(request, layout, f"{name}-{number:02d}")
    try:
        (found,) = resolve(dataclasses.replace(request, flags=flags))
        refuse_unbuilt([found])
        check_inputs([found])
    except UserError as error:
        return error, layout
    return found, layout


def _cell(item: ResolvedPlan | UserError, layout: Layout, base: Plan) -> MatrixCell:
    """The cell before it has run."""
    if isinstance(item, ResolvedPlan):
        t, run_id = item.plan.topology, item.plan.run_id
        shape, engines = (t.train_tp, t.train_cp, t.rollout_tp, t.rollout_cp), t.rollout_engines
        return MatrixCell(*shape, engines, layout.native, "not run", run_id, "", 0, 0, 0, "")
    t = base.topology
    shape = layout.shape or (t.train_tp, t.train_cp, t.rollout_tp, t.rollout_cp)
    engines = max(1, shape[0] * shape[1] // (shape[2] * shape[3]))
    why = f"found {item.found}, expected {item.expected}"[:400]
    return MatrixCell(*shape, engines, layout.native, "refused", "", "", 0, 0, 0, why)


def command(request: Request, layout: Layout, run_id: str) -> list[str]:
    """The command line that runs one cell alone."""
    parts = [request.verb, *(["--profile", request.profile] if request.profile else [])]
    parts += [part for name, path in request.path_flags.items() for part in ("--" + name.replace("_", "-"), path)]
    for name, value in cell_flags(request, layout, run_id).items():
        parts += [BY_NAME[name].flag] if value is True else [f"{BY_NAME[name].flag}={value}"]
    return parts


def cell_flags(request: Request, layout: Layout, run_id: str) -> dict[str, str | bool]:
    """The run options of one cell: those of the command line, with the cell's own on top."""
    flags = {**request.flags, "run_id": run_id}
    if layout.shape is not None:
        flags |= {flag: str(value) for flag, value in zip(FLAGS, layout.shape, strict=True)}
    return flags | ({"native": layout.native} if layout.native else {})


def start(line: list[str]) -> subprocess.Popen[bytes]:
    """The child of a cell, in a process group of its own: a signal reaches it once, from here."""
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)


def _run(plan: Plan, cell: MatrixCell, reference: str, arguments: list[str]) -> MatrixCell:
    """One layout, run and validated in a process of its own (Ray starts once in each), compared with the reference.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; the child has ended.
    """
    with interruptible():
        child = start([sys.executable, "-m", "rl_engine.entrypoints.repro", *arguments])
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
    if code == 130:
        raise KeyboardInterrupt
    if code not in (0, 1):
        return dataclasses.replace(cell, status="failed", detail=f"exit code {code}: see {plan.run_dir}")
    status: CellStatus
    try:
        reader = RunReader(plan.run_dir)
        steps = reader.steps()
        cell = dataclasses.replace(
            cell,
            plan_digest=reader.plan().digest,
            steps=len(steps),
            tokens_compared=sum(step.tokens_compared for step in steps),
            mismatches=sum(step.mismatches for step in steps),
        )
        status, detail = _judge(code, plan, reference, cell)
    except (UserError, OSError) as error:
        status, detail = "failed", str(error)[:400]
    return dataclasses.replace(cell, status=status, detail=detail)


def _judge(code: int, plan: Plan, reference: str, cell: MatrixCell) -> tuple[CellStatus, str]:
    if cell.native:
        return "control", ""
    if code:
        why = f"{cell.mismatches} mismatches" if cell.mismatches else "a gate of its validation failed"
        return "differs", why
    if not reference:
        return "equal", ""
    found = compare_runs(Path(plan.output_root) / reference, plan.run_dir).results
    if not found:
        return "equal", ""
    first = found[0]
    return "differs", f"{first.quantity} {first.where}: reference {first.a}, here {first.b}"[:400]


def _device(run_dir: Path) -> str:
    records = RunReader(run_dir).environments()
    return ", ".join(dict.fromkeys(record.device for record in records if record.role != "driver"))[:200]


def words(cell: MatrixCell) -> str:
    """``train TP3 CP1, rollout 1 x TP3 CP1``, with the operators that stay stock."""
    text = f"train TP{cell.train_tp} CP{cell.train_cp}, rollout {cell.rollout_engines} x TP{cell.rollout_tp} "
    return f"{text}CP{cell.rollout_cp}" + (f", stock {cell.native}" if cell.native else "")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _print(record: MatrixRecord, path: Path, json_output: bool) -> None:
    if json_output:
        body = dataclasses.asdict(record)
        print(json.dumps({**body, "path": str(path)}, indent=1))
        return
    for cell in record.cells:
        tail = f": {cell.detail}" if cell.detail else ""
        _say(f"[{cell.status}] {words(cell)}: {cell.mismatches} of {cell.tokens_compared} differ{tail}")
    equal = sum(cell.status == "equal" for cell in record.cells)
    _say(f"{equal} of {len(record.cells)} layouts agree in tokens, logprobs, gradient norms and weights")
    print(f"matrix: {path}")
