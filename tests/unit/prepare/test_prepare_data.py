"""DAPO parquet over loopback HTTP: resume, a changed file, a wrong hash, a full disk, duplicates, malformed rows."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import threading

import pytest

from rl_engine.prepare import download as download_module
from rl_engine.prepare.dapo import convert, manifest_path, prepare_dapo, read_manifest
from rl_engine.prepare.download import download
from rl_engine.records.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def row(index: str, question: str = "1 + 1?", **over: object) -> dict:
    body = {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": index},
    }
    return {**body, **over}


def write_parquet(file, rows) -> bytes:
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.read_bytes()


class Server:
    """Serves one file with ETag and ranges; ``cuts`` says after how many bytes each of the next answers breaks off."""

    def __init__(self, content: bytes) -> None:
        self.content, self.cuts, self.ranges, self.requests = content, [], True, []
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self)

            def log_message(self, *arguments: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/data.parquet"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler) -> None:
        etag = '"' + hashlib.sha256(self.content).hexdigest() + '"'
        asked = handler.headers.get("Range")
        self.requests.append(asked)
        start = 0
        if handler.path != "/data.parquet":
            handler.send_error(404)
            return
        if asked and self.ranges and handler.headers.get("If-Range") == etag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(self.content):
                handler.send_response(416)
                handler.send_header("Content-Range", f"bytes */{len(self.content)}")
                handler.end_headers()
                return
            handler.send_response(206)
        else:
            handler.send_response(200)
        handler.send_header("ETag", etag)
        body = self.content[start:]
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.cuts.pop(0)] if self.cuts else body)
        handler.wfile.flush()
        handler.close_connection = True

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(tmp_path):
    rows = [row(str(i), f"question {i} with a little text") for i in range(200)] + [
        row("3", "again"),
        row("4", "again"),
    ]
    made = Server(write_parquet(tmp_path / "made.parquet", rows))
    yield made
    made.close()


def test_download_convert_and_manifest(server, tmp_path):
    output = tmp_path / "data/out.jsonl"
    manifest = prepare_dapo(output, server.url, hashlib.sha256(server.content).hexdigest(), print)
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert (manifest.rows_read, manifest.rows_written, manifest.duplicates_removed) == (202, 200, 2)
    assert len(lines) == 200
    assert lines[3]["prompt"][0]["content"] == "question 3 with a little text"  # the first row of an index
    assert set(lines[0]) == {"prompt", "label", "data_source", "ability", "source_index", "reward_style"}
    body = json.loads(manifest_path(output).read_text())
    assert body["schema_version"] == "rlkernel.dapo_math_17k.v1"
    assert body["output_sha256"] == hashlib.sha256(output.read_bytes()).hexdigest()
    assert body["source_sha256"] == hashlib.sha256(server.content).hexdigest()
    count = len(server.requests)
    assert prepare_dapo(output, server.url, None, print) == manifest  # there already: nothing is asked of the server
    assert len(server.requests) == count
    output.write_text("changed")
    with pytest.raises(UserError, match="differs from its manifest"):
        prepare_dapo(output, server.url, None, print)
    manifest_path(output).unlink()
    with pytest.raises(UserError, match="without a manifest"):
        prepare_dapo(output, server.url, None, print)
    assert output.read_text() == "changed"


def test_a_cut_connection_is_resumed(server, tmp_path):
    server.cuts = [700, 500]
    said: list[str] = []
    download(server.url, tmp_path / "f", None, said.append, pause=0.01)
    assert (tmp_path / "f").read_bytes() == server.content
    assert server.requests == [None, "bytes=700-", "bytes=1200-"]
    assert any("going on at 700 bytes" in line for line in said)
    assert not list(tmp_path.glob("f.partial*"))


def test_a_later_run_goes_on_where_the_first_stopped(server, tmp_path):
    server.cuts = [100, 100, 100, 100, 100]
    with pytest.raises(UserError, match="goes on where it stopped"):
        download(server.url, tmp_path / "f", None, print, pause=0.001)
    assert (tmp_path / "f.partial").stat().st_size == 500
    download(server.url, tmp_path / "f", None, print)
    assert (server.requests[-1], (tmp_path / "f").read_bytes()) == ("bytes=500-", server.content)


def test_a_complete_partial_file_is_taken(server, tmp_path):
    server.cuts = [100] * 5
    with pytest.raises(UserError):
        download(server.url, tmp_path / "f", None, print, pause=0.001)
    (tmp_path / "f.partial").write_bytes(server.content)
    download(server.url, tmp_path / "f", None, print)
    assert (tmp_path / "f").read_bytes() == server.content


@pytest.mark.parametrize("ranges", [True, False])
def test_a_changed_file_is_fetched_anew(server, tmp_path, ranges):
    server.cuts = [100] * 5
    with pytest.raises(UserError):
        download(server.url, tmp_path / "f", None, print, pause=0.001)
    server.content, server.ranges = b"another file" * 100, ranges
    said: list[str] = []
    download(server.url, tmp_path / "f", None, said.append)
    assert (tmp_path / "f").read_bytes() == server.content
    assert any("starting anew" in line for line in said)


def test_wrong_hash_wrong_url_and_no_server(server, tmp_path):
    with pytest.raises(UserError, match="SHA-256"):
        download(server.url, tmp_path / "f", "0" * 64, print)
    assert list(tmp_path.glob("f*")) == []
    with pytest.raises(UserError, match="HTTP 404"):
        download(server.url + "x", tmp_path / "f", None, print)
    for url in ("file:///etc/passwd", "ftp://127.0.0.1/x", "x"):
        with pytest.raises(UserError, match="http or https"):
            download(url, tmp_path / "f", None, print)
    server.close()
    with pytest.raises(UserError, match="breaks off"):
        download(server.url, tmp_path / "f", None, print, pause=0.001)


def test_a_full_disk_is_said_before_and_during_the_download(server, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(download_module.shutil, "disk_usage", lambda path: usage._replace(free=10))
        with pytest.raises(UserError, match="too little free disk"):
            download(server.url, tmp_path / "f", None, print)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download_module, "_copy", full)
    with pytest.raises(UserError, match="the disk is full"):
        download(server.url, tmp_path / "f", None, print)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("9", prompt=[]), "row 3 of .* prompt"),
        (row("9", reward_model={"ground_truth": " ", "style": "rule"}), "row 3 of .*ground_truth"),
        (row("9", reward_model={"ground_truth": None, "style": "rule"}), "row 3 of .*ground_truth"),
        (row("9", extra_info={"index": None}), "row 3 of .* index"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, bad, message):
    source = tmp_path / "in.parquet"
    write_parquet(source, [row("1"), row("2"), bad])
    with pytest.raises(UserError, match=message):
        convert(source, "0" * 64, "http://127.0.0.1/", tmp_path / "out.jsonl", print)
    assert not (tmp_path / "out.jsonl").exists()
    assert read_manifest(tmp_path / "out.jsonl") is None


def test_not_parquet_and_missing_columns(tmp_path):
    source = tmp_path / "in.parquet"
    source.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="not parquet"):
        convert(source, "", "", tmp_path / "out.jsonl", print)
    pq.write_table(pa.Table.from_pylist([{"prompt": "x"}]), source)
    with pytest.raises(UserError, match="without column"):
        convert(source, "", "", tmp_path / "out.jsonl", print)


def test_text_stays_utf8(tmp_path):
    source = tmp_path / "in.parquet"
    write_parquet(source, [row("1", "wie groß ist π²?")])
    convert(source, "", "", tmp_path / "out.jsonl", print)
    assert "wie groß ist π²?" in (tmp_path / "out.jsonl").read_text(encoding="utf-8")
