"""Metrics against plain formulas, output, and single detectors on logs written by hand."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from rl_engine.diagnose import cli, metrics
from rl_engine.diagnose.causes import CAUSES, Evidence
from rl_engine.diagnose.detectors import distribution, facts
from rl_engine.diagnose.doctor import diagnose, rank, thresholds
from rl_engine.diagnose.frame import build_frame
from rl_engine.diagnose.log import LogFacts, SampleColumns, TokenLog
from rl_engine.diagnose.section import figures, section
from rl_engine.diagnose.stats import contrast, normal_score
from rl_engine.records.errors import UserError
from tests.faults import make_log
from tests.faults.files import write_jsonl


def tiny(rollout: list[float], train: list[float], lengths: list[int] | None = None, **extra: object) -> TokenLog:
    """A log of response tokens only."""
    sizes = lengths or [len(rollout)]
    return TokenLog(
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        mask=np.ones(len(rollout), bool),
        rollout=np.array(rollout, np.float32),
        train=np.array(train, np.float32),
        base_position=np.zeros(len(sizes), np.int64),
        **extra,  # type: ignore[arg-type]
    )


def test_metrics_by_their_formulas() -> None:
    rng = np.random.default_rng(1)
    rollout = -np.abs(rng.standard_normal(60)).astype(np.float32)
    train = (rollout + rng.standard_normal(60).astype(np.float32) * np.float32(0.3)).astype(np.float32)
    m = metrics.measure(tiny(rollout.tolist(), train.tolist(), [20, 40]), clip=0.2, worst=3)
    d = train.astype(np.float64) - rollout
    r = np.exp(d)
    assert m.k1 == pytest.approx(-d.mean())
    assert m.k3 == pytest.approx((r - 1 - d).mean())
    assert m.chi2 == pytest.approx((r**2).mean() - 1)
    assert m.ess == pytest.approx(r.sum() ** 2 / (60 * (r**2).sum()))
    assert m.clip_fraction == pytest.approx((np.abs(r - 1) > 0.2).mean())
    sequences = np.exp([d[:20].sum(), d[20:].sum()])
    assert m.sequence_ratio_mean == pytest.approx(sequences.mean())
    assert m.sequence_ess == pytest.approx(sequences.sum() ** 2 / (2 * (sequences**2).sum()))
    assert [abs(w.train - w.rollout) for w in m.worst] == pytest.approx(sorted(np.abs(d))[::-1][:3])
    assert m.quantiles[3] == pytest.approx(np.median(d))


def test_metrics_without_a_comparable_token_are_nan() -> None:
    m = metrics.measure(tiny([np.nan], [np.inf]))
    assert m.compared == 0 and np.isnan(m.k1)
    assert diagnose(tiny([np.nan], [np.inf])).reported[0].cause == "non-finite"


def test_equal_bits_are_exact_and_minus_zero_is_not() -> None:
    assert diagnose(tiny([-1.0, 0.0], [-1.0, 0.0])).reported[0].cause == "exact"
    assert diagnose(tiny([-1.0, 0.0], [-1.0, -0.0])).reported[0].cause == "signed-zero"
    assert metrics.measure(tiny([-1.0, 0.0], [-1.0, -0.0])).equal == 0.5


def test_one_sample_and_one_token_give_an_answer() -> None:
    for rollout, train in (([-1.0], [-1.01]), ([0.0], [0.0]), ([-1.0] * 40, [-1.1] * 40)):
        assert diagnose(tiny(rollout, train)).reported


def test_what_no_fingerprint_fits_is_called_unexplained() -> None:
    few = diagnose(tiny([-1.0, -2.0], [-2.0, -3.0]))
    assert few.reported[0].cause == "unexplained" and few.alarm
    assert diagnose(tiny([-1.0, -2.0], [-1.01, -1.99])).reported[0].cause == "rounding"


def test_other_ids_in_training_are_seen_directly() -> None:
    log = tiny([-1.0, -1.0], [-1.0, -3.0], tokens=np.array([4, 5], np.int32), train_tokens=np.array([4, 6], np.int32))
    assert facts.token_ids(log)[0].cause == "retokenised"


def test_an_id_beyond_the_vocabulary() -> None:
    log = tiny([-1.0], [-1.0], tokens=np.array([600], np.int32), facts=LogFacts(vocab_size=600))
    assert facts.token_ids(log)[0].cause == "padded-vocab"


def test_padding_that_equals_the_end_token_is_no_missing_end() -> None:
    tokens = np.array([5, 2, 2], np.int32)
    log = tiny([-1.0, -1.0, 0.0], [-1.0, -1.0, 0.0], tokens=tokens, facts=LogFacts(eos_token_id=2))
    counted = dataclasses.replace(log, mask=np.array([True, True, False]))
    assert facts.end_token(counted) == []
    missing = dataclasses.replace(counted, tokens=np.array([5, 6, 2], np.int32))
    assert facts.end_token(missing)[0].cause == "mask-eos"


def test_minus_infinity_needs_a_filter_to_be_a_lost_support() -> None:
    log = tiny([-1.0, -1.0], [-1.0, -np.inf])
    with_filter = dataclasses.replace(log, samples=SampleColumns(top_p=np.array([0.9]), top_k=np.array([-1])))
    without = dataclasses.replace(log, samples=SampleColumns(top_p=np.array([1.0]), top_k=np.array([-1])))
    assert facts.non_finite(with_filter)[0].cause == "support-not-replayed"
    assert facts.non_finite(without)[0].cause == "non-finite"


def test_binary_positions_give_the_exact_temperature() -> None:
    """Two columns per position: log-odds scale with the temperature ratio exactly."""
    rng = np.random.default_rng(5)
    odds = rng.uniform(-4, 4, 4000)
    first = rng.random(4000) < 1 / (1 + np.exp(-odds))
    signed = np.where(first, odds, -odds)
    rollout, train = -np.log1p(np.exp(-signed)), -np.log1p(np.exp(-signed * 0.7))
    frame = build_frame(tiny(rollout.tolist(), train.tolist(), [40] * 100))
    assert distribution.temperature_ratio(frame) == pytest.approx(0.7, abs=1e-3)
    shape = distribution.measure(frame)
    assert abs(shape.plus_t) < 4 < abs(shape.minus_t)  # the tokens were drawn from the rollout's distribution


def test_normal_score_tames_small_groups() -> None:
    assert normal_score(12.7, 1) == pytest.approx(1.96, abs=0.15)
    assert normal_score(-2.042, 30) == pytest.approx(-1.96, abs=0.02)
    assert normal_score(3.0, 1e9) == pytest.approx(3.0, rel=1e-6)
    # A group of two that happen to agree is not certain, whatever Welch's statistic says.
    assert abs(contrast(np.array([0.2, 0.2001]), np.linspace(0, 0.2, 30))) < 3


def test_general_causes_step_back_behind_specific_ones() -> None:
    noise = Evidence("quantised-rollout", 100, 1.0, "", {})
    heat = Evidence("temperature-missing", 50, 1.0, "", {})
    assert rank([noise])[0].cause == "quantised-rollout"
    ranked = rank([noise, heat])
    assert ranked[0].cause == "temperature-missing"
    assert not next(f for f in ranked if f.cause == "quantised-rollout").reported


def test_every_cause_has_a_threshold_a_title_and_a_hint() -> None:
    assert set(thresholds()) == {n for n, c in CAUSES.items() if c.kind != "fine"} - {"unexplained"}
    assert all(cause.title and cause.hint for cause in CAUSES.values())


def test_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(UserError, match="tokens"):
        tiny([-1.0], [-1.0], tokens=np.array([1, 2], np.int32))
    with pytest.raises(UserError, match="temperature"):
        tiny([-1.0], [-1.0], samples=SampleColumns(temperature=np.array([1.0, 1.0], np.float32)))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_section_is_balanced_html_and_escapes_names() -> None:
    log = make_log(("bad-engine",), 2, (5,))
    names = tuple(f"<script>{i}" for i in range(4))
    log = dataclasses.replace(log, source="<b>", samples=dataclasses.replace(log.samples, engine_names=names))
    diagnosis = diagnose(log)
    page = section(diagnosis, metrics.measure(log))
    assert "<script" not in page and "<b>" not in page
    tags = _Tags()
    tags.feed(page)
    assert not tags.open and "svg" in tags.seen
    assert [figure.name for figure in figures(diagnosis)] == ["position", "sample", "worker", "histogram", "qq"]


def test_text_json_and_html(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(make_log(("top-p-not-replayed",), 3, (0.1,)), tmp_path / "log.jsonl")
    assert cli.main([str(tmp_path / "log.jsonl"), "--html", str(tmp_path / "out.html"), "--all"]) == 1
    text = capsys.readouterr().out
    assert "support-not-replayed" in text and "next:" in text and "worst tokens" in text
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    assert cli.main([str(tmp_path / "log.jsonl"), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["findings"][0]["cause"] == "support-not-replayed" and answer["alarm"]
    assert cli.main([str(tmp_path / "log.jsonl"), "--html", str(tmp_path / "no" / "dir.html")]) == 2


def test_fields_lists_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--fields"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("verl", "slime", "trl", "nemo-rl", "prime-rl", "rollout_logprobs"))


def test_the_room_runs_without_torch() -> None:
    code = "import sys; import rl_engine.diagnose.cli as c; c.main(['--fields']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
