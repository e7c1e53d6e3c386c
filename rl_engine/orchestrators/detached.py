"""Runs without a terminal: started in a process of their own, followed by ``attach``, ended by ``stop``.

A detached run is the continuation of a run directory that was just made, in a child process. What it says goes to
``<output-root>/.detached/<id>/console.log`` with secrets removed, its exit code to ``exit`` beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rl_engine.config.codec import plan_digest, plan_to_json
from rl_engine.config.plan import Plan
from rl_engine.orchestrators.actors import SOURCE_ROOT
from rl_engine.orchestrators.resume import Found, check_resumable, find
from rl_engine.orchestrators.verdict import print_runs
from rl_engine.records.codec import RecordError
from rl_engine.records.errors import UserError
from rl_engine.records.files import write_atomic
from rl_engine.records.lock import is_live
from rl_engine.records.private import make_folder, open_own
from rl_engine.records.process import is_of_this_machine, living, process_fields
from rl_engine.records.reader import RunReader
from rl_engine.records.redact import redact_text, secret_values
from rl_engine.records.types import EventValue
from rl_engine.records.writer import RunWriter

T = TypeVar("T")
POLL_SECONDS = 0.2
START_SECONDS = 600.0
STOP_SECONDS = 120.0
_OPEN = ("planned", "running")
_CODES = {"valid": 0, "sealed": 0, "invalid": 1, "failed": 3, "interrupted": 130}


# -- starting


def start(plans: list[Plan], *, json_output: bool) -> int:
    """Makes the run directories and starts the run; returns once it runs, with where it is on stdout.

    Raises:
        UserError: an input that cannot be used, or a directory that is taken; nothing was started or written.
    """
    from rl_engine.orchestrators.runs import check

    check(plans)
    for plan in plans:
        RunWriter.create(Path(plan.run_dir), json.loads(plan_to_json(plan)), plan_digest(plan)).close()
    return go_on(find(str(Path(plans[0].output_root) / (plans[0].pair_id or plans[0].run_id)), None), json_output)


def go_on(found: Found, json_output: bool) -> int:
    """Goes on with runs in a child process; returns once one of them runs."""
    side = _Side(found)
    child = side.spawn()
    begun = {reader.run_id: _attempts(reader) for reader in found.readers}
    end = time.monotonic() + START_SECONDS
    while child.poll() is None and time.monotonic() < end:
        if any(_attempts(reader) > begun[reader.run_id] for reader in found.readers):
            print_runs(found.plans, "running", json_output)
            return 0
        time.sleep(POLL_SECONDS)
    code = child.poll()
    lines = side.said().strip().splitlines()
    sys.stderr.write((lines[-1] if lines else f"rlk-repro: the run did not start, see {side.console}") + "\n")
    print_runs(found.plans, "failed" if code is not None else "starting", json_output)
    return 3 if code is None else code


def main(run: str) -> int:
    """The child: goes on with ``run`` and leaves its exit code beside its console."""
    from rl_engine.orchestrators import runs

    found = find(run, None)
    code = 3
    with (
        contextlib.closing(_Redacting(1)) as out,
        contextlib.closing(_Redacting(2)) as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            check_resumable(found)
            code = runs.run(list(found.plans), json_output=False, earlier=found.readers)
        except UserError as error:
            code = 2
            sys.stderr.write(f"rlk-repro: {' '.join(str(error).split())}\n")
        except KeyboardInterrupt:
            code = 130
            sys.stderr.write("rlk-repro: interrupted\n")
        except Exception:
            traceback.print_exc()
    _Side(found).leave(code)
    return code


# -- following and ending


def attach(run: str, *, output_root: Path | None = None, json_output: bool) -> int:
    """Prints what a run says until it ends; returns its exit code. Ctrl-C leaves it running.

    Raises:
        UserError: no such run.
    """
    found = find(run, output_root)
    side = _Side(found)
    try:
        _follow(found, side)
    except KeyboardInterrupt:
        sys.stderr.write(f"the run goes on; rlk-repro attach {found.path} follows it, rlk-repro stop ends it\n")
        raise
    code, status = _outcome(found, side)
    print_runs(found.plans, status, json_output)
    return code


def stop(run: str, *, output_root: Path | None = None, json_output: bool) -> int:
    """Ends a run as ``interrupted``, or writes that down for one whose process is gone already.

    Raises:
        UserError: no such run, none that is open, or one on another host.
    """
    found = find(run, output_root)
    side = _Side(found)
    states = [_state(reader) for reader in found.readers]
    process = _process(found, side)
    if process is None and _held(found):
        raise UserError(
            f"{found.name}, held by a process that is not to be found here",
            "a process that this user can see",
            "end it where it was started (another container, another host)",
        )
    if process is None and not any(state in _OPEN for state in states):
        raise UserError(f"{found.name}, which is {states[-1]}", "a run that is running", "rlk-repro validate judges it")
    if process is not None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except psutil.TimeoutExpired:
            sys.stderr.write(f"rlk-repro: process {process.pid} of {found.name} still cleans up; its log says more\n")
            return 3
    for reader in found.readers:
        if _state(reader) in _OPEN and not is_live(reader.run_dir):
            writer = RunWriter.take_over(reader.run_dir)
            writer.state("interrupted", "stopped")
            writer.close()
    code, status = _outcome(found, side)
    ended = status == "interrupted"
    sys.stderr.write(
        f"{found.name} {'stopped' if ended else f'ended by itself before it could be stopped: {status}'}\n"
    )
    print_runs(found.plans, status, json_output)
    return 0 if ended or code == 0 else code


def _follow(found: Found, side: _Side) -> None:
    """Copies what the run says to stderr until its process has ended."""
    logs = [side.console] if side.console.exists() else [reader.run_dir / "run.log" for reader in found.readers]
    places = dict.fromkeys(logs, 0)
    while True:
        alive = _process(found, side) is not None or _held(found)
        for path in logs:
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(places[path])
                sys.stderr.write(file.read().decode("utf-8", "replace"))
                places[path] = file.tell()
        sys.stderr.flush()
        if not alive:
            return
        time.sleep(POLL_SECONDS)


def _outcome(found: Found, side: _Side) -> tuple[int, str]:
    """(exit code, status) of a run that has ended: what its process said, else what its directories say."""
    said = side.exit_code()
    codes = [_CODES.get(_state(reader), 3) for reader in found.readers]
    worst = max(codes, key=lambda code: (0, 1, 130, 3).index(code))
    if any(_state(reader) in (*_OPEN, "finished") for reader in found.readers):
        whole = len(found.readers) == 1 and _state(found.readers[0]) == "finished"
        verb = f"validate --run-dir {found.path}" if whole else f"run --resume {found.path}"
        sys.stderr.write(
            f"rlk-repro: the process of {found.name} is gone, and left the run {_state(found.readers[-1])}; "
            f"{'judge it' if whole else 'go on'} with: rlk-repro {verb}\n"
        )
        said = None
    code = worst if said is None else said
    return code, {0: "succeeded", 130: "interrupted"}.get(code, "failed")


def _process(found: Found, side: _Side) -> psutil.Process | None:
    """The living process that works on these runs.

    Raises:
        UserError: it runs on another host.
    """
    for fields in (side.process(), *(_last_attempt(reader) for reader in found.readers)):
        if not isinstance(fields.get("pid"), int):
            continue
        if (process := living(fields)) is not None:
            return process
        if not is_of_this_machine(fields) and any(_state(reader) in _OPEN for reader in found.readers):
            host = fields.get("host")
            raise UserError(f"{found.name} on host {host}", "a run of this host", "use that host's terminal")
    return None


def _held(found: Found) -> bool:
    """Whether some process holds one of the directories. Asked only where the process by its name is gone: asking takes
    the lock for a moment."""
    return any(is_live(reader.run_dir) for reader in found.readers)


def _attempts(reader: RunReader) -> int:
    return sum(state.name == "running" for state in _settled(reader.states))


def _state(reader: RunReader) -> str:
    states = _settled(reader.states)
    return states[-1].name if states else "planned"


def _last_attempt(reader: RunReader) -> dict[str, EventValue]:
    return next((event.fields for event in reversed(_settled(reader.events)) if event.kind == "attempt"), {})


def _settled(read: Callable[[], T]) -> T:
    """What ``read`` gets, once the line that is just being written is whole."""
    for _ in range(20):
        try:
            return read()
        except RecordError:
            time.sleep(0.05)
    return read()


# -- what lies beside the run directories


@dataclasses.dataclass(frozen=True)
class _Side:
    """Files of a detached run, outside its directory: that one may be sealed."""

    found: Found

    @property
    def folder(self) -> Path:
        plan = self.found.plans[0]
        return self.found.folder / ".detached" / (plan.pair_id or plan.run_id)

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    @property
    def exit(self) -> Path:
        return self.folder / "exit"

    def spawn(self) -> subprocess.Popen[bytes]:
        """The child process, in a session of its own."""
        make_folder(self.folder)
        self.exit.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, (str(SOURCE_ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-P", "-m", "rl_engine.orchestrators.detached", str(self.found.path)]
        with open(self.console, "wb", opener=open_own) as console:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        fields = process_fields(child.pid)
        write_atomic(self.folder / "process.json", (json.dumps(fields) + "\n").encode())
        return child

    def said(self) -> str:
        return self.console.read_text("utf-8", "replace") if self.console.exists() else ""

    def leave(self, code: int) -> None:
        """The exit code, with the attempts that it belongs to: a later one in a terminal writes none here."""
        body = {"code": code, "attempts": [_attempts(reader) for reader in self.found.readers]}
        write_atomic(self.exit, (json.dumps(body) + "\n").encode())

    def exit_code(self) -> int | None:
        body = self._json(self.exit)
        code, attempts = body.get("code"), [_attempts(reader) for reader in self.found.readers]
        return code if isinstance(code, int) and body.get("attempts") == attempts else None

    def process(self) -> dict[str, EventValue]:
        return self._json(self.folder / "process.json")

    def _json(self, path: Path) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            body = json.loads(path.read_text("utf-8"))
            if isinstance(body, dict):
                return body
        return {}


class _Redacting(io.TextIOBase):
    """A text stream onto a file descriptor that removes secrets, line by line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._put(line + "\n")
        return len(text)

    def close(self) -> None:
        if self._rest:
            self._put(self._rest + "\n")
            self._rest = ""
        super().close()

    def _put(self, line: str) -> None:
        clean = redact_text(line, secret_values()).encode("utf-8", "backslashreplace")
        while clean:
            clean = clean[os.write(self._descriptor, clean) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
