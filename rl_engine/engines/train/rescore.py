"""Recomputes the trainer's logprobs of a recorded step in a fresh process: no Ray, one rank, weights from the
checkpoint.

``python -m rl_engine.engines.train.rescore --run-dir DIR --step N --out FILE`` writes ``train_logprob`` fp32 [T], in
the order of the step's tokens, as safetensors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from rl_engine.config.plan import Plan
from rl_engine.engines.evidence import sample_batch, samples_of
from rl_engine.engines.setup import train_engine, use_threads
from rl_engine.engines.snapshot import own_digests
from rl_engine.records.codec import RecordError, decode
from rl_engine.records.errors import UserError
from rl_engine.records.reader import RunReader


def rescore(run_dir: Path, step: int) -> np.ndarray:
    """fp32 [T] of the step's tokens, +0 on prompt tokens.

    Raises:
        UserError: another step than 0 (later weights live in memory only), or a checkpoint that is not the run's.
    """
    reader = RunReader(run_dir)
    plan = decode(Plan, reader.plan().plan, "plan.json")
    batch = reader.samples(step)
    if step != 0:
        raise UserError(f"--step {step}", "step 0: later weights exist in memory only", "rescore step 0")
    use_threads(plan)
    engine = train_engine(plan)
    recorded = reader.weights_version(0).tensors
    found = own_digests(engine.weights)
    different = sorted(name for name in set(found) | set(recorded) if found.get(name) != recorded.get(name))
    if different:
        raise UserError(
            f"{plan.model_root}: {different[0]} is not the tensor the run started from",
            "the run's starting checkpoint",
            "restore the checkpoint that weights/0.json describes",
        )
    samples = samples_of(batch)
    scored = engine.score(samples)
    return sample_batch(samples, scored, batch.samples, engine.weights.config.vocabulary).train_logprob


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rescore", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    try:
        values = rescore(arguments.run_dir, arguments.step)
    except (UserError, RecordError) as error:
        print(f"rlk-repro: {error}", file=sys.stderr)
        return 2
    save_file({"train_logprob": values}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
