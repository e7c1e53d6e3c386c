"""Generation on a GPU: the engine with graphs, without, and with torch's own operators, in turns.

Random weights of Qwen3-8B's shape with a few layers. ``decode`` times passes in which every sample appends one token;
``ragged`` times whole samples from prompt to end, of different lengths, more of them than run at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.model import QWEN3_8B
from benchmarks.measure import Case, Report, Timing

CONTESTANTS = ("native", "launched", "graphs")


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="rlk-repro bench gpu-rollout", description="Tokens/s of the rollout engine on a GPU, graphs on and off."
    )
    command.add_argument("--batch", type=int, action="append", metavar="N", help="samples at once (8 and 64)")
    command.add_argument("--layers", type=int, default=8, metavar="N", help="layers of Qwen3-8B's shape (8)")
    command.add_argument("--prompt", type=int, default=1000, metavar="N", help="prompt tokens (1000)")
    command.add_argument("--new", type=int, default=64, metavar="N", help="response tokens (64)")
    command.add_argument("--page", type=int, default=64, metavar="N", help="tokens of a KV page (64)")
    command.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of every contestant (3)")
    command.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes (standard output)")
    return command


def main(argv: list[str]) -> int:
    """Exit code 0, or 2 without a GPU."""
    options = parser().parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write(
            "rlk-repro: found no GPU, expected one that torch sees; hint: run this on a machine with a GPU\n"
        )
        return 2
    report = measure(options)
    report.print(sys.stderr)
    if options.out is None:
        sys.stdout.write(report.json())
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(report.json())
    return 0


def measure(options: argparse.Namespace) -> Report:
    """(samples at once, keys at the start): decode passes, then whole samples of ragged lengths."""
    import torch

    from rl_engine.models.config import parse_config

    config = dataclasses.replace(parse_config(QWEN3_8B), layers=options.layers)
    device, provider = torch.device("cuda", 0), _products()
    weights = _weights(config, device)
    about = {"model": f"Qwen3-8B shape, {options.layers} layers", "device": torch.cuda.get_device_name(0)}
    about |= {"products": provider, "page": options.page, "rounds": options.rounds}
    report = Report("gpu-rollout", about)
    for batch in options.batch or (8, 64):
        engines = {name: _engine(name, weights, provider, batch, options) for name in CONTESTANTS}
        even = _jobs(config, [options.prompt] * batch, [options.new] * batch)
        work = batch * (options.new - 1)
        name = f"decode, {batch} samples of {options.prompt} to {options.prompt + options.new} tokens"
        runs = _turns(engines, lambda engine, jobs=even: decode(engine, jobs), options)
        report.cases.append(Case(name, work, "tokens", runs))
        lengths, responses = _ragged(2 * batch, options)
        ragged = _jobs(config, lengths, responses)
        name = f"ragged, {2 * batch} samples, {batch} at once"
        runs = _turns(engines, lambda engine, jobs=ragged: whole(engine, jobs), options)
        report.cases.append(Case(name, sum(responses), "tokens", runs))
        replayed = engines["graphs"].statistics
        assert replayed.replayed > replayed.passes // 2, "hardly a pass was replayed"
        about[f"graphs of {batch}"] = replayed.captured
    return report


def _products() -> str:
    """``gpu`` where the products are proven on this device, else Triton's default tiles, which have the same bits."""
    from rl_engine.ops import gemm_table

    try:
        gemm_table.current()
    except gemm_table.NotQualified as error:
        sys.stderr.write(f"default tiles: {error}\n")
        return "triton"
    return "gpu"


def _weights(config: Any, device: Any) -> Any:
    """Normal weights, drawn on the device."""
    import torch

    from rl_engine.models.weights import ModelWeights

    def read(name: str, first: int, last: int) -> Any:
        shape, random = config.tensor_shapes()[name], torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16)
        return (1 + 0.1 * values if len(shape) == 1 else 0.02 * values)[first:last]

    return ModelWeights(config, read, device=device)


def _engine(name: str, weights: Any, provider: str, batch: int, options: argparse.Namespace) -> Any:
    """Engines only read the weights, so all have the same."""
    from rl_engine.engines.rollout.builtin.engine import RolloutEngine, RolloutSettings
    from rl_engine.ops import Operators, uniform

    operators = Operators(uniform("stock", update="triton") if name == "native" else uniform(provider))
    sizes = tuple(range(1, batch + 1)) if name == "graphs" else ()
    settings = RolloutSettings(max_batch=batch, chunk=2048, page=options.page, graph_sizes=sizes)
    return RolloutEngine(weights, operators, options.prompt + options.new, settings, name)


def _jobs(config: Any, lengths: list[int], responses: list[int]) -> list[Any]:
    import numpy as np

    from rl_engine.engines.rollout.builtin.engine import Job
    from rl_engine.engines.types import Request, SamplingSettings

    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(3, config.vocabulary, size=length).tolist()) for length in lengths]
    return [
        Job(Request(number, 0, prompt), 0, SamplingSettings(1.0, 1.0, -1, new, 0, ()))
        for number, (prompt, new) in enumerate(zip(prompts, responses, strict=True))
    ]


def _ragged(count: int, options: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Prompts of an eighth to a quarter of the length, responses of up to an eighth of it."""
    import numpy as np

    random, total = np.random.default_rng(1), options.prompt
    lengths = random.integers(total // 8, total // 4 + 1, size=count).tolist()
    return lengths, random.integers(total // 32, total // 8 + 1, size=count).tolist()


def _turns(engines: Mapping[str, Any], run: Callable[[Any], float], options: argparse.Namespace) -> dict[str, Timing]:
    """Once to warm up, then in turns."""
    timings = {name: Timing() for name in engines}
    for engine in engines.values():
        run(engine)
    for _ in range(options.rounds):
        for name, engine in engines.items():
            timings[name].seconds.append(run(engine))
    return timings


def decode(engine: Any, jobs: list[Any]) -> float:
    """Seconds of all passes behind the one that ends the last prompt."""
    import torch

    engine.memory.forget()
    for job in jobs:
        engine.add(job)
    while min(s.responses for s in (*engine.scheduler.running, *engine.scheduler.waiting)) == 0:
        engine.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    while engine.unfinished:
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def whole(engine: Any, jobs: list[Any]) -> float:
    """Seconds of all jobs, prompts too."""
    import torch

    engine.memory.forget()
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.run(jobs)
    torch.cuda.synchronize()
    return time.perf_counter() - started
