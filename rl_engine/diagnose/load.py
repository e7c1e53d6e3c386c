"""Readers: JSON lines, Parquet and our own run directories. A stream of rows, so that memory follows the tokens."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from rl_engine.diagnose.build import LogBuilder
from rl_engine.diagnose.fields import ALIASES, FORMATS, SAMPLE_FIELDS, Format
from rl_engine.diagnose.log import LogFacts, SampleColumns, TokenLog
from rl_engine.records.errors import UserError

Row = Mapping[str, object]
_LINE_LIMIT = 256 << 20


def load(path: pathlib.Path, form: str = "auto", settings: Mapping[str, object] | None = None) -> TokenLog:
    """Read a log.

    Args:
        path: a ``.jsonl`` / ``.json`` or ``.parquet`` file, or a run directory of this project.
        form: a name in :data:`FORMATS`, or ``auto``: the format whose two logprob keys the first row has.
        settings: log or sample fields that hold for the whole log; they win over the file.

    Raises:
        UserError: for a missing, empty or malformed file, unknown formats, rows that do not align.
    """
    settings = dict(settings or {})
    if not path.exists():
        raise UserError(f"no file or directory {path}", "a log (JSONL, Parquet) or a run directory", "check the path")
    if path.is_dir():
        return _run_directory(path)
    if form != "auto" and ALIASES.get(form, form) not in FORMATS:
        raise UserError(f"--format {form}", ", ".join(("auto", *FORMATS)), "see diagnose --fields")
    with path.open("rb") as stream:
        head = stream.read(4)
    if not head.strip():
        raise UserError(f"an empty file {path}", "one JSON object per line, or Parquet", "check what wrote it")
    rows = _parquet(path) if head == b"PAR1" else _json_lines(path)
    return _join(rows, form, str(path), settings)


def _join(rows: Iterator[tuple[str, Row]], form: str, source: str, settings: dict[str, object]) -> TokenLog:
    builder: LogBuilder | None = None
    extra = {name: value for name, value in settings.items() if name in SAMPLE_FIELDS}
    facts = {name: value for name, value in settings.items() if name not in SAMPLE_FIELDS}
    header: dict[str, object] = {}
    for where, row in rows:
        if set(row) == {"log"} and isinstance(row["log"], dict):
            header.update(row["log"])
            continue
        if builder is None:
            extra = {**{k: v for k, v in header.items() if k in SAMPLE_FIELDS}, **extra}
            log_facts = {**{k: v for k, v in header.items() if k not in SAMPLE_FIELDS}, **facts}
            builder = LogBuilder(_choose(form, row, where), source, log_facts)
        builder.add({**row, **extra} if extra else row, where)
    if builder is None:
        raise UserError(f"no samples in {source}", "at least one row with logprobs", "check what wrote it")
    return builder.finish()


def _choose(form: str, row: Row, where: str) -> Format:
    if form != "auto":
        return FORMATS[ALIASES.get(form, form)]
    for candidate in FORMATS.values():
        if all(any(key in row for key in candidate.names[side]) for side in ("rollout_logprobs", "train_logprobs")):
            return candidate
    keys = ", ".join(sorted(row)[:12])
    raise UserError(
        f"{where} with the keys {keys}",
        "a rollout and a train logprob column (rollout_logprobs and train_logprobs, or another stack's names)",
        "give --format, or rename the keys; diagnose --fields lists the names of every format",
    )


def _json_lines(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    """Rows of a JSON-lines file (or of one JSON array); NaN and Infinity are accepted as Python writes them."""
    with path.open("rb") as stream:
        number = 0
        while True:
            line = stream.readline(_LINE_LIMIT)
            if not line:
                return
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # an editor's byte order mark
            if not line.strip():
                continue
            where = f"line {number} of {path.name}"
            if number == 1 and line.lstrip().startswith(b"["):
                yield from _json_array(path)
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: {error}", "one JSON object per line", "check that line") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: {type(row).__name__}", "a JSON object per sample", "check that line")
            yield where, row


def _json_array(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    if path.stat().st_size > _LINE_LIMIT:
        raise UserError(f"one JSON array of {path.stat().st_size} bytes", "JSON lines", "write one object per line")
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.name}: {error}", "JSON lines or an array of objects", "check the file") from None
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"element {number}: {type(row).__name__}", "a JSON object per sample", "check the file")
        yield f"element {number} of {path.name}", row


def _parquet(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    """Rows of a Parquet file; list columns come as numpy slices, never as Python lists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        number = 0
        for batch in file.iter_batches(batch_size=256):
            columns = [_column(batch.column(i), pa) for i in range(batch.num_columns)]
            for i in range(batch.num_rows):
                row = {name: column[i] for name, column in zip(names, columns, strict=True)}
                yield f"row {number} of {path.name}", row
                number += 1
    except pa.ArrowInvalid as error:
        raise UserError(f"{path.name}: {str(error)[:160]}", "a Parquet file", "check what wrote it") from None


def _column(array: object, pa: object) -> list[object]:
    """One value per row: numpy slices of numeric lists, Python values of everything else."""
    kind = array.type  # type: ignore[attr-defined]
    types = pa.types  # type: ignore[attr-defined]
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if not is_list or not (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)):
        if is_list and types.is_boolean(kind.value_type):
            return list(array.to_pylist())  # type: ignore[attr-defined]
        return list(array.to_pylist())  # type: ignore[attr-defined]
    values = array.values.to_numpy(zero_copy_only=False)  # type: ignore[attr-defined]
    offsets = array.offsets.to_numpy()  # type: ignore[attr-defined]
    valid = array.is_valid().to_numpy(zero_copy_only=False)  # type: ignore[attr-defined]
    return [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(valid))]


def _run_directory(path: pathlib.Path) -> TokenLog:
    """A run directory of this project: typed samples of every step, with what the plan knows."""
    from rl_engine.records.codec import RecordError
    from rl_engine.records.reader import RunReader

    try:
        reader = RunReader(path)
        batches = [(step, reader.samples(step)) for step in reader.sample_steps()]
        plan = reader.plan().plan
    except RecordError as error:
        raise UserError(f"{path}: {error}", "a readable run directory", "run `rlk-repro validate` on it") from None
    batches = [(step, batch) for step, batch in batches if len(batch.tokens)]
    if not batches:
        raise UserError(f"no samples in {path}", "at least one step with samples", "was the run started?")
    lengths = np.concatenate([np.diff(batch.offsets) for _, batch in batches])
    records = [record for _, batch in batches for record in batch.samples]
    steps = np.repeat([step for step, _ in batches], [len(batch.samples) for _, batch in batches])
    engines = sorted({record.engine for record in records})
    mask = np.concatenate([batch.loss_mask for _, batch in batches]) > 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    sampling = _mapping(plan, "sampling")
    count = len(records)
    versions = np.array([record.weight_version for record in records], np.int64)

    def constant(key: str, kind: type[np.generic]) -> np.ndarray | None:
        value = sampling.get(key)
        return np.full(count, value, kind) if isinstance(value, int | float) else None

    samples = SampleColumns(
        prompt_length=_prompt_lengths(mask, offsets),
        temperature=constant("temperature", np.float32),
        top_p=constant("top_p", np.float32),
        top_k=constant("top_k", np.int64),
        weight_version=versions,
        engine=np.array([engines.index(record.engine) for record in records], np.int64),
        step=steps.astype(np.int64),
        stopped=np.array([record.finish_reason == "stop" for record in records], np.bool_),
        engine_names=tuple(engines),
    )
    model = _mapping(plan, "model")
    return TokenLog(
        offsets=offsets,
        mask=mask,
        rollout=np.concatenate([batch.rollout_logprob for _, batch in batches]),
        train=np.concatenate([batch.train_logprob for _, batch in batches]),
        base_position=np.zeros(count, np.int64),
        tokens=np.concatenate([batch.tokens for _, batch in batches]),
        samples=samples,
        facts=LogFacts(vocab_size=_whole(model, "vocab_size"), padded_vocab_size=_whole(model, "padded_vocab_size")),
        source=str(path),
    )


def _prompt_lengths(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Position of each sample's first loss token (its length, where it has none)."""
    lengths = np.diff(offsets)
    place = np.arange(len(mask)) - np.repeat(offsets[:-1], lengths)
    out = lengths.astype(np.int64).copy()
    sample = np.repeat(np.arange(len(lengths)), lengths)
    np.minimum.at(out, sample[mask], place[mask])
    return out


def _mapping(plan: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = plan.get(key)
    return value if isinstance(value, dict) else {}


def _whole(values: Mapping[str, object], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
