"""The command: every family's proofs and rows, a table for people, one JSON a family."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path

from benchmarks.gpu import FAMILIES, RESULTS, Result, digest


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="rlk-repro bench gpu", description="Prove and time the GPU operators in one call."
    )
    command.add_argument("--family", action="append", choices=tuple(FAMILIES), help="one family (all of them)")
    command.add_argument("--seconds", type=float, default=480.0, help="time for everything; what is done is written")
    command.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the JSON files go")
    command.add_argument("--no-proofs", action="store_true", help="time only")
    return command


def main(argv: list[str]) -> int:
    """Exit code 0 when every proof holds and every family ended, 1 otherwise, 2 without a GPU."""
    options = parser().parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write(
            "rlk-repro: found no GPU, expected one that torch sees; hint: run this on a machine with a GPU\n"
        )
        return 2
    from benchmarks.gpu.device import Device

    device, good = Device(options.seconds), True
    options.out.mkdir(parents=True, exist_ok=True)
    for family in options.family or FAMILIES:
        module = importlib.import_module(FAMILIES[family])
        result = Result(family, digest(module.SOURCES), device.about())
        _collect(result, module, device, proofs=not options.no_proofs)
        (options.out / f"gpu-{family}.json").write_text(result.json())
        _print(result)
        good = good and result.ended == "complete" and all(proof.holds for proof in result.proofs)
        torch.cuda.empty_cache()
    return 0 if good else 1


def _collect(result: Result, module: object, device: object, *, proofs: bool) -> None:
    """Fills ``result`` with what the family yields; its end is recorded, also when it breaks."""
    from benchmarks.gpu.device import OutOfTime

    try:
        if proofs:
            for proof in module.prove(device):  # type: ignore[attr-defined]
                result.proofs.append(proof)
        for row in module.measure(device):  # type: ignore[attr-defined]
            result.rows.append(row)
    except OutOfTime:
        result.ended = "out of time"
    except Exception as error:  # the other families still run, and the JSON says what happened
        traceback.print_exc()
        result.ended = f"{type(error).__name__}: {error}"


def _print(result: Result) -> None:
    held = sum(proof.holds for proof in result.proofs)
    print(f"{result.family}: {result.ended}; {held} of {len(result.proofs)} proofs hold; {result.digest[:16]}")
    for proof in result.proofs:
        if not proof.holds:
            kind = "control not caught" if proof.control else f"{proof.differing} of {proof.elements} differ"
            print(f"  FAILED {proof.name}: {kind}")
    for row in result.rows:
        bound = "" if row.must is None else f"must {row.must:g} aim {row.aim:g}"
        print(f"  {row.verdict():6} {row.value:8.3f}  {bound:20} {row.name} ({row.baseline})")
