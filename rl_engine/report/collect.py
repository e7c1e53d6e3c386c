"""What a report is made of: every run of an output root, read strictly, with a reason for each that is left out."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from rl_engine.checks.seal import verify_seal
from rl_engine.checks.validate import LIVE, judge
from rl_engine.config.plan import Plan
from rl_engine.records import paths
from rl_engine.records.codec import RecordError, decode, parse_json, printable
from rl_engine.records.errors import UserError
from rl_engine.records.matrix import MatrixRecord, read_matrix
from rl_engine.records.reader import RunReader
from rl_engine.records.types import EnvironmentRecord, EventRecord, RouteFile, StateRecord, StepRecord
from rl_engine.report.deltas import Deltas, measure_deltas
from rl_engine.report.prices import PriceRow, Prices, read_prices

BENCH_LIMIT = 4 << 20
RECORD = "recorded verdict"


@dataclasses.dataclass(frozen=True)
class Judged:
    """One gate, judged for this report from the run's files; ``recorded``: only said by the last validation file."""

    name: str
    status: str  # PASS | WARN | FAIL
    found: str
    expected: str
    hint: str
    recorded: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class RunView:
    """One run as a report shows it. ``root`` is the verified root of its seal, empty for an unsealed run."""

    run_dir: Path
    run_id: str
    plan: Plan
    plan_digest: str
    root: str
    states: tuple[StateRecord, ...]
    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    findings: tuple[Judged, ...]  # empty while the run may still be written
    certifies: tuple[str, ...]
    does_not_certify: tuple[str, ...]
    routes: tuple[RouteFile, ...]
    environments: tuple[EnvironmentRecord, ...]
    deltas: Deltas

    @property
    def mode(self) -> str:
        return self.plan.mode

    @property
    def sealed(self) -> bool:
        return bool(self.root)

    @property
    def tokens(self) -> int:
        return sum(step.tokens_compared for step in self.steps)

    @property
    def mismatches(self) -> int:
        return sum(step.mismatches for step in self.steps)

    @property
    def experiment(self) -> str:
        """What groups the two runs of a pair."""
        return self.plan.pair_id or self.run_id

    @property
    def peak_bytes(self) -> int | None:
        """Largest memory of all processes together, where the run recorded it."""
        found = [event.fields.get("peak_pss_bytes") for event in self.events if event.kind == "memory"]
        sizes = [size for size in found if isinstance(size, int)]
        return max(sizes, default=None)

    @property
    def started(self) -> str:
        return self.states[0].time if self.states else ""


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A folder that is not in the report: why, and the command that would change it (empty when none does)."""

    name: str
    reason: str
    command: str


@dataclasses.dataclass(frozen=True)
class Collection:
    """Everything a report shows. Runs are sorted by their first time stamp."""

    output_root: Path
    runs: tuple[RunView, ...]
    left_out: tuple[LeftOut, ...]
    matrices: tuple[MatrixRecord, ...]
    prices: Prices

    @property
    def experiments(self) -> dict[str, tuple[RunView, ...]]:
        """Runs by experiment, newest experiment first, native before consistency."""
        groups: dict[str, list[RunView]] = {}
        for run in self.runs:
            groups.setdefault(run.experiment, []).append(run)
        newest = sorted(groups, key=lambda name: max(run.started for run in groups[name]), reverse=True)
        return {name: tuple(sorted(groups[name], key=lambda run: run.mode != "native")) for name in newest}


def collect(output_root: Path, include_unsealed: bool) -> Collection:
    """Read every run below ``output_root``; what cannot be shown is listed with its reason.

    Raises:
        UserError: ``output_root`` is not a folder.
    """
    if not output_root.is_dir():
        raise UserError(
            f"no folder {printable(str(output_root))}",
            "an output root that holds runs",
            "rlk-repro run makes one; --output-root, --workspace and RLK_REPRO_OUTPUT_ROOT name another",
        )
    runs: list[RunView] = []
    left_out: list[LeftOut] = []
    matrices: list[MatrixRecord] = []
    prices: list[tuple[list[PriceRow], str]] = []
    for entry in sorted(os.scandir(output_root), key=lambda item: item.name):
        if entry.is_file(follow_symlinks=False) and entry.name.endswith(".json"):
            _beside(output_root, entry.name, matrices, prices, left_out)
        elif _is_run(output_root, entry):
            found = _read(output_root, entry.name, include_unsealed)
            runs.append(found) if isinstance(found, RunView) else left_out.append(found)
    rows = tuple(row for part, _ in prices for row in part)
    return Collection(
        output_root=output_root.resolve(),
        runs=tuple(sorted(runs, key=lambda run: (run.started, run.run_id))),
        left_out=tuple(left_out),
        matrices=tuple(matrices),
        prices=Prices(rows, tuple(dict.fromkeys(machine for _, machine in prices))),
    )


def _is_run(output_root: Path, entry: os.DirEntry[str]) -> bool:
    if entry.is_symlink():
        return entry.is_dir() and (output_root / entry.name / paths.PLAN).is_file()
    return entry.is_dir(follow_symlinks=False) and os.path.lexists(output_root / entry.name / paths.PLAN)


def _read(output_root: Path, name: str, include_unsealed: bool) -> RunView | LeftOut:
    """One run, or why it is not shown."""
    run_dir, shown = output_root / name, printable(name, 160)
    command = f"rlk-repro validate --run-dir {quoted(run_dir)} --seal"
    try:
        if run_dir.is_symlink():
            return LeftOut(shown, "a link, which may lead anywhere", "")
        paths.check_component(name, "run id")
        reader = RunReader(run_dir)
        root = ""
        if reader.sealed:
            finding = verify_seal(run_dir)[0]
            if finding.status != "PASS":
                return LeftOut(shown, f"its seal does not hold: {printable(finding.found)}", "")
            root = finding.found.rpartition("root ")[2]
        elif not include_unsealed:
            return LeftOut(shown, f"not sealed ({_state(reader)})", command)
        return _view(reader, root)
    except (UserError, OSError) as error:
        return LeftOut(shown, f"cannot be read: {printable(str(error))}", "")


def _state(reader: RunReader) -> str:
    states = reader.states()
    return states[-1].name if states else "without a state"


def _view(reader: RunReader, root: str) -> RunView:
    plan_file = reader.plan()
    plan = decode(Plan, plan_file.plan, paths.PLAN)
    if plan.mode not in ("native", "consistency"):
        raise RecordError(f"a plan of mode {plan.mode!r}", "native or consistency")
    steps = reader.steps()
    deltas = measure_deltas(reader, steps)
    findings, certifies, does_not = _judge(reader, plan_file.digest)
    events = reader.events() if (reader.run_dir / paths.EVENTS).exists() else []
    return RunView(
        run_dir=reader.run_dir,
        run_id=reader.run_id,
        plan=plan,
        plan_digest=plan_file.digest,
        root=root,
        states=tuple(reader.states()),
        steps=tuple(steps),
        events=tuple(events),
        findings=findings,
        certifies=certifies,
        does_not_certify=does_not,
        routes=tuple(reader.routes()),
        environments=tuple(reader.environments()),
        deltas=deltas,
    )


def _judge(reader: RunReader, plan_digest: str) -> tuple[tuple[Judged, ...], tuple[str, ...], tuple[str, ...]]:
    """Findings, and what they show and do not show: the gates judge the files again.

    A recorded verdict is a file that anybody can write: it is compared with what the gates find. What only a validation
    can find, such as a rescore in a fresh process, is taken over as recorded.
    """
    states = reader.states()
    if not states or states[-1].name in LIVE:
        return (), (), ()
    judgement = judge(reader)
    own = [Judged(f.name, f.status, f.found, f.expected, f.hint) for f in judgement.findings]
    does_not = judgement.does_not_certify
    validations = reader.validations()
    if not validations:
        return tuple(own), judgement.certifies, does_not
    record = validations[-1]
    if (record.run_id, record.plan_digest) != (reader.run_id, plan_digest):
        found, hint = f"one of run {printable(record.run_id, 160)}", "validate the run again"
        own.append(Judged(RECORD, "FAIL", found, f"one of {reader.run_id}", hint))
        return tuple(own), (), does_not
    names = {finding.name for finding in own} | {"seal", "root"}  # a seal is verified before a run is shown
    taken = [
        Judged(f.name, f.status, printable(f.found), f.expected, f.hint, recorded=True)
        for f in record.findings
        if f.name not in names
    ]
    verdict, here = (not any(f.status == "FAIL" for f in part) for part in (record.findings, [*own, *taken]))
    agree = record.passed == verdict == here
    words = ("valid" if record.passed else "invalid"), ("valid" if here else "invalid")
    # A gate that failed once and passes now was judged by another version, or the files changed since.
    status = "PASS" if agree else "FAIL" if record.passed else "WARN"
    own.append(
        Judged(RECORD, status, f"recorded as {words[0]}", f"{words[1]}, as judged here", "validate the run again")
    )
    if taken:
        does_not = (*does_not, "as recorded and not judged again: " + ", ".join(f"{f.name} {f.status}" for f in taken))
    shows = judgement.certifies if all(f.status != "FAIL" for f in (*own, *taken)) else ()
    return (*own, *taken), shows, does_not


def quoted(path: Path) -> str:
    """A path for a command line that is shown to a person."""
    import shlex

    return shlex.quote(printable(str(path)))


def _beside(
    root: Path,
    name: str,
    matrices: list[MatrixRecord],
    prices: list[tuple[list[PriceRow], str]],
    left_out: list[LeftOut],
) -> None:
    """A file beside the runs: a topology matrix, a benchmark, or something else, which is no one's business."""
    try:
        if name.endswith("-matrix.json"):
            matrices.append(read_matrix(root / name))
            return
        if (root / name).stat().st_size > BENCH_LIMIT:
            return
        body = parse_json(paths.read_bounded(root.resolve(), name, BENCH_LIMIT), name)
        found = read_prices(body)
        if found is not None:
            prices.append(found)
    except (UserError, OSError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if name.endswith("-matrix.json") or "bench" in name:
            left_out.append(LeftOut(printable(name, 160), f"cannot be read: {printable(str(error))}", ""))
