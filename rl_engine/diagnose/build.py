"""Joins rows of any format into one :class:`TokenLog`, with bounded memory and messages that name the row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from rl_engine.diagnose.fields import LOG_FIELDS, RESPONSE_LENGTH, SAMPLE_FIELDS, TOKEN_FIELDS, Format
from rl_engine.diagnose.log import LogFacts, SampleColumns, TokenLog
from rl_engine.records.errors import UserError

Vector = npt.NDArray[np.float64]
_INTEGER_SAMPLES = ("prompt_length", "top_k", "weight_version", "train_version", "cached_tokens", "batch_size", "step")
_FLOAT_SAMPLES = ("temperature", "top_p", "advantage", "time", "loss")
# Greedy sampling (temperature 0) has no distribution to compare; float columns must fit fp32.
_RANGES = {"temperature": (1e-4, 1e4), "top_p": (1e-6, 1.0), "advantage": (-1e30, 1e30), "prompt_length": (0, 1e9)}
_OPTIONAL_TOKENS = ("tokens", "train_tokens", "ref_logprobs", "entropy")


def _vector(value: object, where: str) -> Vector:
    """A flat fp64 vector; null becomes NaN (the rollout had no logprob there)."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]  # a batch of one
    try:
        vector = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        vector = np.zeros((0, 0))
    if vector.ndim != 1:
        raise UserError(f"{where} that is no flat list of numbers", "one number per token", "one sample per row")
    return vector


def _scalar(value: object, where: str) -> float:
    """A number; of a list the last one (a version per turn, an advantage per token)."""
    while isinstance(value, list | np.ndarray):
        if not len(value):
            return math.nan
        value = value[-1]
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float | np.generic):
        return float(value)
    if isinstance(value, str):
        digits = value.lstrip("vV")
        try:
            return float(digits)
        except ValueError:
            pass
    raise UserError(f"{where} = {str(value)[:40]!r}", "a number", "correct the value or drop the column")


def _whole(value: object, where: str) -> int:
    """A count of tokens."""
    number = _scalar(value, where)
    if not math.isfinite(number) or not 0 <= number <= 1e9:
        raise UserError(f"{where} = {number:g}", "a whole number of tokens", "correct the value or drop the column")
    return int(number)


def _single(values: Vector) -> npt.NDArray[np.float32]:
    """fp32, with infinities where fp64 does not fit (they are reported as such)."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _ids(values: Vector, where: str) -> npt.NDArray[np.int32]:
    """Token ids; -1 and the like mark padding and are kept."""
    if len(values) and not (np.isfinite(values).all() and np.abs(values).max() < 2**31):
        raise UserError(f"{where} with a value that is no token id", "whole numbers below 2**31", "check that column")
    return values.astype(np.int32)


@dataclasses.dataclass
class _Row:
    """One sample, aligned: every vector has the length of ``rollout``."""

    rollout: Vector
    train: Vector
    mask: npt.NDArray[np.bool_]
    base: int
    optional: dict[str, Vector]
    prompt_length: int | None


class LogBuilder:
    """Collects rows; ``finish`` joins them. Unknown keys are counted and named in the log's notes."""

    def __init__(self, form: Format, source: str, settings: Mapping[str, object] | None = None) -> None:
        self.form, self.source = form, source
        self.settings: dict[str, object] = dict(settings or {})
        self.names = {key: name for name, keys in reversed(form.names.items()) for key in reversed(keys)}
        self.unknown: dict[str, int] = {}
        self.lengths: list[int] = []
        self.bases: list[int] = []
        self.columns: dict[str, list[npt.NDArray[np.generic]]] = {"rollout": [], "train": [], "mask": []}
        self.optional: dict[str, list[npt.NDArray[np.generic] | None]] = {name: [] for name in _OPTIONAL_TOKENS}
        self.samples: dict[str, list[float]] = {name: [] for name in (*_INTEGER_SAMPLES, *_FLOAT_SAMPLES)}
        self.workers: dict[str, list[str | None]] = {"engine": [], "rank": []}
        self.stopped: list[float] = []
        self.notes: list[str] = []

    def _fields(self, row: Mapping[str, object]) -> dict[str, object]:
        """Canonical field -> value; the first source key that is present wins."""
        out: dict[str, object] = {}
        for name, keys in self.form.names.items():
            for key in keys:
                if row.get(key) is not None:
                    out[name] = row[key]
                    break
        for key, value in row.items():
            if key in LOG_FIELDS and value is not None:
                self.settings.setdefault(key, value)
            elif key not in self.names and key not in RESPONSE_LENGTH and key not in _IGNORED:
                self.unknown[key] = self.unknown.get(key, 0) + 1
        return out

    def add(self, row: Mapping[str, object], where: str) -> None:
        """Add one sample. ``where`` names the row in messages."""
        fields = self._fields(row)
        for side in ("rollout_logprobs", "train_logprobs"):
            if side not in fields:
                keys = " or ".join(self.form.names[side])
                raise UserError(
                    f"{where} without {keys}",
                    "logprobs of both sides in every row",
                    "give --format (verl, slime, trl, nemo-rl, prime-rl) or rename the key; see diagnose --fields",
                )
        aligned = self._align(fields, row, where)
        self.lengths.append(len(aligned.rollout))
        self.bases.append(aligned.base)
        self.columns["rollout"].append(_single(aligned.rollout))
        self.columns["train"].append(_single(aligned.train))
        self.columns["mask"].append(aligned.mask)
        for name in _OPTIONAL_TOKENS:
            vector = aligned.optional.get(name)
            if vector is None:
                self.optional[name].append(None)
            elif name.endswith("tokens"):
                self.optional[name].append(_ids(vector, f"{where}: {name}"))
            else:
                self.optional[name].append(_single(vector))
        self._add_sample(fields, aligned, where)

    def _align(self, fields: dict[str, object], row: Mapping[str, object], where: str) -> _Row:
        vectors = {name: _vector(fields[name], f"{where}: {name}") for name in TOKEN_FIELDS if name in fields}
        if "length" in fields:
            real = _whole(fields["length"], f"{where}: length")
            vectors = {name: v[:real] if len(v) > real else v for name, v in vectors.items()}
        prompt = _whole(fields["prompt_length"], f"{where}: prompt_length") if "prompt_length" in fields else None
        response = next(
            (_whole(row[key], f"{where}: {key}") for key in RESPONSE_LENGTH if row.get(key) is not None), None
        )
        tokens, only = vectors.pop("tokens", None), vectors.pop("response_tokens", None)
        before = vectors.pop("prompt_tokens", None)
        rollout, train = vectors.pop("rollout_logprobs"), vectors.pop("train_logprobs")
        if only is not None and (tokens is None or len(tokens) != len(rollout)):
            prompt = len(before) if before is not None and prompt is None else prompt
            tokens, total, base = only, len(only), prompt or 0
        elif tokens is not None:
            total, base = len(tokens), 0
            if prompt is None and response is not None:
                prompt = max(total - response, 0)
            if prompt is None and before is not None:
                prompt = len(before)
        else:
            total, base = max(len(rollout), len(train)), 0
        if len(rollout) != len(train) and total - 1 in (len(rollout), len(train)):
            raise UserError(
                f"{where}: {len(rollout)} rollout and {len(train)} train logprobs for {total} tokens",
                "the same tokens on both sides",
                "log both sides for the response, or both for the whole row",
            )
        rollout = _fit(rollout, total, prompt, base, f"{where}: rollout logprobs", math.nan)
        train = _fit(train, total, prompt, base, f"{where}: train logprobs", math.nan)
        mask = vectors.pop("mask", None)
        if mask is None:
            chosen = np.ones(total, bool)
            if base == 0 and prompt is not None:
                chosen[: min(prompt, total)] = False
        else:
            chosen = _fit(mask, total, prompt, base, f"{where}: mask", 0.0) > 0
        optional = {
            name: _fit(vector, total, prompt, base, f"{where}: {name}", math.nan) for name, vector in vectors.items()
        }
        if tokens is not None:
            optional["tokens"] = tokens
        # Tokens outside the loss may lack a logprob; zero keeps them out of every count of NaN.
        rollout, train = np.where(chosen, rollout, 0.0), np.where(chosen, train, 0.0)
        return _Row(rollout, train, chosen, base, optional, prompt)

    def _add_sample(self, fields: dict[str, object], row: _Row, where: str) -> None:
        for name in (*_INTEGER_SAMPLES, *_FLOAT_SAMPLES):
            value = _scalar(fields[name], f"{where}: {name}") if name in fields else math.nan
            low, high = _RANGES.get(name, (-1e18, 1e18))
            if not math.isnan(value) and not low <= value <= high:
                raise UserError(
                    f"{where}: {name} = {value:g}", f"a number from {low:g} to {high:g}", "correct the value"
                )
            self.samples[name].append(value)
        if row.prompt_length is not None:
            self.samples["prompt_length"][-1] = float(row.prompt_length)
        for kind, names in self.workers.items():
            value = fields.get(kind)
            names.append(None if value is None else str(value)[:80])
        reason = str(fields.get("finish_reason", "")).lower()
        self.stopped.append(
            math.nan if not reason else float(reason.rsplit(".", 1)[-1] in ("stop", "eos", "completed", "end_turn"))
        )

    def finish(self) -> TokenLog:
        """The joined log; a log without rows or loss tokens is a UserError."""
        if not self.lengths:
            raise UserError(f"no samples in {self.source}", "at least one row with logprobs", "check the path")
        offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        mask = np.concatenate(self.columns.pop("mask")).astype(np.bool_)
        if not mask.any():
            raise UserError(
                f"no token with mask 1 in {self.source}", "loss tokens to compare", "check the mask column and its sign"
            )
        rollout = np.concatenate(self.columns.pop("rollout")).astype(np.float32, copy=False)
        train = np.concatenate(self.columns.pop("train")).astype(np.float32, copy=False)
        optional = {name: self._optional(name) for name in _OPTIONAL_TOKENS}
        if self.unknown:
            shown = ", ".join(sorted(self.unknown, key=lambda k: -self.unknown[k])[:8])
            self.notes.append(f"unknown columns ignored: {shown}" + (" ..." if len(self.unknown) > 8 else ""))
        return TokenLog(
            offsets=offsets,
            mask=mask,
            rollout=rollout,
            train=train,
            base_position=np.array(self.bases, np.int64),
            tokens=optional["tokens"],
            train_tokens=optional["train_tokens"],
            ref_logprob=optional["ref_logprobs"],
            entropy=optional["entropy"],
            samples=self._sample_columns(),
            facts=make_facts(self.settings),
            source=self.source,
            notes=tuple(self.notes),
        )

    def _optional(self, name: str) -> npt.NDArray[np.generic] | None:
        """A token column, or None unless every row has it."""
        rows = self.optional.pop(name)
        present = [row for row in rows if row is not None]
        if not present:
            return None
        if len(present) < len(rows):
            self.notes.append(f"{name} is missing in {len(rows) - len(present)} of {len(rows)} rows: not used")
            return None
        return np.concatenate(present)

    def _sample_columns(self) -> SampleColumns:
        columns: dict[str, npt.NDArray[np.generic]] = {}
        for name, values in self.samples.items():
            array = np.array(values, np.float64)
            missing = int(np.isnan(array).sum())
            if missing == len(array):
                continue
            if missing:
                self.notes.append(f"{name} is missing in {missing} of {len(array)} rows: not used")
                continue
            if name in _INTEGER_SAMPLES:
                columns[name] = array.astype(np.int64)
            else:
                columns[name] = array.astype(np.float64 if name in ("time", "loss") else np.float32)
        names: dict[str, tuple[str, ...]] = {"engine": (), "rank": ()}
        for kind, values in self.workers.items():
            if values and all(value is not None for value in values):
                unique = sorted({str(value) for value in values})
                codes = {value: i for i, value in enumerate(unique)}
                columns[kind] = np.array([codes[str(value)] for value in values], np.int64)
                names[kind] = tuple(unique)
        stopped = np.array(self.stopped)
        if not np.isnan(stopped).any():
            columns["stopped"] = stopped.astype(np.bool_)
        return SampleColumns(**columns, engine_names=names["engine"], rank_names=names["rank"])  # type: ignore[arg-type]


_IGNORED = {"id", "sample_id", "index", "uid", "text", "prompt", "response", "reward", "rewards", "score", "label",
            "attention_mask", "position_ids", "group_index", "metadata", "log"}  # fmt: skip


def _fit(vector: Vector, total: int, prompt: int | None, base: int, where: str, fill: float) -> Vector:
    """The vector at length ``total``: as it is, or with the prompt in front filled or cut."""
    if len(vector) == total:
        return vector
    if base == 0 and prompt is not None and len(vector) == total - prompt:
        return np.concatenate([np.full(prompt, fill), vector])
    if base and prompt is not None and len(vector) == total + prompt:
        return vector[prompt:]
    if base == 0 and len(vector) == total - 1:
        # Scores of "next tokens" have one value fewer than tokens: the first token has none.
        return np.concatenate([[fill], vector])
    expected = f"{total} values" if prompt is None else f"{total} or {abs(total - prompt)} values"
    raise UserError(
        f"{where} with {len(vector)} values",
        f"{expected}, one per token",
        "log both sides for the same tokens, or add prompt_length",
    )


def make_facts(settings: Mapping[str, object]) -> LogFacts:
    """Facts of the whole log from a header, constant columns or ``--set``; an unknown or wrong value is a UserError."""
    values: dict[str, object] = {}
    for key, value in settings.items():
        if key in SAMPLE_FIELDS:
            continue
        if key not in LOG_FIELDS:
            raise UserError(f"unknown setting {key}", ", ".join(LOG_FIELDS), "see diagnose --fields")
        if key in ("loss_agg", "dtype"):
            values[key] = str(value)
        elif key == "loss_denominator":
            values[key] = _scalar(value, key)
        else:
            number = _scalar(value, key)
            if not math.isfinite(number) or number != int(number) or number < 0:
                raise UserError(f"{key} = {value}", "a whole number, 0 or more", "correct the value")
            values[key] = int(number)
    if values.get("dtype") not in (None, "bf16", "fp16", "fp32"):
        raise UserError(f"dtype = {values['dtype']}", "bf16, fp16 or fp32", "name the engines' compute type")
    return LogFacts(**values)  # type: ignore[arg-type]
