"""``python -m benchmarks rollout|train|ops|parallel|e2e|gpu|gpu-rollout`` (also ``./rlk bench ...``).

Contestants take turns in one process (A B A B ...), so that a slow minute of the machine hits both. The table goes to
standard error; the JSON goes to ``--out``, or to standard output.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import NoReturn

# verb -> (module with main(options) -> Report, help)
REGISTRY = {
    "rollout": ("benchmarks.rollout", "generated tokens/s over batch sizes and lengths; transformers beside"),
    "train": ("benchmarks.train", "tokens/s of one update over batch sizes and lengths"),
    "ops": ("benchmarks.ops", "time of every operator over row counts"),
    "parallel": ("benchmarks.parallel", "seconds and bytes sent of TP and CP layouts against one rank"),
    "e2e": ("benchmarks.e2e", "seconds per phase of a paired run, on Ray"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rlk-repro: found {message}, expected bench NAME [options]; hint: see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """One set of flags for every benchmark."""
    root = _Parser(prog="rlk-repro bench", description="Side-by-side benchmarks, JSON results.")
    verbs = root.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (_, text) in REGISTRY.items():
        child = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        child.add_argument("--full", action="store_true", help="more sizes and rounds (minutes)")
        child.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes (standard output)")
        child.add_argument(
            "--threads", type=int, metavar="N", help="threads of every contestant (this machine's cores)"
        )
        child.add_argument("--rounds", type=int, metavar="N", help="turns of every contestant (2; 5 with --full)")
        if name == "e2e":
            child.add_argument("--workspace", metavar="DIR", help="workspace of the run (the launcher's own default)")
        else:
            child.add_argument("--layers", type=int, metavar="N", help="cut the model to N layers")
        if name != "ops":
            default = "the demo model" if name == "e2e" else "random weights of SmolLM2-135M's shape"
            child.add_argument("--model-root", type=Path, metavar="DIR", help=f"checkpoint ({default})")
    verbs.add_parser("gpu", help="proofs and times of the GPU operators (its own flags: gpu --help)")
    verbs.add_parser("gpu-rollout", help="generated tokens/s on a GPU, graphs on and off (its own flags)")
    return root


def main(argv: list[str] | None = None) -> int:
    """Runs one benchmark; exit code 0, or 2 for a wrong command line."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["gpu"]:  # flags of its own: it times a device, not threads
        from benchmarks.gpu.run import main as gpu

        return gpu(words[1:])
    if words[:1] == ["gpu-rollout"]:
        from benchmarks.gpu_rollout import main as gpu_rollout

        return gpu_rollout(words[1:])
    options = parser().parse_args(words)
    cores = len(os.sched_getaffinity(0))
    options.threads = options.threads or cores
    options.rounds = options.rounds or (5 if options.full else 2)
    # OpenMP reads it when torch is imported, so this comes first.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from rl_engine.records.errors import UserError

    try:
        report = importlib.import_module(REGISTRY[options.name][0]).main(options)
    except UserError as error:
        sys.stderr.write(f"rlk-repro: {error}\n")
        return 2
    report.print(sys.stderr)
    if options.out is None:
        sys.stdout.write(report.json())
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(report.json())
        sys.stderr.write(f"written: {options.out.resolve()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
