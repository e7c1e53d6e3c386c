"""The first divergence, down to the operator and element.

Within a run the rollout engine is compared with the trainer, between two runs the same side of both. Step, sample and
token come from the records; layer, operator and element from computing step 0 again in a fresh process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from rl_engine.checks.compare import compare_runs
from rl_engine.numerics.bits import hex_bits, int_view
from rl_engine.records.codec import RecordError, printable
from rl_engine.records.errors import UserError
from rl_engine.records.reader import RunReader
from rl_engine.records.types import SampleBatch

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 6 * 3600


@dataclasses.dataclass(frozen=True)
class Token:
    """Where two columns of logprobs part first. ``position`` counts from the first token, ``response`` from the
    first response token; ``a`` and ``b`` are the fp32 bits in hex."""

    step: int
    sample: int
    prompt_index: int
    sample_index: int
    position: int
    response: int
    token: int
    a: str
    b: str
    differing: int
    compared: int


def first_mismatch(reader: RunReader) -> Token | None:
    """The first response token whose rollout and train logprobs differ in bits; None where all are equal."""
    for step in reader.sample_steps():
        batch = reader.samples(step)
        found = _first(step, batch, batch.rollout_logprob, batch.train_logprob)
        if found is not None:
            return found
    return None


def _first(step: int, batch: SampleBatch, a: Any, b: Any) -> Token | None:
    masked = batch.loss_mask.astype(bool)
    different = np.flatnonzero((int_view(a) != int_view(b)) & masked)
    if not different.size:
        return None
    place = int(different[0])
    sample = int(np.searchsorted(batch.offsets, place, side="right")) - 1
    start = int(batch.offsets[sample])
    record = batch.samples[sample]
    return Token(
        step=step,
        sample=sample,
        prompt_index=record.prompt_index,
        sample_index=record.sample_index,
        position=place - start,
        response=int(batch.loss_mask[start:place].sum(dtype=np.int64)),
        token=int(batch.tokens[place]),
        a=hex_bits(int_view(a)[place], 4),
        b=hex_bits(int_view(b)[place], 4),
        differing=int(different.size),
        compared=int(masked.sum()),
    )


def between(a: RunReader, b: RunReader) -> tuple[str, Token] | None:
    """(side, token) where two runs with equal tokens part in a logprob; None where they do not, or in tokens first."""
    for step in sorted(set(a.sample_steps()) & set(b.sample_steps())):
        left, right = a.samples(step), b.samples(step)
        if not (np.array_equal(left.tokens, right.tokens) and np.array_equal(left.offsets, right.offsets)):
            return None
        for side in ("rollout", "train"):
            x, y = (getattr(batch, f"{side}_logprob") for batch in (left, right))
            found = _first(step, left, x, y)
            if found is not None:
                return side, found
    return None


def recompute(a: str, b: str, token: Token) -> dict[str, Any]:
    """What the watching process found for ``RUN:SIDE`` twice.

    Raises:
        UserError: the run cannot be computed again here; the line says why.
    """
    with tempfile.TemporaryDirectory(prefix="rlk-locate-") as folder:
        out = pathlib.Path(folder) / "found.json"
        command = [sys.executable, "-P", "-m", "rl_engine.engines.locate", "--a", a, "--b", b]
        command += ["--sample", str(token.sample), "--limit", str(token.position - 1), "--out", str(out)]
        inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *inherited])}
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"no answer within {SECONDS} s", "step 0 computed again", "--records-only") from None
        if done.returncode != 0:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            last = printable(lines[-1] if lines else "no message")
            raise UserError(f"a step that cannot be computed again ({last})", "the run's machine", "--records-only")
        return dict(json.loads(out.read_text()))


def run(options: argparse.Namespace) -> int:
    """Find it and print it; 0 where nothing differs, 1 where something does.

    Raises:
        UserError: no run directory, or one that cannot be read or computed again.
    """
    try:
        first = RunReader(options.run)
        if options.other is None:
            found = first_mismatch(first)
            sides, runs = ("rollout", "train"), (str(first.run_dir), str(first.run_dir))
        else:
            second = RunReader(options.other)
            pair = between(first, second)
            if pair is None:
                return _records(first, second, options.json)
            found, sides = pair[1], (pair[0], pair[0])
            runs = (str(first.run_dir), str(second.run_dir))
    except RecordError as error:
        raise UserError(str(error.found), str(error.expected), "rlk-repro validate judges the run") from None
    if found is None:
        return _nothing(options.json)
    deeper: dict[str, Any] | None = None
    why = "--records-only" if options.records_only else ""
    if found.step != 0:
        why = f"the weights of step {found.step} lived in memory only"
    if not why:
        names = [f"{folder}:{side}" for folder, side in zip(runs, sides, strict=True)]
        deeper = recompute(names[0], names[1], found)
    _print(found, sides, options.other is not None, deeper, why, options.json)
    return 1


def _nothing(json_output: bool) -> int:
    print(
        json.dumps({"token": None, "operator": None}) if json_output else "no divergence: every logprob has equal bits"
    )
    return 0


def _records(a: RunReader, b: RunReader, json_output: bool) -> int:
    """Two runs whose logprobs do not part on equal tokens: the first difference that the records show, or none."""
    results = compare_runs(a.run_dir, b.run_dir).results
    if not results:
        return _nothing(json_output)
    first = results[0]
    if json_output:
        print(json.dumps({"token": None, "operator": None, "records": dataclasses.asdict(first)}, indent=1))
    else:
        print(f"first difference: {first.quantity} at {first.where}: A {first.a}, B {first.b}")
        print("layer and operator: not looked for, since the tokens themselves part")
    return 1


def _print(
    token: Token, sides: tuple[str, str], two: bool, deeper: dict[str, Any] | None, why: str, json_output: bool
) -> None:
    operator = deeper["first"] if deeper else None
    repeats = _repeats(token, deeper)
    if json_output:
        body = {"token": dataclasses.asdict(token), "operator": operator, "repeats_recorded_bits": repeats}
        print(json.dumps({**body, "not_recomputed": why or None}, indent=1))
        return
    names = (f"A {sides[0]}", f"B {sides[1]}") if two else sides
    print(
        f"token: step {token.step}, sample {token.sample} (prompt {token.prompt_index}, sample {token.sample_index}), "
        f"response token {token.response} (position {token.position}), id {token.token}: "
        f"{names[0]} {token.a}, {names[1]} {token.b}; {token.differing} of {token.compared} in this step"
    )
    if deeper is None:
        print(f"layer, operator, element: not looked for: {why}")
        return
    if not repeats:
        print("note: computing it again did not give the recorded bits, so what follows is of this machine, today")
    if operator is None:
        print(f"operator: lm_head or selected_logp: the {deeper['operators']} operators before them agree in every bit")
        return
    layer = f"layer {operator['layer']}" if operator["layer"] >= 0 else "outside the layers"
    weight = f" ({operator['weight']})" if operator["weight"] else ""
    print(
        f"operator: {layer}, {operator['operator']}{weight}, call {operator['number'] + 1} of {deeper['operators']}: "
        f"{names[0]} by {operator['provider_a']}, {names[1]} by {operator['provider_b']}"
    )
    print(
        f"element: position {operator['position']}, element {operator['element']} ({operator['dtype']}): "
        f"{operator['a']} against {operator['b']}; {operator['elements']} of {operator['of_elements']} elements differ "
        f"there, and {operator['positions']} of {operator['of_positions']} positions"
    )
    print("every operator before it agrees in every bit at every position")


def _repeats(token: Token, deeper: dict[str, Any] | None) -> bool | None:
    """Whether both logprobs came out as recorded; None where nothing was computed."""
    if deeper is None:
        return None
    place = str(token.position - 1)
    wanted = [int(text, 16) for text in (token.a, token.b)]
    return [deeper[side].get(place) for side in ("a", "b")] == wanted
