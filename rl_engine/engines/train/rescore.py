"""Computes a recorded step again in a fresh process: the trainer's logprobs and, where noise is keyed by identity, the
retained sets and the tokens. No Ray, one rank, weights from files.

``python -m rl_engine.engines.train.rescore --run-dir DIR --step N --out FILE`` writes safetensors, in the order of the
step's tokens: ``train_logprob`` fp32 [T]; in consistency mode also ``tokens`` int32 [T], each response token as the
recorded ones before it and the keyed noise give it, and ``retained_digest`` uint8 [T, 32], SHA-256 of the set that it
was drawn from, zeros where every column existed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from torch import Tensor

from rl_engine.config.plan import Plan
from rl_engine.engines.evidence import sample_batch, samples_of
from rl_engine.engines.kept import load_kept
from rl_engine.engines.setup import train_engine, use_threads
from rl_engine.engines.snapshot import SnapshotMismatch, own_digests
from rl_engine.engines.train.builtin import Logprobs, TrainEngine
from rl_engine.engines.train.state import StateMismatch, load_state
from rl_engine.engines.types import Sample
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.sample.retained import retained_mask
from rl_engine.ops.selected_logp import inverse_temperature
from rl_engine.records.codec import RecordError, decode
from rl_engine.records.errors import UserError
from rl_engine.records.kept import WeightsPlace, places
from rl_engine.records.reader import RunReader
from rl_engine.records.samples import retained_digest

Arrays = dict[str, npt.NDArray[np.generic]]
ROWS = 256  # whose logits are alive at once


def rescore(run_dir: Path, step: int) -> Arrays:
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
    use_threads(plan)
    engine = train_engine(plan)
    _load(engine, known[step])
    _check(engine, reader, step, known[step])
    samples = samples_of(batch)
    scored, draws = recompute(engine, samples, plan, step)
    vocabulary = engine.weights.config.vocabulary
    return {"train_logprob": sample_batch(samples, scored, batch.samples, vocabulary).train_logprob, **draws}


def _load(engine: TrainEngine, place: WeightsPlace) -> None:
    try:
        if place.kind == "state":
            load_state(engine, place.path)
        elif place.kind == "kept":
            load_kept(engine.weights, place.path)
    except (StateMismatch, SnapshotMismatch, OSError) as error:
        raise UserError(f"{place.path}: {error}", "the weights of the run's step", "restore the file") from error


def _check(engine: TrainEngine, reader: RunReader, step: int, place: WeightsPlace) -> None:
    recorded = reader.weights_version(step).tensors
    found = own_digests(engine.weights)
    different = sorted(name for name in set(found) | set(recorded) if found.get(name) != recorded.get(name))
    if different:
        raise UserError(
            f"{place.path}: {different[0]} is not the tensor that step {step} was drawn and scored with",
            f"the weights that weights/{step}.json describes",
            "restore them",
        )


def recompute(engine: TrainEngine, samples: list[Sample], plan: Plan, step: int) -> tuple[Logprobs, Arrays]:
    """(the trainer's logprobs fp32 [R] per sample, in consistency mode ``tokens`` and ``retained_digest`` of all)."""
    scored: dict[int, npt.NDArray[np.float32]] = {}
    tokens = [np.concatenate([s.prompt_tokens, s.response_tokens]).astype(np.int32) for s in samples]
    digests = [np.zeros((s.length, 32), dtype=np.uint8) for s in samples]
    with torch.no_grad():
        for batch, hidden, logprobs in engine.scoring_passes(samples):
            rows = batch.rows.to(hidden.device).split(batch.counts)
            for index, own, values in zip(batch.indices, rows, logprobs.split(batch.counts), strict=True):
                scored[index] = values.cpu().numpy().copy()
                if plan.mode != "consistency":
                    continue
                place = len(samples[index].prompt_tokens)
                for part in own.split(ROWS):
                    drawn, sets = _draw(engine, hidden[part], samples[index], place, plan, step)
                    tokens[index][place : place + len(part)] = drawn
                    digests[index][place : place + len(part)] = sets
                    place += len(part)
    draws = {"tokens": np.concatenate(tokens), "retained_digest": np.concatenate(digests)}
    return [scored[index] for index in range(len(samples))], draws if plan.mode == "consistency" else {}


def _draw(
    engine: TrainEngine, hidden: Tensor, sample: Sample, position: int, plan: Plan, step: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """(tokens from ``position`` on, digests [R, 32] of their retained sets or zeros) from hidden bf16 [R, H]."""
    sampling = plan.sampling
    z, inv_t = engine.ops.logits(hidden, engine.weights.head), inverse_temperature(sampling.temperature)
    mask = retained_mask(z, inv_t, sampling.top_k, sampling.top_p)
    keys = [
        DrawKey(sampling.rollout_seed, step, sample.prompt, sample.sample, position + row) for row in range(len(hidden))
    ]
    drawn = engine.ops.draw(z, inv_t, mask, keys).cpu().numpy().astype(np.int32)
    if mask is None:
        return drawn, np.zeros((len(hidden), 32), dtype=np.uint8)
    kept = np.unpackbits(mask.cpu().numpy(), axis=1, count=z.shape[1], bitorder="little")
    sets = [retained_digest(np.flatnonzero(row).astype(np.int32)) for row in kept]
    return drawn, np.frombuffer(b"".join(sets), dtype=np.uint8).reshape(-1, 32)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rescore", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    try:
        arrays = rescore(arguments.run_dir, arguments.step)
    except (UserError, RecordError) as error:
        print(f"rlk-repro: {error}", file=sys.stderr)
        return 2
    save_file(arrays, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
