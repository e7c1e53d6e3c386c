"""The command: every family's proofs and rows, a table for people, one JSON a family."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu import FAMILIES, RESULTS, Result
from benchmarks.gpu.sources import digest, sources


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="rlk-repro bench gpu", description="Prove and time the GPU operators in one call."
    )
    command.add_argument("--family", action="append", choices=tuple(FAMILIES), help="one family (all of them)")
    command.add_argument("--seconds", type=float, default=480.0, help="time for everything; what is done is written")
    command.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the JSON files go")
    command.add_argument("--no-proofs", action="store_true", help="time only")
    command.add_argument(
        "--stress", type=float, metavar="SECONDS", help="no figures: the same calls of every form again and again"
    )
    command.add_argument("--only", default="", metavar="TEXT", help="--stress: forms whose name holds this")
    command.add_argument("--seed", type=int, default=1, help="--stress: of sizes and values (1)")
    return command


def main(argv: list[str]) -> int:
    """Exit code 0 when every proof holds and every family ended, 1 otherwise, 2 without a GPU.

    SIGTERM ends the time at once: the family at work is written as far as it got, the others are not begun.
    """
    options = parser().parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write(
            "rlk-repro: found no GPU, expected one that torch sees; hint: run this on a machine with a GPU\n"
        )
        return 2
    from benchmarks.gpu.device import Device

    if options.stress is not None:
        from benchmarks.gpu.stress import main as stress

        return stress(options.stress, options.only, options.seed, options.out)
    device, good = Device(options.seconds), True
    signal.signal(signal.SIGTERM, lambda number, frame: device.stop())
    options.out.mkdir(parents=True, exist_ok=True)
    for family in options.family or FAMILIES:
        if device.over():
            print(f"{family}: not begun, out of time", flush=True)
            good = False
            continue
        started = time.monotonic()
        module = importlib.import_module(FAMILIES[family])
        result = Result(family, digest(sources(Path(str(module.__file__)))), device.about(), ended="interrupted")
        _collect(result, module, device, options.out / f"gpu-{family}.json", proofs=not options.no_proofs)
        _print(result, time.monotonic() - started)
        good = good and result.ended == "complete" and all(proof.holds for proof in result.proofs)
        torch.cuda.empty_cache()
    return 0 if good else 1


def _collect(result: Result, module: object, device: object, target: Path, *, proofs: bool) -> None:
    """Fills ``result`` with what the family yields and writes it row by row; its end too, also when it breaks."""
    from benchmarks.gpu.device import OutOfTime

    try:
        if proofs:
            for proof in module.prove(device):  # type: ignore[attr-defined]
                result.proofs.append(proof)
            target.write_text(result.json())
        for row in module.measure(device):  # type: ignore[attr-defined]
            result.rows.append(row)
            target.write_text(result.json())
        result.ended = "complete"
    except OutOfTime:
        result.ended = "out of time"
    except Exception as error:  # the other families still run, and the JSON says what happened
        traceback.print_exc()
        result.ended = f"{type(error).__name__}: {error}"
    target.write_text(result.json())


def _print(result: Result, seconds: float) -> None:
    held, of = sum(proof.holds for proof in result.proofs), len(result.proofs)
    print(f"{result.family}: {result.ended} in {seconds:.0f} s; {held} of {of} proofs hold; {result.digest[:16]}")
    for proof in result.proofs:
        if not proof.holds:
            kind = "control not caught" if proof.control else f"{proof.differing} of {proof.elements} differ"
            print(f"  FAILED {proof.name}: {kind}")
    for row in result.rows:
        bound = "" if row.must is None else f"must {row.must:g} aim {row.aim:g}"
        print(f"  {row.verdict():6} {row.value:8.3f}  {bound:20} {row.name} ({row.baseline})", flush=True)
