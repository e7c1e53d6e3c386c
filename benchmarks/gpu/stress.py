"""``bench gpu --stress``: calls of every GPU operator in every form, repeated and disturbed, and the wrong ones."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from benchmarks.gpu import SCHEMA
from benchmarks.gpu.device import Device
from benchmarks.gpu.model import QWEN3_8B
from benchmarks.gpu.sources import digest, sources
from rl_engine.models.config import parse_config
from rl_engine.qualify.gpu import stress, subjects

CHILDREN = 3  # one launches while another replays


def main(seconds: float, only: str, seed: int, out: Path) -> int:
    """Prints calls and wrong ones by form; ``gpu-stress.json`` keeps them. Exit code 0 when no form had a wrong call
    and every control was caught."""
    started = time.monotonic()
    said = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    tallies = stress.stress(parse_config(QWEN3_8B), seconds, seed=seed, children=CHILDREN, only=only, say=said)
    calls = sum(tally.calls for tally in tallies if not tally.control)
    wrong = sum(tally.wrong for tally in tallies if not tally.control)
    decodes = sum(tally.calls for tally in tallies if not tally.control and tally.name.startswith("decode"))
    for line in stress.report(tallies):
        print(line, flush=True)
    held = sum(tally.holds for tally in tallies)
    print(f"{held} of {len(tallies)} forms hold; {calls} calls, {decodes} of them of decode, {wrong} wrong", flush=True)
    body = {
        "schema": SCHEMA,
        "family": "stress",
        "digest": digest(sources(Path(subjects.__file__))),
        "device": Device(0).about(),
        "seconds": round(time.monotonic() - started, 1),
        "seed": seed,
        "only": only,
        "calls": calls,
        "decode_calls": decodes,
        "wrong": wrong,
        "forms": [{**dataclasses.asdict(tally), "holds": tally.holds} for tally in tallies],
    }
    (out / "gpu-stress.json").write_text(json.dumps(body, indent=1) + "\n")
    return 0 if held == len(tallies) else 1
