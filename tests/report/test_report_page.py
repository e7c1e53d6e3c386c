"""The page in a real browser: no error, every chart drawn, the records' numbers, phone and desktop, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_engine.records.reader import RunReader
from rl_engine.report.collect import collect
from rl_engine.report.page import experiment_charts, render
from tests.helpers import browser as browsers
from tests.helpers.browser import Browser
from tests.helpers.synthetic_run import make_run
from tests.report.conftest import STEPS

pytestmark = pytest.mark.skipif(
    browsers.find() is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)

SCREENS = [(390, 844, "light"), (390, 844, "dark"), (1440, 900, "light"), (1440, 900, "dark")]
# Every mark of a chart lies inside its drawing, and the drawing has a size.
DRAWN = """[...document.querySelectorAll('figure[data-key]')].map(f => {
  const svg = f.querySelector('svg.chart'), box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('rect.bar, polyline.line, .mark')].map(m => m.getBoundingClientRect());
  const inside = m => m.left >= box.left - 1 && m.right <= box.right + 1 &&
    m.top >= box.top - 1 && m.bottom <= box.bottom + 1;
  return {key: f.dataset.key, width: box.width, height: box.height, marks: marks.length, inside: marks.every(inside)};
})"""
# WCAG contrast of every text with its nearest painted background.
CONTRAST = """(() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parts = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = c => { const [r, g, b] = parts(c).map(channel); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const p = parts(getComputedStyle(e).backgroundColor);
    if (p.length === 3 || p[3] > 0) return getComputedStyle(e).backgroundColor; } return 'rgb(255,255,255)'; };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('h1,h2,h3,p,a,td,th,dd,dt,summary,li,button,b,span,svg text')) {
    if (!e.textContent.trim() || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), a = light(e.closest('svg') ? style.fill : style.color), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.tagName + ' ' + e.textContent.trim().slice(0, 40)];
  }
  return worst;
})()"""


@pytest.fixture(scope="module")
def page(output_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(collect(output_root, include_unsealed=True)))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.mark.parametrize(("width", "height", "theme"), SCREENS)
def test_page_is_whole_on_every_screen(page: Path, browser: Browser, width: int, height: int, theme: str) -> None:
    browser.open(page, width, height, theme)
    assert browser.messages == []
    assert browser.ask("document.documentElement.dataset.ready") == "yes"
    drawn = browser.ask(DRAWN)
    assert len(drawn) >= 14
    assert [chart for chart in drawn if not (chart["marks"] and chart["inside"] and chart["width"] > 250)] == []
    assert browser.ask("document.documentElement.scrollWidth") <= width
    ratio, where = browser.ask(CONTRAST)
    assert ratio >= 4.5, f"{where}: contrast {ratio:.2f}"
    background = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (theme == "dark")


def test_numbers_are_the_records(page: Path, browser: Browser, output_root: Path) -> None:
    """Every number behind every chart, read back out of the browser."""
    browser.open(page, 1440, 900)
    collection = collect(output_root, include_unsealed=True)
    for number, runs in enumerate(collection.experiments.values(), 1):
        for chart in experiment_charts(runs):
            cells = browser.ask(
                f"[...document.getElementById('experiment-{number}-{chart.key}').querySelectorAll('tbody tr')]"
                ".map(r => [...r.cells].slice(1).map(c => c.dataset.v ?? ''))"
            )
            shown = [[float(cell) if cell else math.nan for cell in row] for row in cells]
            wanted = [list(values) for values in zip(*(series.values for series in chart.series), strict=True)]
            assert repr(shown) == repr(wanted), chart.key
    totals = {"native": 0, "consistency": 0}
    for run in collection.runs:
        totals[run.mode] += sum(step.mismatches for step in RunReader(run.run_dir).steps())
    assert totals["native"] == 13 * STEPS and totals["consistency"] == 0
    for mode, total in totals.items():
        assert browser.ask(f"document.querySelector('.big[data-mode={mode}]').textContent") == f"{total:,}"
        assert int(browser.ask(f"document.querySelector('.big[data-mode={mode}]').dataset.mismatches")) == total


def test_keyboard_reads_a_chart(page: Path, browser: Browser) -> None:
    browser.open(page, 1440, 900)
    browser.press("Tab")
    assert browser.ask("document.activeElement.className") == "skip"
    order = []
    for _ in range(12):
        browser.press("Tab")
        order.append(browser.ask("document.activeElement.id || document.activeElement.tagName"))
    assert "theme" in order and "A" in order
    figure = "document.getElementById('experiment-2-mismatches')"
    browser.ask(f"{figure}.focus()")
    browser.press("End")
    assert browser.ask(f"{figure}.querySelector('.tip').textContent") == "step 12native 13consistency 0"
    assert browser.ask("document.getElementById('say').textContent") == "step 12, native 13, consistency 0"
    browser.press("ArrowLeft")
    assert browser.ask(f"{figure}.querySelector('.tip b').textContent") == "step 11"
    browser.press("Escape")
    assert browser.ask(f"{figure}.querySelector('.tip').hidden") is True


def test_colours_can_be_chosen(page: Path, browser: Browser) -> None:
    browser.open(page, 1440, 900, "light")
    colours = []
    for _ in range(3):
        browser.ask("document.getElementById('theme').click()")
        colours.append(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] == colours[2] != colours[1]


def test_print_shows_figures_and_hides_controls(page: Path, browser: Browser) -> None:
    browser.open(page, 794, 1123, "dark", media="print")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.ask("getComputedStyle(document.querySelector('header')).display") == "none"
    assert all(chart["marks"] and chart["inside"] for chart in browser.ask(DRAWN))


def test_a_hostile_page_runs_nothing(tmp_path: Path, browser: Browser) -> None:
    evil = '</script><script>document.title="owned"</script><svg onload=document.title="owned">'
    make_run(tmp_path / "runs/r", "native", profile=evil)
    path = tmp_path / "report.html"
    path.write_text(render(collect(tmp_path / "runs", include_unsealed=True)))
    browser.open(path, 1440, 900)
    assert browser.messages == []
    assert browser.ask("document.title").startswith("No consistency run")
    assert browser.ask("document.querySelector('h2[id^=experiment]').textContent").count("owned") == 2
    # The policy of the page would stop even a script that got in.
    browser.ask(
        "(() => { const s = document.createElement('script'); s.textContent = 'document.title=1';"
        " document.body.append(s) })()"
    )
    assert browser.ask("document.title") != "1"
    assert any("Content Security Policy" in message for message in browser.messages)
    browser.messages.clear()
