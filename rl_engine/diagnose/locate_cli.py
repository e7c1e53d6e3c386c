"""``rlk-repro locate RUN`` and ``locate A B``: the first divergence within a run or between two.

Exit codes: 0 nothing differs; 1 something does, and it is said; 2 the user's mistake (one line on stderr).
"""

from __future__ import annotations

import argparse
import sys

from rl_engine.records.errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(message, "locate RUN, or locate A B", "see rlk-repro locate --help")


def parser() -> argparse.ArgumentParser:
    """The verb's parser."""
    out = _Parser(
        prog="rlk-repro locate",
        description="Find the first divergence: step, sample, token, and by computing step 0 again layer, operator and "
        "element. One run: rollout against trainer; two: the same side of both. Exit 0: none; 1: found; 2: a mistake.",
    )
    out.add_argument("run", metavar="RUN", help="run directory")
    out.add_argument("other", nargs="?", metavar="OTHER", help="a second run directory")
    out.add_argument("--records-only", action="store_true", help="do not compute again: step, sample and token only")
    out.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return out


def main(argv: list[str]) -> int:
    """Entry of the verb; ``argv`` is what follows ``locate``."""
    try:
        options = parser().parse_args(argv)
        from rl_engine.diagnose.locate import run

        return run(options)
    except UserError as error:
        print(f"rlk-repro: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
