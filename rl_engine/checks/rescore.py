"""Steps computed again in a fresh process, compared as bits with the records: logprobs, and the draws themselves.

No engine of the run takes part, and nobody could prepare for it: which step is computed follows from the digest of all
records behind the last step. What can be computed again is a step whose weights are there (``records.kept``).
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_engine.checks.finding import Finding
from rl_engine.checks.gates.evidence import NOT_DECLARED, Asks, RunEvidence, locate
from rl_engine.config.plan import Plan
from rl_engine.numerics.bits import compare_bits
from rl_engine.records import paths
from rl_engine.records.codec import decode
from rl_engine.records.errors import UserError, printable
from rl_engine.records.kept import choose, places, records_digest
from rl_engine.records.reader import RunReader
from rl_engine.records.samples import Arrays, check_arrays, load_tensors, retained_digest
from rl_engine.records.types import SampleBatch

RESCORE, REDRAW = "rescore", "redraw"
DRAWS: Asks = (("train", "draws"), ("rollout", "draws"))
_SECONDS = 6 * 3600
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_HINT = "sources, model or machine are not those of the run; see `compare` and environment-*.json"
_DRAW_HINT = "the rollout used another seed, temperature or filter, or other weights, than the run says"
_TRAIN: dict[str, Any] = {"train_logprob": np.float32}
_DRAWS: dict[str, Any] = {"tokens": np.int32, "retained_digest": np.uint8}


@dataclasses.dataclass(frozen=True)
class _Again:
    """One step computed again: what was compared, whether draws were too (``keyed``), and what differs, in words."""

    step: int
    tokens: int = 0
    sets: int = 0
    keyed: bool = False
    problem: str = ""
    draw_problem: str = ""
    hint: str = ""


def reach(reader: RunReader) -> tuple[list[int], list[int]]:
    """(steps whose weights are there, the other steps), both ascending."""
    plan = decode(Plan, reader.plan().plan, paths.PLAN)
    steps, known = reader.sample_steps(), places(reader.run_dir, Path(plan.model_root))
    return [step for step in steps if step in known], [step for step in steps if step not in known]


def wanted_steps(reader: RunReader, rescore: str | int) -> list[int]:
    """The steps of ``--rescore``: ``chosen`` by the records' digest, ``all`` that can be had, or a number.

    Raises:
        UserError: that step's weights are not there, or no step's are.
    """
    near, far = reach(reader)
    if rescore == "all" and near:
        return near
    if rescore == "chosen" and near:
        return [near[choose(records_digest(reader.run_dir), len(near))]]
    if rescore in near:
        return [int(rescore)]
    asked = f"--rescore {rescore}" if isinstance(rescore, int) else "--rescore"
    if not near:
        raise UserError(
            f"{asked} of a run of which no weights are there", "the checkpoint of plan.json", "restore --model-root"
        )
    why = f"the weights of step {rescore} were not kept" if rescore in far else "the run has no such step"
    raise UserError(f"{asked}: {why}", f"one of the steps {_words(near)}, or all", f"--rescore {near[-1]}")


def rescore_findings(run_dir: Path | str, rescore: str | int = "chosen") -> list[Finding]:
    """The wanted steps, each computed again in a fresh process: one finding ``rescore``, and in consistency mode, where
    noise is keyed by identity, one ``redraw``. What goes wrong is a finding too."""
    try:
        reader = RunReader(run_dir)
        steps = wanted_steps(reader, rescore)
        far = reach(reader)[1]
    except UserError as error:
        return [Finding(RESCORE, "FAIL", printable(error.found), error.expected, error.hint)]
    found = _findings([_computed_again(reader, step) for step in steps], far)
    evidence = RunEvidence(reader)
    missing = evidence.undeclared(DRAWS) if evidence.plan.mode == "consistency" else []
    if missing:
        words = printable(f"{NOT_DECLARED}: {', '.join(missing)}")
        found.append(Finding(REDRAW, "WARN", words, "tokens as the plan's seed and the weights draw them", ""))
    return found


def rescore_finding(run_dir: Path | str, step: int) -> Finding:
    """The logprobs of one step, whose weights may be kept or not."""
    return _findings([_computed_again(RunReader(run_dir), step)], [])[0]


def _findings(steps: Sequence[_Again], far: list[int]) -> list[Finding]:
    numbers = [again.step for again in steps]
    which = _named(numbers)
    rest = f"; not computed again, of which no weights were kept: {_named(far)}" if far else ""
    expected = f"the recorded train logprobs of {which} from a fresh process, bit for bit"
    tokens, sets = sum(again.tokens for again in steps), sum(again.sets for again in steps)
    found = [_finding(RESCORE, steps, "problem", f"{tokens} logprobs of {which} equal", expected, rest)]
    if all(again.keyed for again in steps):
        good = f"{tokens} tokens of {which} drawn again, all equal" + (f", and {sets} retained sets" if sets else "")
        expected = f"tokens and retained sets of {which} as the plan's seed and the weights draw them"
        found.append(_finding(REDRAW, steps, "draw_problem", good, expected, ""))
    return found


def _finding(name: str, steps: Sequence[_Again], which: str, good: str, expected: str, rest: str) -> Finding:
    """One finding of several steps; the first with a problem speaks for all."""
    bad = [again for again in steps if getattr(again, which)]
    if not bad:
        return Finding(name, "PASS", f"{good}{rest}", expected, "")
    more = f" ({len(bad)} of {len(steps)} steps)" if len(steps) > 1 else ""
    hint = _DRAW_HINT if name == REDRAW else bad[0].hint
    return Finding(name, "FAIL", f"step {bad[0].step}: {getattr(bad[0], which)}{more}{rest}", expected, hint)


def _named(steps: list[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {_words(steps)}"


def _words(steps: list[int]) -> str:
    """``0, 2 to 9``: runs of three and more are drawn together."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and parts[-1][-1] == step - 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def _computed_again(reader: RunReader, step: int) -> _Again:
    command = ""
    try:
        batch = reader.samples(step)
        evidence = RunEvidence(reader)
        keyed = evidence.plan.mode == "consistency" and not evidence.undeclared(DRAWS)
        arrays, problem, command = _child(reader, step, keyed)
        if problem:
            return _Again(step, problem=problem, hint=command)
        check_arrays(arrays, _TRAIN | (_DRAWS if keyed else {}), RESCORE)
        tokens = batch.tokens.size
        if keyed and (arrays["tokens"].shape, arrays["retained_digest"].shape) != ((tokens,), (tokens, 32)):
            return _Again(step, problem="arrays of another shape", hint=command)
    except (UserError, OSError, subprocess.TimeoutExpired) as error:
        hint = command or "run `validate` without --rescore first"
        return _Again(step, problem=printable(str(error)[:300]), hint=hint)
    return _Again(
        step=step,
        tokens=int(np.count_nonzero(batch.loss_mask)),
        sets=int(np.count_nonzero(arrays["retained_digest"].any(axis=1))) if keyed else 0,
        keyed=keyed,
        problem=_logprob_problem(batch, arrays["train_logprob"]),
        draw_problem=_draw_problem(batch, arrays) if keyed else "",
        hint=_HINT,
    )


def _child(reader: RunReader, step: int, keyed: bool) -> tuple[Arrays, str, str]:
    """(what the child computed, what went wrong, its command line).

    The child is this interpreter with this package, never a path out of the run directory; ``-P`` keeps modules in the
    working directory (which may be a stranger's run) out of its reach.
    """
    with tempfile.TemporaryDirectory(prefix="rlk-rescore-") as folder:
        out = Path(folder) / "rescore.safetensors"
        command = [sys.executable, "-P", "-m", "rl_engine.engines.train.rescore", "--run-dir", str(reader.run_dir)]
        command += [*(["--draws"] if keyed else []), "--step", str(step), "--out", str(out)]
        # Relative entries would lead into the working directory again.
        inherited = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_PACKAGE_ROOT), *inherited])}
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            env=environment,
        )
        shown = " ".join(command[:-2])
        if done.returncode != 0:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return {}, f"exit {done.returncode}: {lines[-1][:300] if lines else 'no message'}", shown
        data = paths.read_bounded(out.parent, out.name, paths.TENSOR_LIMIT)
    return load_tensors(data, RESCORE), "", shown


def _logprob_problem(batch: SampleBatch, computed: npt.NDArray[Any]) -> str:
    result = compare_bits(computed, batch.train_logprob)
    if result.equal:
        return ""
    return result.reason + (f" ({locate(batch, result.first_index[0])})" if result.first_index else "")


def _draw_problem(batch: SampleBatch, computed: Arrays) -> str:
    """What token ids and retained sets, as the keyed noise gives them, have against the recorded ones."""
    response, parts = batch.loss_mask == 1, []
    count = int(np.count_nonzero(response))
    tokens = np.flatnonzero(response & (computed["tokens"] != batch.tokens))
    if tokens.size:
        first = int(tokens[0])
        drawn = f"recorded {batch.tokens[first]}, drawn {computed['tokens'][first]}"
        parts.append(f"{tokens.size} of {count} tokens are not the drawn ones, first {locate(batch, first)}: {drawn}")
    sets = np.flatnonzero(response & (computed["retained_digest"] != _set_digests(batch)).any(axis=1))
    if sets.size:
        parts.append(f"{sets.size} of {count} retained sets differ, first {locate(batch, int(sets[0]))}")
    return "; ".join(parts)


def _set_digests(batch: SampleBatch) -> npt.NDArray[np.uint8]:
    """SHA-256 of each token's recorded retained set, uint8 [T, 32]; zeros where there is none."""
    digests = np.zeros((batch.tokens.size, 32), dtype=np.uint8)
    if batch.retained is None:
        return digests
    offsets = batch.retained.offsets
    for token in np.flatnonzero(np.diff(offsets)).tolist():
        row = batch.retained.ids[offsets[token] : offsets[token + 1]]
        digests[token] = np.frombuffer(retained_digest(row), dtype=np.uint8)
    return digests
