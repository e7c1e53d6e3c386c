"""The log that every detector reads: flat token columns, one row per sample, facts of the whole log.

Shape legend: S samples, N tokens of all samples joined. Sample ``i`` is ``tokens[offsets[i]:offsets[i + 1]]``.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from rl_engine.records.errors import UserError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class SampleColumns:
    """What is known of each sample; every array is [S], None where the log does not say.

    Attributes:
        prompt_length: tokens before the response.
        temperature, top_p, top_k: sampling settings (top_k below 1: no filter).
        weight_version: version that sampled; train_version: version that scored.
        engine, rank: worker codes into ``engine_names`` / ``rank_names``.
        time: seconds; cached_tokens: prompt tokens served from the prefix cache; batch_size: sequences in flight.
        step: optimizer step; advantage: one per sample; loss: the step's recorded policy loss, repeated.
        stopped: the sample ended by itself (not at the length limit).
    """

    prompt_length: Ints | None = None
    temperature: Floats | None = None
    top_p: Floats | None = None
    top_k: Ints | None = None
    weight_version: Ints | None = None
    train_version: Ints | None = None
    engine: Ints | None = None
    rank: Ints | None = None
    time: npt.NDArray[np.float64] | None = None
    cached_tokens: Ints | None = None
    batch_size: Ints | None = None
    step: Ints | None = None
    advantage: Floats | None = None
    loss: npt.NDArray[np.float64] | None = None
    stopped: Bools | None = None
    engine_names: tuple[str, ...] = ()
    rank_names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class LogFacts:
    """Facts of the whole log; None or empty where it does not say.

    ``loss_agg`` is one of ``token-mean``, ``seq-mean-token-mean``, ``seq-mean-token-sum``; ``loss_denominator`` a
    number that overrides it. ``dtype`` is the engines' compute type (``bf16``, ``fp16``, ``fp32``).
    """

    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    chunk_size: int | None = None
    page_size: int | None = None
    split_size: int | None = None
    eos_token_id: int | None = None
    loss_agg: str | None = None
    loss_denominator: float | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TokenLog:
    """One log. Token columns are [N]: tokens int32, mask bool (True: the token is in the loss), logprobs fp32 in nats.

    ``base_position`` int64 [S] is the absolute position of each sample's first logged token (0 when the prompt is in
    the arrays). ``train_tokens``, ``ref_logprob`` and ``entropy`` are optional token columns.
    """

    offsets: Ints
    mask: Bools
    rollout: Floats
    train: Floats
    base_position: Ints
    tokens: npt.NDArray[np.int32] | None = None
    train_tokens: npt.NDArray[np.int32] | None = None
    ref_logprob: Floats | None = None
    entropy: Floats | None = None
    samples: SampleColumns = dataclasses.field(default_factory=SampleColumns)
    facts: LogFacts = dataclasses.field(default_factory=LogFacts)
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def sample_count(self) -> int:
        return len(self.offsets) - 1

    @property
    def token_count(self) -> int:
        return len(self.rollout)

    def __post_init__(self) -> None:
        count = self.token_count
        for name in ("mask", "train", "tokens", "train_tokens", "ref_logprob", "entropy"):
            column = getattr(self, name)
            if column is not None and len(column) != count:
                raise UserError(
                    f"{len(column)} values in {name} beside {count} rollout logprobs",
                    "one value per token in every token column",
                    "look for a column that covers the response only",
                )
        if int(self.offsets[-1]) != count:
            raise UserError(
                f"offsets that end at {int(self.offsets[-1])}", f"{count} tokens", "check the log's lengths"
            )
        for field in dataclasses.fields(self.samples):
            column = getattr(self.samples, field.name)
            if isinstance(column, np.ndarray) and len(column) != self.sample_count:
                raise UserError(
                    f"{len(column)} values in {field.name}", f"{self.sample_count} samples", "one value per sample"
                )

    def select(self, keep: Bools) -> TokenLog:
        """The log of the samples where ``keep`` bool [S] is True."""
        lengths = np.diff(self.offsets)
        token_keep = np.repeat(keep, lengths)
        samples = {
            field.name: column[keep] if isinstance(column, np.ndarray) else column
            for field in dataclasses.fields(self.samples)
            for column in (getattr(self.samples, field.name),)
        }
        tokens = {
            name: None if column is None else column[token_keep]
            for name in ("mask", "rollout", "train", "tokens", "train_tokens", "ref_logprob", "entropy")
            for column in (getattr(self, name),)
        }
        return dataclasses.replace(
            self,
            offsets=np.concatenate([[0], np.cumsum(lengths[keep])]).astype(np.int64),
            base_position=self.base_position[keep],
            samples=SampleColumns(**samples),
            **tokens,
        )
