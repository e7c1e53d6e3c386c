"""Planted secrets do not reach a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_engine.records.environment import collect_environment
from rl_engine.records.reader import RunReader
from rl_engine.records.redact import REDACTED, redact_text, redact_variables, secret_values
from rl_engine.records.types import EnvironmentRecord
from rl_engine.records.writer import RunWriter
from tests.helpers.synthetic_run import make_run

PLANTED = {
    "HF_TOKEN": "hf_" + "a1B2" * 8,
    "RAY_AUTH_TOKEN": "f00dfeedc0ffee112233",
    "MY_PASSWORD": "correct horse battery",
    "VLLM_API_KEY": "zxcvbnm98765",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCY",
}
TEXTS = [
    "token ghp_" + "x" * 36,
    "key AKIA" + "ABCDEFGH12345678",
    "jwt eyJhbGciOiJI.eyJzdWIiOiIx.abcdef",
    "clone https://user:hunter2secret@example.org/x.git",
    "Authorization: Bearer abcdefgh12345678",
    "api_key=abcdef123456",
    "auth_token: 12ab34cd56",
    '{"password": "sup3rs3cret"}',
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----",
]
LEAKS = [
    "ghp_x",
    "AKIAABCD",
    "eyJzdWIiOiIx",
    "hunter2secret",
    "abcdefgh12345678",
    "abcdef123456",
    "12ab34cd56",
    "sup3rs3cret",
    "MIIE",
]


def record() -> EnvironmentRecord:
    return collect_environment(
        phase="start",
        role="driver",
        engine="driver",
        rank=0,
        device="cpu",
        contract_id="c",
        contract_digest="d",
        qualification_digest=None,
        threads=None,
    )


@pytest.mark.parametrize(("text", "leak"), list(zip(TEXTS, LEAKS, strict=True)))
def test_known_shapes(text: str, leak: str) -> None:
    assert leak in text
    assert leak not in redact_text(text) and REDACTED in redact_text(text)


CREDENTIALS = [
    ("connect to redis://:hunter2secret@cache:6379/0", "connect to redis://[redacted]@cache:6379/0"),
    ("postgres://user:p@ss@db.example.org/x", "postgres://[redacted]@db.example.org/x"),
    ("amqp://user:p@s@s@h", "amqp://[redacted]@h"),
    ("https://user:pa/ss@host/x", "https://[redacted]@host/x"),
    ("https://ghost@host/x", "https://[redacted]@host/x"),
    ("two: a://:one@h, b://u:two@h", "two: a://[redacted]@h, b://[redacted]@h"),
    ("could not log in as user:p@ss@host", "could not log in as [redacted]@host"),
    ("proxy=user:secretword@proxy.local", "proxy=[redacted]@proxy.local"),
    ("RAY_PW=hunter2secret DB_PASS='hunter2secret'", "RAY_PW=[redacted] DB_PASS='[redacted]'"),
]


@pytest.mark.parametrize(("text", "clean"), CREDENTIALS)
def test_credentials_of_urls(text: str, clean: str) -> None:
    assert redact_text(text) == clean


SECRET_NAMES = [
    "RAY_PW",
    "RAY_REDIS_PW",
    "DB_PWD",
    "DB_PASS",
    "PW",
    "RAYPW",
    "DBPASS",
    "PASS",
    "REDIS_DSN",
    "MY_JWT",
    "X_PW2",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert redact_variables({f"RAY_{name}": "hunter2secret"}) == {f"RAY_{name}": REDACTED}
    assert secret_values({name: "hunter2secret"}) == ("hunter2secret",)


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "TORCH_BYPASS", "PASSES", "OMP_NUM_THREADS", "RLK_RUN_FOLDER"])
def test_names_of_no_secrets(name: str) -> None:
    assert secret_values({name: "/home/user"}) == ()


def test_plain_text_stays() -> None:
    for text in (
        "see http://127.0.0.1:8265/x@y, https://host/a:b?c=1, git@github.com:org/repo.git, a@b.org at 12:30:05",
        "image repo/name:1.2@sha256:0123456789abcdef, decode pass: 12.5345 ms, pip install git+https://host/x@main",
        "step 3: 512 tokens compared, 0 mismatches, tokens_per_s 81.5, /home/u/runs/token_ids.json",
        "tokens: 123456789, train_tokens_per_s=1234.5678, max_tokens=1048576, next_token: 49152000",
    ):
        assert redact_text(text) == text


def test_variables_are_an_allow_list() -> None:
    found = redact_variables({**PLANTED, "HOME": "/home/u", "OMP_NUM_THREADS": "2", "RAY_URL": "http://a:bcdef1@h"})
    assert found["OMP_NUM_THREADS"] == "2" and found["RAY_AUTH_TOKEN"] == REDACTED
    assert "HOME" not in found and "MY_PASSWORD" not in found and "bcdef1" not in found["RAY_URL"]


def test_no_planted_secret_in_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"/x/{PLANTED['VLLM_API_KEY']}/y")
    run = make_run(tmp_path / "run-1")
    writer = RunWriter.open(run)
    for value in (*PLANTED.values(), *TEXTS):
        writer.log(f"error: {value} refused")
        writer.event("warning", text=f"saw {value}", values=[value, 1])
    writer.environment(record())
    writer.state("invalid", f"could not log in with {PLANTED['MY_PASSWORD']}")
    everything = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    for leak in (*PLANTED.values(), *LEAKS):
        assert leak.encode() not in everything, leak
    assert RunReader(run).environments()[-1].versions["numpy"]
