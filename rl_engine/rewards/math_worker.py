"""The child process that compares mathematical answers; run by its file's path, it imports nothing of RL-Kernel.

Protocol, one JSON object a line, ASCII. First the child says ``{"ready": true}``, or ``{"fatal": "..."}`` and ends.
Each request ``{"id", "rule", "text", "answer", "limit"}`` gets ``{"id", "equal", "extracted", "problem"}``. ``rule`` is
``value`` (the text is the answer itself) or ``response`` (the answer is looked for in the text); ``problem`` is null or
says why nothing could be compared. ``limit`` is in seconds.

An expression such as 9**9**9**9 keeps the interpreter inside one C call, where neither a thread nor a signal handler of
Python's gets a turn. So the timer's signal has its default action: the kernel ends the process. The parent kills it
before that; the timer is for a parent that is gone.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

# Far above what a comparison needs, far below what would hurt the machine.
_MEMORY_LIMIT = 2 << 30
_PARENT_POLL_SECONDS = 5.0


def main() -> None:
    """Answers requests from standard input until it ends or the parent does."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for kind, limit in ((resource.RLIMIT_AS, _MEMORY_LIMIT), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    output = _private_output()
    try:
        compare = _load()
    except Exception as error:
        _say(output, {"fatal": f"{type(error).__name__}: {error}"})
        return
    _say(output, {"ready": True})
    for line in _lines(parent):
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, float(request["limit"]) + 1.0)
        reply = compare(request["rule"], request["text"], request["answer"])
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _say(output, {"id": request["id"], **reply})


def _private_output() -> BinaryIO:
    """Standard output for the replies alone: what a library prints goes nowhere."""
    output = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return output


def _say(output: BinaryIO, reply: dict[str, Any]) -> None:
    output.write(json.dumps(reply).encode("ascii") + b"\n")
    output.flush()


def _lines(parent: int) -> Iterator[bytes]:
    """Lines of standard input. A look at the parent now and then covers a pipe that another process holds open."""
    buffer = b""
    while True:
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            yield line
        ready, _, _ = select.select([0], [], [], _PARENT_POLL_SECONDS)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            buffer += data
        elif os.getppid() != parent:
            return


def _load() -> Any:
    """Imports math-verify and uses it once, so that the first real request is not the slow one."""
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def compare(rule: str, text: str, answer: str) -> dict[str, Any]:
        # The library's own time limits need the main thread's SIGALRM, which is taken (see above): None turns them off.
        try:
            gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
            found = parse(f"\\boxed{{{text}}}" if rule == "value" else text, parsing_timeout=None)
            extracted = next((item for item in reversed(found) if isinstance(item, str)), None)
            equal = bool(found) and bool(gold) and bool(verify(gold, found, timeout_seconds=None))
            problem = "the reference answer cannot be read" if not gold else None if found else "no answer"
        except (Exception, RecursionError, MemoryError) as error:
            return {"equal": False, "extracted": None, "problem": f"error: {type(error).__name__}"}
        return {"equal": equal, "extracted": extracted, "problem": problem}

    compare("response", "So $\\frac{1}{2}$ is 0.5", "0.5")
    return compare


if __name__ == "__main__":
    main()
    sys.exit(0)
