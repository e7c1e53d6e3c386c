"""The semantic doctor's answer about one run, as a fragment of the page."""

from __future__ import annotations

import html

from rl_engine.records.errors import UserError
from rl_engine.report.collect import RunView

MOST_TOKENS = 20_000_000  # beyond this the doctor is asked by hand, not by every report


def cause_html(run: RunView) -> str:
    """Why the run's logprobs differ, or in one sentence that there is nothing to explain."""
    if not run.tokens:
        return "<p>No tokens to look at.</p>"
    if run.mismatches == 0:
        return f"<p>Nothing to explain: all {run.tokens:,} logprobs have equal bits.</p>"
    if run.tokens > MOST_TOKENS:
        return (
            f"<p>{run.tokens:,} tokens are too many for a page: <code>rlk-repro diagnose RUN_DIR</code> reads them.</p>"
        )
    from rl_engine.diagnose.doctor import diagnose
    from rl_engine.diagnose.load import load
    from rl_engine.diagnose.metrics import measure
    from rl_engine.diagnose.section import section

    try:
        log = load(run.run_dir)
        return section(diagnose(log), measure(log), heading="")
    except UserError as error:
        return f"<p>The semantic doctor cannot read these samples: {html.escape(str(error))}</p>"
