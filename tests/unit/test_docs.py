"""The documentation: it builds strictly, opens from disk without a network, and its generated pages are fresh."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_engine.records.errors import UserError
from tests.helpers import browser as browsers
from tools import certified, docs, messages

ROOT = Path(__file__).resolve().parents[2]
REMOTE = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(https?:)?//"
    r"|<link[^>]*rel=\"(?:stylesheet|preload)\"[^>]*href=\"(https?:)?//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed here")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 60
    return folder


def test_site_builds_strictly_and_holds_every_page(site: Path) -> None:
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    wanted |= {Path(name).with_suffix(".html") for name in docs.made()}
    assert {path.relative_to(site) for path in site.rglob("*.html")} >= wanted


def test_site_asks_no_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert REMOTE.search(path.read_text()) is None, path.name


def test_site_opens_from_disk(site: Path) -> None:
    if browsers.find() is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with browsers.Browser() as browser:
        for name in ("index.html", "concepts/why-bits-differ.html", "reference/messages.html"):
            browser.open(site / name, 1440, 900)
            assert browser.messages == [], name
            shown = "[...document.images].every(i => i.complete && i.naturalWidth > 100)"
            assert browser.ask(shown), name
        browser.ask("document.querySelector('[data-md-toggle=search]').click()")
        browser.ask("document.querySelector('.md-search__input').focus()")
        browser.ask(
            "(() => { const i = document.querySelector('.md-search__input'); i.value = 'checkpoint';"
            " i.dispatchEvent(new Event('keyup', {bubbles: true})); i.dispatchEvent(new Event('input')) })()"
        )
        end = time.monotonic() + 20
        while not browser.ask("document.querySelectorAll('.md-search-result__item').length"):
            assert time.monotonic() < end, "the search finds nothing from disk"
            time.sleep(0.1)
        assert browser.messages == []


def test_committed_pages_are_fresh() -> None:
    for path, text in docs.kept().items():
        assert path.read_text() == text, f"run python -m tools.docs ({path.name})"


def test_every_message_has_a_cause() -> None:
    """A new folder needs a sentence in ``tools.messages.CAUSES``; no message is without its place on the page."""
    found = messages.collect()
    assert len(found) > 150
    page = messages.page("")
    for message in found:
        _, sentence = messages.cause(message.file)
        assert sentence in page and messages._cell(message.found) in page, message


def test_messages_are_found_in_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "newroom").mkdir()
    (tmp_path / "newroom/a.py").write_text('raise UserError(f"no {x}", "a" + "b", "h")\nraise RecordError("r", "e")\n')
    monkeypatch.setattr(messages, "PACKAGE", tmp_path)
    first, second = messages.collect()
    assert (first.found, first.expected, first.hint) == ("no …", "ab", "h") and second.hint == ""
    with pytest.raises(KeyError):
        messages.page("")


def test_evidence_is_of_valid_runs() -> None:
    for record in certified.records():
        assert record.gates_passed <= record.gates and len(record.seal_root) == len(record.plan_digest) == 64
        assert record.mismatches == 0 if record.mode == "consistency" else record.mismatches > 0


def test_only_sealed_valid_runs_become_evidence(tmp_path: Path) -> None:
    from rl_engine.report.collect import collect
    from tests.helpers.synthetic_run import make_run

    make_run(tmp_path / "r")
    (run,) = collect(tmp_path, include_unsealed=True).runs
    with pytest.raises(UserError, match="not a valid sealed run"):
        certified.from_run(run)


def test_quoted_symptoms_are_said_by_the_code() -> None:
    """Every quoted text in the first column of the troubleshooting tables stands in the source, piece by piece."""
    files = [*(ROOT / "rl_engine").rglob("*.py"), ROOT / "rlk"]
    source = " ".join(" ".join(path.read_text().split()) for path in files).replace('" f"', "").replace('" "', "")
    page = (ROOT / "docs/guides/troubleshooting.md").read_text()
    firsts = re.findall(r"^\| ([^|]*) \|", page, re.MULTILINE)
    quotes = [text for cell in firsts for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quotes) > 25
    quotes.remove("No space left on device")  # the system's own words
    missing = [text for text in quotes for part in re.split(r"…|\.\.\.", text) if part.strip() not in source]
    assert missing == []
