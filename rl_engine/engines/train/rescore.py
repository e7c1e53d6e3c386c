"""Computes a recorded step again in a fresh process: the trainer's logprobs and, with ``--draws``, the retained sets
and the tokens. No Ray, one process, weights from files.

``python -m rl_engine.engines.train.rescore --run-dir DIR --step N --out FILE`` writes safetensors, in the order of the
step's tokens: ``train_logprob`` fp32 [T]; with ``--draws`` also ``tokens`` int32 [T], each response token as the
recorded ones before it and the keyed noise give it, and ``retained_digest`` uint8 [T, 32], SHA-256 of the set that it
was drawn from, zeros where every column existed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from rl_engine.config.plan import Plan
from rl_engine.engines.evidence import sample_batch, samples_of
from rl_engine.engines.kept import read_kept
from rl_engine.engines.protocol import TrainEngine, VersionMismatch
from rl_engine.engines.registry import train_class
from rl_engine.engines.setup import model_config
from rl_engine.engines.train.state import StateMismatch
from rl_engine.engines.types import SnapshotMismatch
from rl_engine.records.codec import RecordError, decode
from rl_engine.records.errors import UserError
from rl_engine.records.kept import WeightsPlace, places
from rl_engine.records.reader import RunReader
from rl_engine.records.types import Side

Arrays = dict[str, npt.NDArray[np.generic]]


@dataclasses.dataclass(frozen=True)
class Alone:
    """What an engine is told that is opened in this process alone; see :class:`rl_engine.engines.protocol.Host`."""

    plan: Plan
    side: Side = "train"
    engine: str = "train"
    number: int = 0
    process: int = 0
    processes: int = 1
    store: str = ""

    def prove(self) -> str | None:
        return None


def rescore(run_dir: Path, step: int, draws: bool) -> Arrays:
    """The arrays of the step; see the module.

    Raises:
        UserError: the step's weights are kept nowhere, or what is kept is not what the run recorded.
    """
    reader = RunReader(run_dir)
    plan = decode(Plan, reader.plan().plan, "plan.json")
    batch = reader.samples(step)
    known = places(reader.run_dir, Path(plan.model_root))
    if step not in known:
        raise UserError(f"step {step}", f"a step whose weights are kept: {', '.join(map(str, sorted(known)))}", "")
    engine = train_class(plan).open(Alone(plan))
    config = model_config(plan)
    _load(engine, known[step], config.tensor_shapes())
    _check(engine, reader, step, known[step])
    samples = samples_of(batch)
    drawn: Arrays = {}
    if draws:
        again = engine.redraw(samples, step)
        logprobs = again.logprobs
        drawn = {"tokens": np.concatenate(again.tokens), "retained_digest": np.concatenate(again.retained_digests)}
    else:
        logprobs = engine.score(samples).logprobs
    return {"train_logprob": sample_batch(samples, logprobs, batch.samples, config.vocabulary).train_logprob, **drawn}


def _load(engine: TrainEngine, place: WeightsPlace, shapes: dict[str, tuple[int, ...]]) -> None:
    try:
        if place.kind == "state":
            engine.load(place.path)
        elif place.kind == "kept":
            engine.load_weights(read_kept(place.path, shapes))
    except (StateMismatch, SnapshotMismatch, OSError) as error:
        raise UserError(f"{place.path}: {error}", "the weights of the run's step", "restore the file") from error


def _check(engine: TrainEngine, reader: RunReader, step: int, place: WeightsPlace) -> None:
    recorded = reader.weights_version(step).tensors
    try:
        found = engine.export(step).digests
    except VersionMismatch as error:
        raise UserError(f"{place.path}: {error}", f"the weights of step {step}", "restore the file") from error
    different = sorted(name for name in set(found) | set(recorded) if found.get(name) != recorded.get(name))
    if different:
        raise UserError(
            f"{place.path}: {different[0]} is not the tensor that step {step} was drawn and scored with",
            f"the weights that weights/{step}.json describes",
            "restore them",
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rescore", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--draws", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    try:
        arrays = rescore(arguments.run_dir, arguments.step, arguments.draws)
    except (UserError, RecordError) as error:
        print(f"rlk-repro: {error}", file=sys.stderr)
        return 2
    save_file(arrays, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
