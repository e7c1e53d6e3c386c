"""A resumable download over HTTP: into ``<file>.partial``, renamed when it is whole."""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from rl_engine.records.errors import UserError
from rl_engine.records.private import check_place, open_shared

Talk = Callable[[str], None]
CHUNK = 1 << 20
ATTEMPTS = 5


def download(url: str, file: Path, sha256: str | None, talk: Talk, pause: float = 1.0) -> str:
    """Fetches ``url`` into ``file`` and returns its SHA-256 (hex).

    What an earlier attempt left in ``<file>.partial`` is gone on with if the server still has the same file (by its
    ETag or Last-Modified), else it is fetched anew.

    Args:
        url: http or https.
        file: where it goes; its folder is made.
        sha256: hash it must have, or None.
        talk: receives progress, one line at a time.
        pause: seconds before the second attempt, doubled before every further one.

    Raises:
        UserError: no such file, an unreachable server after several attempts, a wrong hash, or a full disk.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise UserError(f"URL {url}", "an http or https address", "check --data-url")
    check_place(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial, last = file.with_name(file.name + ".partial"), ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
            talk(f"connection lost ({last}); going on at {_size(partial):,} bytes")
        try:
            _fetch(url, partial, talk)
            break
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise UserError(f"HTTP {error.code} from {url}", "the file", "check --data-url") from None
            last = f"HTTP {error.code}"
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(partial, "the disk is full") from None
            last = str(getattr(error, "reason", error))
        except http.client.HTTPException as error:
            last = type(error).__name__
    else:
        raise UserError(
            f"{url} that breaks off ({last})", "the whole file", "run prepare again: it goes on where it stopped"
        )
    return _finish(partial, file, sha256)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _full(partial: Path, what: str) -> UserError:
    return UserError(
        f"{what} ({partial.parent})",
        "room for the download",
        "free space or name another --data-root, then run prepare again",
    )


def _note(partial: Path) -> Path:
    return partial.with_name(partial.name + ".json")


def _fetch(url: str, partial: Path, talk: Talk) -> None:
    """One attempt; returns when ``partial`` is whole, raises OSError or HTTPException when the connection breaks."""
    done, validator = _size(partial), _read_note(partial, url)
    request = urllib.request.Request(url, headers={"User-Agent": "rl-kernel-prepare", "Accept-Encoding": "identity"})
    if done and validator:
        request.add_header("Range", f"bytes={done}-")
        request.add_header("If-Range", validator)
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range", "") == f"bytes */{done}":
            return  # all of it was there already
        if error.code == 416:
            partial.unlink(missing_ok=True)
            raise ConnectionError("the file on the server changed") from None
        raise
    with response:
        resumed = response.status == 206
        if not resumed and done:
            talk("the server has another file by now (or cannot resume): starting anew")
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        if total is not None and shutil.disk_usage(partial.parent).free < total - done:
            raise _full(partial, f"{total - done:,} bytes to download and too little free disk")
        mark = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        with open(_note(partial), "w", encoding="utf-8", opener=open_shared) as note:
            json.dump({"url": url, "validator": mark}, note)
        _copy(response, partial, "ab" if resumed else "wb", done, total, talk)


def _copy(
    response: http.client.HTTPResponse, partial: Path, how: str, done: int, total: int | None, talk: Talk
) -> None:
    told = time.monotonic()
    with open(partial, how, opener=open_shared) as stream:
        while chunk := response.read(CHUNK):
            stream.write(chunk)
            done += len(chunk)
            if time.monotonic() - told > 2:
                told = time.monotonic()
                talk(f"downloaded {done:,} of {total:,} bytes" if total is not None else f"downloaded {done:,} bytes")
    if total is not None and done != total:
        raise ConnectionError(f"{done:,} of {total:,} bytes")


def _read_note(partial: Path, url: str) -> str:
    """The validator of the file that ``partial`` is a part of; empty when that cannot be told."""
    try:
        note = json.loads(_note(partial).read_text(encoding="utf-8"))
        same = note["url"] == url
        return str(note["validator"]) if same and not str(note["validator"]).startswith("W/") else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def file_sha256(file: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _finish(partial: Path, file: Path, sha256: str | None) -> str:
    found = file_sha256(partial)
    if sha256 is not None and found != sha256:
        partial.unlink()
        _note(partial).unlink(missing_ok=True)
        raise UserError(
            f"a download with SHA-256 {found}",
            sha256,
            "the file on the server is another one, or was damaged; it was removed",
        )
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(partial, file)
    _note(partial).unlink(missing_ok=True)
    return found
