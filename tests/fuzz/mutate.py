"""Ways to spoil bytes and JSON, all of them decided by one random generator."""

from __future__ import annotations

import json
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 2**31, 2**63, -(2**63), 10**300, 1e308, -1e308, 1e-320, 0.5, 10**4000),
    *(
        "",
        " ",
        "nan",
        "inf",
        "-inf",
        "\x00",
        "../../x",
        "/",
        "A" * 5000,
        "\ud800",
        "\x1b[2J\n\u202e",
        "step-00000",
        "cpu",
    ),
    *([], {}, [[[[]]]], {"step": 0}, [None] * 50, {"": ""}, {"a": {"a": {"a": {}}}}),
)
TOKENS = (
    b"\x00",
    b"\xff\xfe",
    b"\r\n",
    b"\n\n",
    b"\xef\xbb\xbf",
    b'"',
    b"{",
    b"[" * 3000,
    b"}",
    b"1" * 5000,
    b"\\ud800",
)
TOKENS += (b"NaN", b"1e999", b"\xe2\x80\xa8", b"-", b"null", b',"a":1,"a":2', b"\xf0\x9f")


def spoil_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to three local changes, or something else altogether."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        where, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 64))
        head, tail = data[:where], data[where:]
        kind = rng.randrange(11)
        if kind <= 2 and tail:
            data = head + bytes([tail[0] ^ (1 << rng.randrange(8))]) + tail[1:]
        elif kind == 3:
            data = head
        elif kind == 4:
            data = head + rng.choice(TOKENS) + tail
        elif kind == 5:
            data = head + tail[length:]
        elif kind == 6:
            data = head + tail[:length] * rng.choice((2, 20)) + tail[length:]
        elif kind == 7:
            data = head + rng.randbytes(length) + tail[length:]
        elif kind == 8:
            data = tail + head
        elif kind == 9:  # the length of a safetensors header, and the like
            data = rng.choice((0, 1, len(data), 2**31, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little") + data[8:]
        elif kind == 10 and rng.random() < 0.2:
            data = rng.choice((b"", rng.randbytes(200), b"\x00" * 100))
    return data


def spoil_json(rng: random.Random, body: Any) -> Any:
    """One value at a random depth replaced, removed, doubled or joined by a stranger."""
    if isinstance(body, dict) and body and rng.random() < 0.8:
        key, kind = rng.choice(sorted(body)), rng.random()
        if kind < 0.08:
            return {name: value for name, value in body.items() if name != key}
        if kind < 0.14:
            return {**body, rng.choice(("extra\x1b[31m\n", "", key.upper(), "a" * 3000)): 1}
        if kind < 0.2:
            return {**{name: value for name, value in body.items() if name != key}, key + "s": body[key]}
        return {**body, key: spoil_json(rng, body[key])}
    if isinstance(body, list) and body and rng.random() < 0.8:
        index = rng.randrange(len(body))
        if rng.random() < 0.1:
            return [*body, *body]
        return [*body[:index], spoil_json(rng, body[index]), *body[index + 1 :]]
    return rng.choice(HOSTILE)


def spoil_document(rng: random.Random, data: bytes, *, lines: bool = False) -> bytes:
    """A JSON file, or one line of a JSONL file, with a spoilt value or with spoilt bytes."""
    if rng.random() < 0.5:
        return spoil_bytes(rng, data)
    rows = data.split(b"\n")[:-1] if lines else [data]
    if not rows:
        return rng.choice(TOKENS)
    index = rng.randrange(len(rows))
    try:
        rows[index] = dump(spoil_json(rng, json.loads(rows[index])))
    except ValueError:  # spoilt before
        rows[index] = spoil_bytes(rng, rows[index])
    if not lines:
        return rows[0]
    if rng.random() < 0.1:
        rng.shuffle(rows)
    return b"".join(row + b"\n" for row in rows)


def dump(body: Any) -> bytes:
    return json.dumps(body).encode()
