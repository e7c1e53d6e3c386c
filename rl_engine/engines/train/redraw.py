"""A recorded step drawn again by the trainer: its hidden rows, the plan's sampling and the keyed noise give each token
and the set that it was drawn from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_engine.config.plan import SamplingPlan
from rl_engine.engines.train.builtin import TrainEngine
from rl_engine.engines.types import Redrawn, Sample
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.sample.retained import retained_mask
from rl_engine.ops.selected_logp import inverse_temperature
from rl_engine.records.samples import retained_digest

ROWS = 256  # whose logits are alive at once


def redraw(engine: TrainEngine, samples: list[Sample], sampling: SamplingPlan, step: int) -> Redrawn:
    """The trainer's logprobs, and what ``sampling`` draws from the same hidden rows; one forward pass a micro-batch."""
    scored: dict[int, npt.NDArray[np.float32]] = {}
    tokens = [np.concatenate([s.prompt_tokens, s.response_tokens]).astype(np.int32) for s in samples]
    digests = [np.zeros((s.length, 32), dtype=np.uint8) for s in samples]
    with torch.no_grad():
        for batch, hidden, logprobs in engine.scoring_passes(samples):
            rows = batch.rows.to(hidden.device).split(batch.counts)
            for index, own, values in zip(batch.indices, rows, logprobs.split(batch.counts), strict=True):
                scored[index] = values.cpu().numpy().copy()
                place = len(samples[index].prompt_tokens)
                for part in own.split(ROWS):
                    drawn, sets = _draw(engine, hidden[part], samples[index], place, sampling, step)
                    tokens[index][place : place + len(part)] = drawn
                    digests[index][place : place + len(part)] = sets
                    place += len(part)
    return Redrawn([scored[index] for index in range(len(samples))], tokens, digests)


def _draw(
    engine: TrainEngine, hidden: Tensor, sample: Sample, position: int, sampling: SamplingPlan, step: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """(tokens from ``position`` on, digests [R, 32] of their retained sets or zeros) from hidden bf16 [R, H]."""
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
