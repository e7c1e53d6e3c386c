"""A step's samples as files: tensors in safetensors, identities in JSON lines. Decoding checks every length."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_engine.records.codec import RecordError, canonical_json, decode, encode, parse_json
from rl_engine.records.types import RetainedSets, SampleBatch, SampleRecord

_DTYPES = {
    "tokens": np.int32,
    "offsets": np.int64,
    "loss_mask": np.uint8,
    "rollout_logprob": np.float32,
    "train_logprob": np.float32,
}
_RETAINED_DTYPES = {
    "retained_kind": np.uint8,
    "retained_offsets": np.int64,
    "retained_bytes": np.uint8,
    "retained_digest": np.uint8,
    "retained_vocab": np.int64,
}
_NO_SET, _IDS, _BITMASK = 0, 1, 2
_MAX_VOCAB = 1 << 24
_MAX_RETAINED = 1 << 28

Arrays = dict[str, npt.NDArray[Any]]


def encode_samples(step: int, batch: SampleBatch) -> tuple[bytes, bytes]:
    """``(safetensors bytes, JSON-lines bytes)`` of a batch.

    Raises:
        RecordError: shapes, dtypes or offsets that do not fit together (see :func:`check_batch`).
    """
    from safetensors.numpy import save  # here: engines run where it is not installed

    check_batch(batch, f"step {step}")
    arrays: Arrays = {name: np.ascontiguousarray(getattr(batch, name)) for name in _DTYPES}
    arrays["step"] = np.array([step], dtype=np.int64)
    if batch.retained is not None:
        arrays.update(_encode_retained(batch.retained))
    lines = [canonical_json({"step": step, **encode(sample)}) + "\n" for sample in batch.samples]
    return save(arrays), "".join(lines).encode()


def decode_samples(step: int, tensors: bytes, lines: bytes, where: str) -> SampleBatch:
    """Inverse of :func:`encode_samples`; nothing in the bytes is trusted.

    Raises:
        RecordError: anything that :func:`encode_samples` would not have written for ``step``.
    """
    arrays = load_tensors(tensors, where)
    expected = {**_DTYPES, "step": np.int64}
    if any(name.startswith("retained_") for name in arrays):
        expected |= _RETAINED_DTYPES
    check_arrays(arrays, expected, where)
    if arrays["step"].shape != (1,) or int(arrays["step"][0]) != step:
        raise RecordError(f"{where}: step {arrays['step'].ravel()[:1].tolist()}", f"step [{step}]")
    samples = tuple(_decode_sample(step, line, where) for line in split_lines(lines, where))
    batch = SampleBatch(
        tokens=arrays["tokens"],
        offsets=arrays["offsets"],
        loss_mask=arrays["loss_mask"],
        rollout_logprob=arrays["rollout_logprob"],
        train_logprob=arrays["train_logprob"],
        samples=samples,
    )
    check_batch(batch, where)
    if "retained_kind" in arrays:
        batch = dataclasses.replace(batch, retained=_decode_retained(arrays, batch.tokens.size, where))
    return batch


def load_tensors(data: bytes, where: str) -> Arrays:
    """Parse safetensors bytes into numpy arrays; a malformed file or an unknown dtype is a RecordError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise RecordError(f"{where}: {str(error)[:200]}", "a safetensors file") from error


def check_arrays(arrays: Arrays, expected: dict[str, Any], where: str) -> None:
    """Raise a RecordError unless ``arrays`` has exactly the names and dtypes of ``expected``."""
    if set(arrays) != set(expected):
        different = sorted(set(arrays) ^ set(expected))
        raise RecordError(f"{where}: tensor {different[0][:80]!r} missing or unknown", ", ".join(sorted(expected)))
    for name, dtype in expected.items():
        if arrays[name].dtype != np.dtype(dtype):
            raise RecordError(f"{where}: {name} is {arrays[name].dtype}", f"{np.dtype(dtype)}")


def split_lines(data: bytes, where: str) -> list[bytes]:
    """The lines of a JSON-lines file; the last must end in a newline."""
    if data and not data.endswith(b"\n"):
        raise RecordError(f"{where}: a last line without its end", "whole lines")
    return data.split(b"\n")[:-1]


def check_batch(batch: SampleBatch, where: str) -> None:
    """Raise a RecordError unless every array has its dtype and shape and the offsets cut the tokens exactly."""
    for name, dtype in _DTYPES.items():
        array = getattr(batch, name)
        if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.ndim != 1:
            shown = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise RecordError(f"{where}: {name} is {shown}", f"{np.dtype(dtype)} of one axis")
    total = batch.tokens.size
    for name in ("loss_mask", "rollout_logprob", "train_logprob"):
        if getattr(batch, name).size != total:
            raise RecordError(f"{where}: {getattr(batch, name).size} values of {name}", f"{total}, one per token")
    offsets = batch.offsets
    if offsets.size < 1 or offsets[0] != 0 or offsets[-1] != total or bool(np.any(offsets[1:] < offsets[:-1])):
        raise RecordError(f"{where}: offsets that do not cut {total} tokens", "ascending offsets from 0 to the end")
    if len(batch.samples) != offsets.size - 1:
        raise RecordError(f"{where}: {len(batch.samples)} identities", f"{offsets.size - 1}, one per sample")
    if batch.retained is not None and batch.retained.offsets.shape != (total + 1,):
        raise RecordError(f"{where}: retained offsets {batch.retained.offsets.shape}", f"({total + 1},)")


def retained_digest(ids: npt.NDArray[np.int32]) -> bytes:
    """SHA-256 of a retained set: its sorted ids as little-endian int32."""
    return hashlib.sha256(ids.astype("<i4", copy=False).tobytes()).digest()


def _decode_sample(step: int, line: bytes, where: str) -> SampleRecord:
    data = parse_json(line, where)
    if not isinstance(data, dict) or type(data.get("step")) is not int or data["step"] != step:
        raise RecordError(f"{where}: an identity of another step", f"step {step}")
    return decode(SampleRecord, {key: value for key, value in data.items() if key != "step"}, where)


def _encode_retained(sets: RetainedSets) -> Arrays:
    tokens = sets.offsets.size - 1
    kind = np.zeros(tokens, dtype=np.uint8)
    digest = np.zeros((tokens, 32), dtype=np.uint8)
    offsets = np.zeros(tokens + 1, dtype=np.int64)
    mask_bytes = (sets.vocab + 7) // 8
    blobs: list[bytes] = []
    for token in range(tokens):
        ids = sets.ids[sets.offsets[token] : sets.offsets[token + 1]]
        blob = b""
        if ids.size:
            digest[token] = np.frombuffer(retained_digest(ids), dtype=np.uint8)
            kind[token] = _IDS if 4 * ids.size <= mask_bytes else _BITMASK
            blob = ids.astype("<i4").tobytes() if kind[token] == _IDS else _bitmask(ids, sets.vocab)
        blobs.append(blob)
        offsets[token + 1] = offsets[token] + len(blob)
    return {
        "retained_kind": kind,
        "retained_offsets": offsets,
        "retained_bytes": np.frombuffer(b"".join(blobs), dtype=np.uint8),
        "retained_digest": digest,
        "retained_vocab": np.array([sets.vocab], dtype=np.int64),
    }


def _bitmask(ids: npt.NDArray[np.int32], vocab: int) -> bytes:
    flags = np.zeros(vocab, dtype=bool)
    flags[ids] = True
    return np.packbits(flags, bitorder="little").tobytes()


def _decode_retained(arrays: Arrays, tokens: int, where: str) -> RetainedSets:
    kind, offsets = arrays["retained_kind"], arrays["retained_offsets"]
    blob, digest = arrays["retained_bytes"], arrays["retained_digest"]
    shapes_fit = (kind.shape, offsets.shape, digest.shape) == ((tokens,), (tokens + 1,), (tokens, 32))
    if not shapes_fit or blob.ndim != 1 or arrays["retained_vocab"].shape != (1,):
        raise RecordError(f"{where}: retained sets of another shape", f"one row for each of {tokens} tokens")
    if offsets[0] != 0 or offsets[-1] != blob.size or bool(np.any(offsets[1:] < offsets[:-1])):
        raise RecordError(f"{where}: retained offsets that do not cut the bytes", "ascending offsets from 0 to the end")
    vocab = int(arrays["retained_vocab"][0])
    if not 0 < vocab <= _MAX_VOCAB:
        raise RecordError(f"{where}: vocabulary {vocab}", f"1 to {_MAX_VOCAB}")
    rows: list[npt.NDArray[np.int32]] = []
    ends, total = offsets.tolist(), 0
    for token in range(tokens):
        row = _decode_row(int(kind[token]), blob[ends[token] : ends[token + 1]], vocab, f"{where}: token {token}")
        if row.size and retained_digest(row) != digest[token].tobytes():
            raise RecordError(f"{where}: token {token}: a retained set that is not its digest's", "the digest's set")
        total += row.size
        if total > _MAX_RETAINED:
            raise RecordError(f"{where}: more than {_MAX_RETAINED} retained ids", "fewer")
        rows.append(row)
    lengths = np.array([0, *(row.size for row in rows)], dtype=np.int64)
    ids = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32)
    return RetainedSets(offsets=np.cumsum(lengths), ids=ids, vocab=vocab)


def _decode_row(kind: int, blob: npt.NDArray[Any], vocab: int, where: str) -> npt.NDArray[np.int32]:
    if kind == _NO_SET and blob.size == 0:
        return np.zeros(0, dtype=np.int32)
    if kind == _IDS and blob.size and blob.size % 4 == 0:
        ids = np.frombuffer(blob.tobytes(), dtype="<i4").astype(np.int32)
        if ids[0] >= 0 and ids[-1] < vocab and bool(np.all(ids[1:] > ids[:-1])):
            return ids
    if kind == _BITMASK and blob.size == (vocab + 7) // 8:
        flags = np.unpackbits(np.ascontiguousarray(blob), bitorder="little")
        if flags.any() and not flags[vocab:].any():
            return np.flatnonzero(flags).astype(np.int32)
    raise RecordError(f"{where}: a malformed retained set", f"ascending ids below {vocab}, or a bitmask of them")
