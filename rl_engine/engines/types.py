"""What passes between engines and the orchestrator. Arrays are numpy, so that any transport can carry them."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RetainedRow = npt.NDArray[np.int32] | npt.NDArray[np.uint8]  # sorted ids, or packed bits, whichever is smaller


@dataclasses.dataclass(frozen=True)
class Request:
    """One sample to draw; (prompt, sample) is its identity within a step."""

    prompt: int
    sample: int
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """``top_k`` -1 and ``top_p`` 1.0 skip their filter; ``stop_tokens`` end a response and belong to it."""

    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    seed: int
    stop_tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A prompt and its response. ``logprobs`` fp32 [R] are the rollout engine's; ``retained`` has one row per response
    token, or is None where every column existed. ``finish_reason`` is ``stop`` or ``length``."""

    prompt: int
    sample: int
    prompt_tokens: npt.NDArray[np.int32]
    response_tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    retained: tuple[RetainedRow, ...] | None
    weight_version: int
    engine: str
    finish_reason: str

    @property
    def length(self) -> int:
        return len(self.prompt_tokens) + len(self.response_tokens)


def canonical(samples: list[Sample]) -> list[Sample]:
    """In canonical order: (prompt, sample)."""
    return sorted(samples, key=lambda s: (s.prompt, s.sample))


def pack_retained(bits: npt.NDArray[np.uint8], vocabulary: int) -> RetainedRow:
    """A row of packed bits [ceil(V / 8)] as sorted ids int32 where they are smaller."""
    ids = np.flatnonzero(np.unpackbits(bits, count=vocabulary, bitorder="little")).astype(np.int32)
    return ids if ids.nbytes <= bits.nbytes else bits


def retained_bits(row: RetainedRow, vocabulary: int) -> npt.NDArray[np.uint8]:
    """Packed bits [ceil(V / 8)] of a retained row."""
    if row.dtype == np.uint8:
        return row
    flags = np.zeros(vocabulary, dtype=np.uint8)
    flags[row] = 1
    return np.packbits(flags, bitorder="little")


def retained_ids(row: RetainedRow, vocabulary: int) -> npt.NDArray[np.int32]:
    """Sorted ids int32 of a retained row."""
    if row.dtype == np.int32:
        return row  # type: ignore[return-value]
    return np.flatnonzero(np.unpackbits(row, count=vocabulary, bitorder="little")).astype(np.int32)


class SnapshotMismatch(RuntimeError):
    """Rows are missing, or bytes are not those that were exported."""


@dataclasses.dataclass(frozen=True, eq=False)
class TensorRows:
    """Rows [first, first + len) of an exported HF tensor: bf16 bits as uint16."""

    first: int
    bits: npt.NDArray[np.uint16]


@dataclasses.dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """What one trainer rank exports: HF name -> its rows, and their digest. A part of the weights as the engines'
    protocol has it, and a source of all of them where the rank holds all."""

    version: int
    tensors: dict[str, TensorRows]
    digests: dict[str, str]

    @property
    def held(self) -> dict[str, tuple[int, int]]:
        """HF name -> (first, last + 1) of its rows here."""
        return {name: (rows.first, rows.first + len(rows.bits)) for name, rows in self.tensors.items()}

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """bf16 rows [first, last) of an HF tensor, a copy of the caller's own.

        Raises:
            SnapshotMismatch: rows that are not here.
        """
        start, end = self.held.get(name, (0, 0))
        if not start <= first < last <= end:
            raise SnapshotMismatch(f"rows {first} to {last} of {name} where there are {start} to {end}")
        # Arrays from an object store are read-only, which torch does not know: it gets a copy, a tensor at a time.
        bits = np.array(self.tensors[name].bits[first - start : last - start], order="C")
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Logprobs fp32 [R] per sample. ``calls`` of ``selected_logp`` and their rows, ``tokens``, were counted by one
    rank; 0 from an engine that counts no calls."""

    logprobs: list[npt.NDArray[np.float32]]
    calls: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Redrawn:
    """A recorded step computed again, per sample of L tokens with R of them in the response: ``logprobs`` fp32 [R];
    ``tokens`` int32 [L], each response token as those before it and the keyed noise give it; ``retained_digests``
    uint8 [L, 32], SHA-256 of the set that it was drawn from, zeros where every column existed."""

    logprobs: list[npt.NDArray[np.float32]]
    tokens: list[npt.NDArray[np.int32]]
    retained_digests: list[npt.NDArray[np.uint8]]


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
    """The trainer's logprobs of a step, fp32 [R] per sample, and the frozen reference's where the loss has a KL term.
    ``calls`` of ``selected_logp`` and their rows, ``tokens``, were measured in one rank while the first were computed.
    """

    logprobs: list[npt.NDArray[np.float32]]
    reference: list[npt.NDArray[np.float32]] | None
    calls: int
    tokens: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class UpdateResult:
    """One update. ``entropy_mean`` in nats over loss tokens; ``ratio_mismatches`` counts tokens whose recomputed
    logprob is not the old one bit for bit (0 in an exactly on-policy first update)."""

    loss: float
    kl_mean: float
    entropy_mean: float
    clip_fraction: float
    grad_norm: float
    ratio_mismatches: int
    loss_tokens: int
    train_tokens: int
    micro_batches: int
    seconds_train: float
    seconds_optimizer: float
    changed_elements: int
    elements: int
