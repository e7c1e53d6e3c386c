"""The same calls again and again: whether a kernel gives one result every time, not only whether it can.

A race shows by chance: at unlucky sizes, beside other work, at a length of queue that a proof of a few calls never has.
So every operator, in every form, computes the same inputs many times, in graphs and launched one by one, alone and
beside other kernels and copies, at random sizes; some forms with sleeping warps (``delays``). Every result is compared
on the device with one that another kernel, or the same one on an idle device, gave.

A race may also end the process, since the device is lost with it. So the work is done by child processes: the one that
dies names its form, and the next one goes on with the other forms.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig, RopeScaling
from rl_engine.qualify.cases import Case
from rl_engine.qualify.gpu.data import Inputs

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SILENCE = 40.0  # seconds without a word of a child, which may compile a kernel meanwhile; then it hangs
HUNG = "it never ended"
CONTROL = 3.0  # seconds of a control
SHORT = 10.0  # seconds of ``qualify``
CHILDREN = 8
MODULE = "rl_engine.qualify.gpu.stress"  # what a child runs


@dataclasses.dataclass(frozen=True)
class Trial:
    """Calls of one form at some sizes.

    Attributes:
        what: the sizes.
        calls: of the form in one ``body``.
        body: makes them and returns every result. It leaves its inputs as they were.
        expected: the results; None: those of a first body on an idle device.
        stacked: a result is a tensor [calls, ...] of them all.
    """

    what: str
    calls: int
    body: Callable[[], Sequence[Tensor]]
    expected: Sequence[Tensor] | None = None
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class Subject:
    """One form of an operator.

    Attributes:
        make: a trial at random sizes.
        captured: the form can be part of a graph.
        control: it is wrong, and must be caught.
    """

    operator: str
    form: str
    make: Callable[[ModelConfig, Inputs, random.Random], Trial]
    captured: bool = True
    control: bool = False

    @property
    def name(self) -> str:
        return f"{self.operator}: {self.form}"


@dataclasses.dataclass
class Tally:
    """What became of one form.

    Attributes:
        calls, wrong: its calls, and those with another result.
        trials: sizes tried.
        first: the sizes of the first wrong call.
        lost: why a process ended early, if one did.
    """

    name: str
    control: bool = False
    calls: int = 0
    wrong: int = 0
    trials: int = 0
    first: str = ""
    lost: str = ""

    @property
    def holds(self) -> bool:
        if self.control:  # one that only hangs is another fault than the one it is kept for
            return bool(self.wrong or (self.lost and self.lost != HUNG))
        return bool(self.calls) and not self.wrong and not self.lost


class Traffic:
    """Other work on the device: copies on it and from the host, a product, in a stream of its own.

    A copy keeps the loads of every multiprocessor busy, which a product does not.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.stream, self.done = torch.cuda.Stream(), torch.cuda.Event()
        a, b = inputs.normal(2048, 4096), inputs.normal(4096, 2048)
        out, big = torch.empty(2048, 2048, dtype=torch.bfloat16, device="cuda"), inputs.normal(8, 4 << 20)
        target, here = torch.empty_like(big), torch.empty(4 << 20, dtype=torch.bfloat16).pin_memory()
        self.held = (a, b, out, big, target, here)
        self.stream.wait_stream(torch.cuda.current_stream())
        self.done.record(self.stream)

    def step(self) -> None:
        """Some more of it, where the last has ended."""
        if not self.done.query():
            return
        a, b, out, big, target, here = self.held
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                target.copy_(big)
            big[0].copy_(here, non_blocking=True)
            torch.mm(a, b, out=out)
            target.copy_(big)
            self.done.record(self.stream)


def hammer(trial: Trial, seconds: float, traffic: Traffic, captured: bool) -> tuple[int, int]:
    """(calls, those with a wrong result) of a trial: in a graph and launched, each alone and beside other work."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    first = trial.body()
    expected = [x.clone() for x in (first if trial.expected is None else trial.expected)]
    torch.cuda.synchronize()

    def once() -> None:
        for found, right in zip(trial.body(), expected, strict=True):
            assert found.shape == right.shape and found.dtype == right.dtype
            words = WORDS[found.element_size()]
            differ = found.contiguous().view(words) != right.contiguous().view(words)
            wrong.add_(differ.flatten(1).any(1).sum() if trial.stacked else differ.any())

    once()
    runs: list[tuple[Callable[[], None], float]] = [(once, 0.25 if captured else 1.0)]
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            once()
        runs.append((graph.replay, 0.75))
    bodies = 1
    for run, share in runs:
        for beside in (False, True):
            end = time.perf_counter() + seconds * share / 2
            while time.perf_counter() < end:
                for _ in range(4):
                    if beside:
                        traffic.step()
                    run()
                    bodies += 1
                torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    return bodies * trial.calls, int(wrong)


def worker(config: ModelConfig, names: Sequence[str], seconds: float, seed: int, out: IO[str]) -> None:
    """One child's work: trials of the named forms in turns until the time is over, a line of JSON about each."""
    from rl_engine.qualify.gpu.subjects import subjects

    def say(**words: Any) -> None:
        out.write(json.dumps(words) + "\n")
        out.flush()

    known = {subject.name: subject for subject in subjects(config)}
    inputs, dice, traffic = Inputs(seed), random.Random(seed), None
    started, turn, least = time.perf_counter(), 0, min(1.0, max(0.15, seconds / len(names) / 3))
    while turn < len(names) or time.perf_counter() - started < seconds:
        subject = known[names[turn % len(names)]]
        say(begin=subject.name)
        traffic = traffic or Traffic(inputs)
        trial = subject.make(config, inputs, dice)
        say(sizes=trial.what)
        if turn == 0:
            started = time.perf_counter()
        calls, wrong = hammer(trial, CONTROL if subject.control else least, traffic, subject.captured)
        say(done=subject.name, what=trial.what, calls=calls, wrong=wrong)
        del trial
        torch.cuda.empty_cache()
        turn += 1
    say(end=True)


def stress(
    config: ModelConfig,
    seconds: float,
    *,
    seed: int = 1,
    children: int = 1,
    only: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> list[Tally]:
    """Every form whose name holds ``only``, for about ``seconds`` in all; ``children`` processes work side by side."""
    from rl_engine.qualify.gpu.subjects import subjects

    chosen = [subject for subject in subjects(config) if only in subject.name]
    tallies = {subject.name: Tally(subject.name, subject.control) for subject in chosen}
    right = [subject.name for subject in chosen if not subject.control]
    groups = [(group, seconds) for i in range(children) if (group := right[i::children])]
    groups += [([subject.name], 0.0) for subject in chosen if subject.control]  # each may lose the device
    with concurrent.futures.ThreadPoolExecutor(max(children, 1)) as threads:
        jobs = [
            threads.submit(_children, config, names, each, seed + 1000 * i, tallies, say)
            for i, (names, each) in enumerate(groups)
        ]
        for job in jobs:
            job.result()
    return list(tallies.values())


def cases(config: ModelConfig, say: Callable[[str], None] = lambda line: None) -> list[Case]:
    """The short stress of ``qualify``."""
    found = stress(config, SHORT, children=min(CHILDREN, os.cpu_count() or 1), say=say)
    return [
        Case("stress", "gpu", _described(tally), max(tally.calls, 1), tally.wrong + bool(tally.lost), tally.control)
        if tally.calls or tally.control or tally.lost
        else Case("stress", "gpu", f"{tally.name}: not one call", 1, 1)
        for tally in found
    ]


def _described(tally: Tally) -> str:
    """A form, and where it went wrong."""
    return ", ".join(filter(None, (tally.name, tally.first, tally.lost)))


def _children(
    config: ModelConfig,
    names: list[str],
    seconds: float,
    seed: int,
    tallies: dict[str, Tally],
    say: Callable[[str], None],
) -> None:
    """Children one after the other, until every form of the group had its time; one that dies loses its form."""
    left, end = list(names), time.perf_counter() + seconds
    while left:
        lost = _child(config, left, max(end - time.perf_counter(), 0.0), seed, tallies)
        if lost is None:
            return
        say(f"{lost}: {tallies[lost].lost}")
        left = [name for name in left if name != lost]
        seed += 1


def _child(config: ModelConfig, names: list[str], seconds: float, seed: int, tallies: dict[str, Tally]) -> str | None:
    """Runs one; the form that was at work when it ended early, None if it came to its end."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    task = json.dumps({"config": dataclasses.asdict(config), "names": names, "seconds": seconds, "seed": seed})
    command = [sys.executable, "-m", MODULE, task]
    at, sizes, ended = names[0], "", False
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        watch = _Watch(child)
        assert child.stdout is not None
        for line in child.stdout:
            word = _parsed(line)
            watch.heard()
            at, sizes = word.get("begin", at), word.get("sizes", sizes)
            ended = ended or bool(word.get("end"))
            if "done" in word:
                tally = tallies[word["done"]]
                tally.calls += word["calls"]
                tally.wrong += word["wrong"]
                tally.trials += 1
                if word["wrong"] and not tally.first:
                    tally.first = word["what"]
        code = child.wait()
        watch.stop()
        if code == 0 and ended:
            return None
        errors.seek(0)
        said = [line.strip() for line in errors.read().splitlines() if line.strip()]
    why = HUNG if watch.fired else next((x for x in reversed(said) if "rror" in x), f"exit code {code}")
    tallies[at].lost = why[:200]
    tallies[at].first = tallies[at].first or sizes
    return at


def _parsed(line: str) -> dict[str, Any]:
    """A worker's line; what a library printed between them is none."""
    try:
        word = json.loads(line)
    except ValueError:
        return {}
    return word if isinstance(word, dict) else {}


class _Watch:
    """Ends a process that says nothing for too long."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.fired = False
        self._child, self._ended = child, threading.Event()
        self.heard()
        threading.Thread(target=self._watch, daemon=True).start()

    def heard(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            if time.monotonic() - self._last > SILENCE:
                self.fired = True
                self._child.kill()
                return


def main(argv: Sequence[str] | None = None) -> int:
    """A child: its task is one argument of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task")
    task = json.loads(parser.parse_args(argv).task)
    fields = task["config"]
    if fields["rope_scaling"] is not None:
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
    worker(ModelConfig(**fields), task["names"], task["seconds"], task["seed"], sys.stdout)
    return 0


def report(tallies: Sequence[Tally]) -> Iterator[str]:
    """Lines for people, one a form."""
    for tally in tallies:
        verdict = "holds" if tally.holds else "FAILED"
        if tally.control:
            verdict = "caught" if tally.holds else "NOT CAUGHT"
        where = f" ({', '.join(filter(None, (tally.first, tally.lost)))})" if tally.first or tally.lost else ""
        yield f"{verdict:7} {tally.name}: {tally.calls} calls at {tally.trials} sizes, {tally.wrong} wrong{where}"


if __name__ == "__main__":
    sys.exit(main())
