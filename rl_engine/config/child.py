"""Other programs as child processes with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


def run_child(command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """(standard output, error line) of ``command``; the error line is empty when it exited with 0.

    The child runs in its own process group from ``/`` and the group is ended when ``seconds`` have passed.
    """
    try:
        child = subprocess.Popen(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            cwd="/",
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    except OSError as error:
        return "", f"{command[0]}: {error.strerror or error}"
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return "", f"no answer within {seconds:g} s"
    if child.returncode == 0:
        return out, ""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    ended = f"ended by signal {-child.returncode}" if child.returncode < 0 else f"exit {child.returncode}"
    return out, lines[-1][:300] if lines else ended
