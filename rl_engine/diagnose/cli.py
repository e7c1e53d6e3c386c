"""``rlk-repro diagnose LOG``: why rollout and train logprobs differ.

Exit codes: 0 an answer was given and it is equality or rounding; 1 an answer was given and names another cause; 2 the
user's mistake (one line on stderr).
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from rl_engine.records.errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(message, "diagnose LOG [options]", "see rlk-repro diagnose --help")


def parser() -> argparse.ArgumentParser:
    """The verb's parser."""
    out = _Parser(
        prog="rlk-repro diagnose",
        description="Say why rollout and train logprobs differ, from logged tokens of any stack. "
        "Exit 0: equal or honest rounding; 1: another cause is named; 2: a mistake in the call or the log.",
    )
    out.add_argument("log", nargs="?", metavar="LOG", help="JSON lines, Parquet, or a run directory of this project")
    out.add_argument("--format", default="auto", help="verl, slime, vime, trl, nemo-rl, prime-rl, rlk (default: auto)")
    out.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a fact of the whole log, e.g. temperature=0.7, vocab_size=151936, page_size=16, dtype=bf16",
    )
    out.add_argument("--json", action="store_true", help="one JSON object on stdout")
    out.add_argument("--html", metavar="FILE", help="also write the report section with figures")
    out.add_argument("--clip", type=float, default=0.2, help="ratio clip for the clip fraction (default 0.2)")
    out.add_argument("--worst", type=int, default=10, help="number of worst tokens listed (default 10)")
    out.add_argument("--all", action="store_true", help="also list causes below the reporting threshold")
    out.add_argument("--fields", action="store_true", help="list the fields and every format's names, and stop")
    return out


def _settings(pairs: list[str]) -> dict[str, object]:
    out: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise UserError(f"--set {pair}", "--set name=value", "see diagnose --fields for names")
        out[name.strip().replace("-", "_")] = value.strip()
    return out


def run(argv: list[str]) -> int:
    """Do the work; raises UserError."""
    options = parser().parse_args(argv)
    from rl_engine.diagnose import render

    if options.fields:
        print(render.fields_text())
        return 0
    if options.log is None:
        raise UserError("no log", "a JSONL or Parquet file, or a run directory", "type rlk-repro diagnose LOG")
    if not 0 < options.clip < 20 or options.worst < 0:
        raise UserError(
            f"--clip {options.clip:g} --worst {options.worst}", "clip above 0, worst 0 or more", "correct it"
        )
    from rl_engine.diagnose.doctor import diagnose
    from rl_engine.diagnose.load import load
    from rl_engine.diagnose.metrics import measure
    from rl_engine.diagnose.section import section

    log = load(pathlib.Path(options.log), options.format, _settings(options.set))
    metrics = measure(log, options.clip, options.worst)
    diagnosis = diagnose(log)
    print(render.as_json(diagnosis, metrics) if options.json else render.text(diagnosis, metrics, options.all))
    if options.html:
        page = "<!doctype html><meta charset='utf-8'><title>diagnose</title>" + section(diagnosis, metrics)
        try:
            pathlib.Path(options.html).write_text(page, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--html {options.html}: {error.strerror}", "a writable file", "choose another path"
            ) from None
        print(f"wrote {options.html}", file=sys.stderr)
    return 1 if diagnosis.alarm else 0


def main(argv: list[str]) -> int:
    """Entry of the verb; ``argv`` is what follows ``diagnose``. Prints a user's mistake as one line and returns 2."""
    try:
        return run(argv)
    except UserError as error:
        print(f"rlk-repro: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
