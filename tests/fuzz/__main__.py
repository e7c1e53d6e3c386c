"""``python -m tests.fuzz``: see the package."""

from __future__ import annotations

import argparse
import json
import sys

from tests.fuzz.families import FAMILIES
from tests.fuzz.runner import MEMORY_KB, run_family


def main() -> int:
    parser = argparse.ArgumentParser(description="Hostile input, family by family.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=1000, help="of every family")
    parser.add_argument("--family", choices=FAMILIES, action="append")
    options = parser.parse_args()
    bad = False
    for name in options.family or FAMILIES:
        outcome = run_family(name, options.seed, options.inputs)
        for key, text in outcome.faults:
            print(f"{key}\n{text}", file=sys.stderr)
        bad |= bool(outcome.faults) or outcome.grown_kb > MEMORY_KB
        counts = {"used": outcome.used, "refused": outcome.refused, "faults": len(outcome.faults)}
        print(json.dumps({"family": name, "seed": options.seed, **counts, "grown_kb": outcome.grown_kb}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
