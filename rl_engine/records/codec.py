"""The one codec of evidence: frozen dataclasses to canonical JSON and back, strictly.

Decoding refuses an unknown key, a missing key (but of a field that was :func:`added` later), a duplicate key and a
value of another type. Floats that JSON cannot spell are the strings ``nan``, ``inf`` and ``-inf``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from rl_engine.records.errors import UserError, printable

T = TypeVar("T")

# A value that JSON can hold. Spelt with Any inside because mypy's recursive aliases do not survive get_type_hints.
JsonValue = Any

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ADDED = "added"
_HINT_FILE = "the file is damaged or was not written by this version; compare it with a sealed copy"


class RecordError(UserError):
    """A file of a run directory that is not what it must be."""

    def __init__(self, found: str, expected: str, hint: str = _HINT_FILE) -> None:
        super().__init__(printable(found), printable(expected), hint)


def added(default: Any) -> Any:
    """A field that earlier files do not have: it is written where it is not ``default``, so that what they hold keeps
    its text and its digest."""
    return dataclasses.field(default=default, metadata={_ADDED: True})


def canonical_json(value: JsonValue) -> str:
    """Compact JSON with sorted keys, ASCII only: one spelling for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical_digest(value: JsonValue) -> str:
    """SHA-256 (hex) of :func:`canonical_json`; the digest of a plan is this over its JSON object."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def encode(record: Any) -> JsonValue:
    """A frozen dataclass (nested ones, tuples and string-keyed mappings inside) as JSON values."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        absent = {f.name for f in dataclasses.fields(record) if _ADDED in f.metadata and values[f.name] == f.default}
        return {name: encode(value) for name, value in values.items() if name not in absent}
    if isinstance(record, Mapping):
        return {str(key): encode(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [encode(value) for value in record]
    if isinstance(record, bool) or record is None or isinstance(record, (str, int)):
        return record
    if isinstance(record, float):
        if math.isfinite(record):
            return float(record)
        return "nan" if math.isnan(record) else ("inf" if record > 0 else "-inf")
    raise TypeError(f"{type(record).__name__} is not a record value")


def parse_json(text: str | bytes, where: str) -> JsonValue:
    """Parse JSON text; ``where`` names the file (and line) in the error.

    Raises:
        RecordError: malformed text, bad UTF-8, duplicate keys, NaN literals, or nesting that exhausts the stack.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=_unique_pairs, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise RecordError(f"{where}: {reason[:200]}", "one JSON value") from error


def decode(cls: type[T], data: JsonValue, where: str) -> T:
    """Build ``cls`` (a dataclass) from parsed JSON, checking every key and every type.

    Raises:
        RecordError: naming ``where`` and the field.
    """
    return typing.cast(T, _decode_value(cls, data, where))


def _unique_pairs(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _no_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _decode_value(expected: Any, data: JsonValue, where: str) -> Any:
    if expected is Any:
        return data
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _decode_dataclass(expected, data, where)
    origin = typing.get_origin(expected)
    if origin is None:
        return _decode_scalar(expected, data, where)
    arguments = typing.get_args(expected)
    if origin is Literal:
        if not any(type(data) is type(choice) and data == choice for choice in arguments):
            raise RecordError(f"{where}: {_show(data)}", "one of " + ", ".join(map(str, arguments)))
        return data
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, data, where)
    if origin is tuple:
        return _decode_tuple(arguments, data, where)
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            raise RecordError(f"{where}: {_show(data)}", "an object")
        return {key: _decode_value(arguments[1], value, f"{where}.{key}") for key, value in data.items()}
    raise TypeError(f"the codec does not know {expected}")


def _decode_dataclass(cls: type[Any], data: JsonValue, where: str) -> Any:
    if not isinstance(data, dict):
        raise RecordError(f"{where}: {_show(data)}", f"an object ({cls.__name__})")
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(data) - set(names))
    optional = {field.name for field in dataclasses.fields(cls) if _ADDED in field.metadata}
    missing = sorted(set(names) - set(data) - optional)
    if unknown:
        raise RecordError(f"{where}: unknown key {_show(unknown[0])}", f"the keys of {cls.__name__}")
    if missing:
        raise RecordError(f"{where}: no key {missing[0]!r}", f"the keys of {cls.__name__}")
    hints = _hints(cls)
    given = [name for name in names if name in data]
    return cls(**{name: _decode_value(hints[name], data[name], f"{where}.{name}") for name in given})


def _decode_scalar(expected: Any, data: JsonValue, where: str) -> Any:
    if expected is type(None):
        if data is None:
            return None
    elif expected is float:
        if isinstance(data, str) and data in _NON_FINITE:
            return _NON_FINITE[data]
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            try:
                return float(data)
            except OverflowError as error:
                raise RecordError(f"{where}: an integer beyond every float", "a number") from error
    elif expected in (str, int, bool):
        if type(data) is expected:
            return data
    else:
        raise TypeError(f"the codec does not know {expected}")
    raise RecordError(f"{where}: {_show(data)}", getattr(expected, "__name__", str(expected)))


def _decode_union(arguments: tuple[Any, ...], data: JsonValue, where: str) -> Any:
    if data is None and type(None) in arguments:
        return None
    last: RecordError | None = None
    for choice in arguments:
        if choice is type(None):
            continue
        try:
            return _decode_value(choice, data, where)
        except RecordError as error:
            last = error
    raise last if last is not None else RecordError(f"{where}: {_show(data)}", "null")


def _decode_tuple(arguments: tuple[Any, ...], data: JsonValue, where: str) -> Any:
    if not isinstance(data, list):
        raise RecordError(f"{where}: {_show(data)}", "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode_value(arguments[0], value, f"{where}[{i}]") for i, value in enumerate(data))
    if len(data) != len(arguments):
        raise RecordError(f"{where}: {len(data)} values", f"{len(arguments)} values")
    pairs = zip(arguments, data, strict=True)
    return tuple(_decode_value(choice, value, f"{where}[{i}]") for i, (choice, value) in enumerate(pairs))


def _show(data: JsonValue) -> str:
    text = repr(data)
    return text if len(text) <= 80 else text[:77] + "..."
