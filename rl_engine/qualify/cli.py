"""``rlk-repro qualify``: proves the operators on this machine and a model's shapes, and prints what held."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_engine.records.errors import UserError

if TYPE_CHECKING:
    from rl_engine.models.config import ModelConfig


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every case is equal in bits, 1 otherwise.

    Raises:
        UserError: a model folder that cannot be read.
    """
    parser = argparse.ArgumentParser(prog="rlk-repro qualify", description=__doc__)
    parser.add_argument(
        "--model-root", type=Path, help="checkpoint whose shapes are proven (default: the demo model's)"
    )
    parser.add_argument(
        "--provider", default=None, help="cpu (the C chain), torch (no compiler) or gpu; default: what runs use"
    )
    parser.add_argument("--tp", type=int, action="append", help="GPU: also the slices of this many ranks (repeatable)")
    parser.add_argument("--threads", type=int, default=None, help="threads (default: the machine's cores)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)

    import os

    import torch

    from rl_engine.models.config import UnsupportedModel, parse_config, read_config
    from rl_engine.numerics.contract import Contract
    from rl_engine.ops import library, uniform
    from rl_engine.qualify.proof import prove
    from rl_engine.qualify.status import remember

    usual = "gpu" if torch.cuda.is_available() else "cpu" if library.available() else "torch"
    name = arguments.provider or usual
    if name not in ("cpu", "torch", "gpu"):
        raise UserError(f"--provider {name}", "cpu, torch or gpu", "leave it out to prove what runs use")
    if name == "gpu" and not torch.cuda.is_available():
        raise UserError("no GPU that torch sees", "a GPU for --provider gpu", "leave the flag out here")
    threads = arguments.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    if name == "cpu":
        library.set_threads(threads)
    try:
        config = read_config(arguments.model_root) if arguments.model_root else parse_config(DEMO_SHAPE)
    except (UnsupportedModel, OSError) as error:
        raise UserError(str(error), "a Llama or Qwen3 checkpoint", "check --model-root") from error
    if name == "gpu":
        return _gpu(config, tuple(arguments.tp or (1,)), as_json=arguments.json)
    contract = Contract(gemm="chain" if name == "cpu" else "chain256")
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


def _gpu(config: ModelConfig, tp_sizes: tuple[int, ...], *, as_json: bool) -> int:
    """Proves, times and keeps the table that the GPU's products run by."""
    from rl_engine.ops.gemm_table import NotQualified, keep, path
    from rl_engine.qualify.gpu.run import prove

    try:
        result = prove(config, tuple(sorted({1, *tp_sizes})), say=lambda line: print(line, file=sys.stderr, flush=True))
    except NotQualified as error:
        raise UserError(str(error), "one whose bits are the anchor's", "report device and versions") from error
    record = result.record()
    if not result.failed:
        keep(result.table)
    if as_json:
        print(json.dumps(record, indent=1))
    else:
        for case in (*result.failed, *result.refuted):
            print(f"{case.operator:14} {case.provider:8} {case.what}: {case.differing} of {case.elements} DIFFER")
        for case in result.cases:
            if case.control:
                print(f"{'control':14} {case.what}: {'caught' if case.holds else 'NOT CAUGHT'}")
        for level, points in record["levels"].items():
            print(f"{level}, time against native: " + ", ".join(f"{n} rows {price}" for n, price in points.items()))
        print(
            f"{len(result.cases)} cases, {record['outputs']} outputs: {len(result.failed)} failed, "
            f"{len(result.refuted)} candidates refuted and not chosen"
        )
    kept = "nothing kept" if result.failed else f"kept in {path()}"
    print(f"qualified in {result.seconds:.0f} s, digest {result.table.digest[:16]}, {kept}", file=sys.stderr)
    return 1 if result.failed else 0


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
