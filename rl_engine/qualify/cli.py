"""``rlk-repro qualify``: proves the operators on this machine and a model's shapes, and prints what held."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl_engine.records.errors import UserError

if TYPE_CHECKING:
    from rl_engine.models.config import ModelConfig


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, "qualify [options]", "see rlk-repro qualify --help")


def parser() -> argparse.ArgumentParser:
    """The verb's parser."""
    out = _Parser(
        prog="rlk-repro qualify",
        description="Prove the operators on this machine and a model's shapes, and print what held. "
        "Exit 0: every case is equal in bits; 1: one is not, and is named; 2: a mistake in the call.",
    )
    out.add_argument("--model-root", type=Path, help="checkpoint whose shapes are proven (default: the demo model's)")
    out.add_argument(
        "--provider", default=None, help="cpu (the C chain), torch (no compiler) or gpu; default: what runs use"
    )
    out.add_argument("--tp", type=int, action="append", help="GPU: also the slices of this many ranks (repeatable)")
    out.add_argument("--again", action="store_true", help="GPU: prove anew where a kept proof still holds")
    out.add_argument("--threads", type=int, default=None, help="threads (default: the machine's cores)")
    out.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return out


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every case is equal in bits, 1 otherwise.

    On a GPU a proof that was made for the same shapes, device, driver, versions and sources is not made twice.

    Raises:
        UserError: a flag that does not exist, a model folder that cannot be read, or no GPU where one is asked for.
    """
    arguments = parser().parse_args(argv)

    import os

    import torch

    from rl_engine.models.config import UnsupportedModel, parse_config, read_config
    from rl_engine.numerics.contract import Contract
    from rl_engine.numerics.providers import capabilities, judged
    from rl_engine.ops import library, uniform
    from rl_engine.qualify.proof import prove
    from rl_engine.qualify.status import remember

    usual = "gpu" if torch.cuda.is_available() else "cpu" if library.available() else "torch"
    name = arguments.provider or usual
    known = judged()
    if name not in (*known, "gpu"):
        words = f"{', '.join(known)} or gpu"
        raise UserError(f"--provider {name}", words, "leave it out to prove what runs use")
    if name == "gpu" and not torch.cuda.is_available():
        raise UserError("no GPU that torch sees", "a GPU for --provider gpu", "leave the flag out here")
    threads = arguments.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    if name in known and capabilities(name).compiled:
        library.set_threads(threads)
    try:
        config = read_config(arguments.model_root) if arguments.model_root else parse_config(DEMO_SHAPE)
    except OSError as error:
        found = f"{error.filename or arguments.model_root} ({error.strerror or error})"
        raise UserError(found, "a Llama or Qwen3 checkpoint", "check --model-root") from error
    except UnsupportedModel as error:
        raise UserError(error.found, error.expected, error.hint) from error
    if name == "gpu":
        return _gpu(config, _sizes(config, arguments.tp or ()), again=arguments.again, as_json=arguments.json)
    contract = Contract(gemm=capabilities(name).gemm)
    result = prove(config, [uniform(name)], contract)
    remember(contract.id, result.digest, len(result.failed))
    if arguments.json:
        body = {"contract": contract.id, "digest": result.digest, "seconds": result.seconds}
        print(json.dumps({**body, "cases": [dataclasses.asdict(case) for case in result.cases]}, indent=1))
    else:
        for case in result.cases:
            verdict = "equal" if not case.differing else f"{case.differing} of {case.elements} DIFFER"
            print(f"{case.operator:14} {case.provider:8} {case.what:28} {verdict}")
        print(f"{contract.id}: {len(result.cases) - len(result.failed)} of {len(result.cases)} cases equal in bits")
    print(f"qualified in {result.seconds:.1f} s, digest {result.digest[:16]}", file=sys.stderr)
    return 1 if result.failed else 0


def _sizes(config: ModelConfig, asked: Sequence[int]) -> tuple[int, ...]:
    """The numbers of tensor-parallel ranks, 1 always among them.

    Raises:
        UserError: a number into which a linear layer cannot be cut.
    """
    widths = (config.hidden, config.intermediate, config.heads * config.head_dim, config.kv_heads * config.head_dim)
    for size in asked:
        if size < 1 or any(width % size for width in widths):
            known = ", ".join(str(n) for n in range(1, 65) if not any(width % n for width in widths))
            raise UserError(f"--tp {size}", f"a number of ranks that cuts this model: {known}", "correct --tp")
    return tuple(sorted({1, *asked}))


def _gpu(config: ModelConfig, tp_sizes: tuple[int, ...], *, again: bool, as_json: bool) -> int:
    """Proves, times and keeps the table that the GPU's products run by; prints the kept proof where one holds."""
    from rl_engine.ops.gemm_table import NotQualified, path
    from rl_engine.qualify.gpu import prices, run

    record = None if again else run.kept(config, tp_sizes)
    told = "proven earlier (--again proves anew)"
    if record is None:
        _say(f"proving this GPU's operators for {run.model(config)}: one to three minutes, then it is kept")
        try:
            result = run.prove(config, tp_sizes, say=_say)
        except NotQualified as error:
            raise UserError(str(error), "a GPU whose proof can name what it holds for", "check its driver") from error
        run.keep(result)
        record, told = result.record(), f"qualified in {result.seconds:.0f} s"
    if record["failed"]:
        record["levels"] = prices.levels(record["prices"])
    else:
        with warnings.catch_warnings():
            # torch says of each attention backend that cannot run a shape why; such a backend is only left out.
            warnings.filterwarnings("ignore", category=UserWarning, module="rl_engine.qualify.gpu.prices")
            prices.complete(record, config, _say)
    if as_json:
        print(json.dumps(record, indent=1))
    else:
        _print(record)
    kept = "nothing kept, consistency refused" if record["failed"] else f"kept in {path()}"
    print(f"{told}, digest {record['digest'][:16]}, {kept}", file=sys.stderr)
    return 1 if record["failed"] else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(record: dict[str, Any]) -> None:
    """Failures, refuted candidates, controls, prices of the guarantees, counts."""
    for case in (*record["failed"], *record["refuted"]):
        verdict = "NOT CAUGHT" if case["control"] else f"{case['differing']} of {case['elements']} DIFFER"
        print(f"{case['operator']:14} {case['provider']:8} {case['what']}: {verdict}")
    for case in record["controls"]:
        if case["differing"]:
            print(f"{'control':14} {case['operator']}, {case['what']}: caught")
    for level, points in record["levels"].items():
        print(f"{level}, time against native: " + ", ".join(f"{n} rows {price}" for n, price in points.items()))
    print(
        f"{record['cases']} cases, {record['outputs']} outputs: {len(record['failed'])} failed, "
        f"{len(record['refuted'])} candidates refuted and not chosen"
    )


DEMO_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
}
