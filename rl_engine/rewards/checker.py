"""The parent's side of the comparing child process: starts it, limits its time, replaces it when it is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("math_worker.py")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """``problem`` is None when two answers were compared; else ``no answer``, ``timeout``, ``crash`` or an error."""

    equal: bool
    extracted: str | None
    problem: str | None


class CheckerUnavailable(RuntimeError):
    """The child process does not come up.

    Attributes:
        missing: it said itself that it cannot work, since math-verify is missing or broken; otherwise it was killed,
            crashed or did not answer.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class AnswerChecker:
    """Compares answers with math-verify in one persistent child process.

    The child is started by ``start`` or the first ``compare``. It ends with ``close``, when its standard input does
    (which the kernel closes with this process, however that ends), or when a comparison passes its limit.

    Args:
        time_limit: seconds for one comparison.
        start_limit: seconds for the child to come up.
    """

    def __init__(self, time_limit: float = 5.0, start_limit: float = 120.0) -> None:
        if not 0 < time_limit < float("inf"):
            raise ValueError(f"time_limit {time_limit}")
        self._time_limit = time_limit
        self._start_limit = start_limit
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._buffer = b""
        self._number = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, or None while there is none."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts the child without waiting for it: it imports its libraries while the caller works on."""
        if self._child is not None:
            return
        # -P keeps this folder off the child's import path. The fixed hash seed makes sympy's choices repeatable.
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self._ready, self._buffer = False, b""

    def compare(self, rule: str, text: str, answer: str) -> Comparison:
        """Whether an answer equals the reference.

        Args:
            rule: ``value`` (``text`` is the answer) or ``response`` (the answer is looked for in ``text``).
            text: what the model gave.
            answer: the reference.

        Raises:
            CheckerUnavailable: the child does not come up.
        """
        problem = "crash"
        # A child that was lost between comparisons says nothing about this text, so a crash gets one more try.
        for _ in range(2):
            self._wait_until_ready()
            self._number += 1
            request = {"id": self._number, "rule": rule, "text": text, "answer": answer, "limit": self._time_limit}
            try:
                reply = self._exchange(json.dumps(request).encode("ascii") + b"\n")
            except TimeoutError:
                problem = "timeout"
            except (EOFError, BrokenPipeError):
                problem = "crash"
            else:
                assert reply["id"] == self._number, "the checking child answered another request"
                return Comparison(bool(reply["equal"]), reply["extracted"], reply["problem"])
            self._replace()
            if problem == "timeout":
                break
        return Comparison(False, None, problem)

    def close(self) -> None:
        """Ends the child; a later ``compare`` starts another."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                # Bytes that were still to be sent to the dead child are lost on purpose.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _replace(self) -> None:
        """A new child, which comes up while the caller goes on."""
        self.close()
        self.start()

    def _wait_until_ready(self) -> None:
        # One that dies on its way up, by whatever hand, gets one more try.
        for left in (1, 0):
            self.start()
            if self._ready:
                return
            try:
                reply = self._read_reply(time.monotonic() + self._start_limit)
                break
            except TimeoutError as error:
                self.close()
                words = f"the answer checker did not start (no answer in {self._start_limit:g} s)"
                raise CheckerUnavailable(words) from error
            except EOFError as error:
                assert self._child is not None
                code = self._child.wait()
                self.close()
                if not left:
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    raise CheckerUnavailable(f"the answer checker did not start (it {how}, twice)") from error
        if "fatal" in reply:
            self.close()
            raise CheckerUnavailable(f"the answer checker cannot work: {reply['fatal']}", missing=True)
        self._ready = True

    def _exchange(self, line: bytes) -> dict[str, Any]:
        assert self._child is not None and self._child.stdin is not None
        deadline = time.monotonic() + self._time_limit
        # The child reads whenever it is not comparing, so this does not block on a full pipe.
        self._child.stdin.write(line)
        self._child.stdin.flush()
        return self._read_reply(deadline)

    def _read_reply(self, deadline: float) -> dict[str, Any]:
        """One line from the child as JSON; TimeoutError after ``deadline``, EOFError when the child has ended."""
        assert self._child is not None and self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    raise TimeoutError
                data = os.read(descriptor, 1 << 16)
                if not data:
                    raise EOFError
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply
