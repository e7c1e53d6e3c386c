"""The verdict of a paired experiment, computed from the two run directories' files."""

from __future__ import annotations

import json
from pathlib import Path

from rl_engine.records import paths
from rl_engine.records.codec import RecordError, decode, encode, parse_json
from rl_engine.records.files import write_atomic
from rl_engine.records.reader import RunReader
from rl_engine.records.statistics import logprob_statistics, merge_statistics
from rl_engine.records.types import PairRecord, PairSide


def pair_record(pair_id: str, native_dir: Path, consistency_dir: Path) -> PairRecord:
    """Recompute both sides' statistics from their samples; nothing is taken from ``steps.jsonl`` but the step count.

    Raises:
        RecordError: a damaged run, or directories whose plans are not of the two modes.
    """
    paths.check_component(pair_id, "run id")
    native, consistency = RunReader(native_dir), RunReader(consistency_dir)
    native_side, consistency_side = _side(native, "native"), _side(consistency, "consistency")
    first_native, first_consistency = native.weights().get(0), consistency.weights().get(0)
    return PairRecord(
        pair_id=pair_id,
        native=native_side,
        consistency=consistency_side,
        same_start=first_native is not None and first_native == first_consistency,
        exact=consistency_side.tokens_compared > 0 and consistency_side.mismatches == 0,
        control=native_side.mismatches > 0,
    )


def pair_path(output_root: Path, pair_id: str) -> Path:
    """``<output-root>/<id>-pair.json``."""
    return output_root / f"{paths.check_component(pair_id, 'run id')}-pair.json"


def write_pair(output_root: Path, record: PairRecord) -> Path:
    """Write the pair file beside its runs and return its path."""
    path = pair_path(output_root, record.pair_id)
    write_atomic(path, (json.dumps(encode(record), sort_keys=True, indent=1, allow_nan=False) + "\n").encode())
    return path


def read_pair(path: Path) -> PairRecord:
    """Read a pair file strictly."""
    data = paths.read_bounded(path.parent.resolve(), path.name, paths.JSON_LIMIT)
    return decode(PairRecord, parse_json(data, path.name), path.name)


def _side(reader: RunReader, mode: str) -> PairSide:
    plan = reader.plan()
    if plan.plan.get("mode") != mode:
        raise RecordError(f"{reader.run_id}: a plan of mode {str(plan.plan.get('mode'))[:40]!r}", mode)
    steps = reader.steps()
    total = merge_statistics(logprob_statistics(reader.samples(step.step)) for step in steps)
    return PairSide(
        run_id=reader.run_id,
        mode=mode,
        plan_digest=plan.digest,
        steps=len(steps),
        tokens_compared=total.tokens_compared,
        mismatches=total.mismatches,
        max_abs_dlogp=total.max_abs_dlogp,
        mean_abs_dlogp=total.mean_abs_dlogp,
    )
