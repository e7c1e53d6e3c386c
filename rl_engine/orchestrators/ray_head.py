"""Our own Ray head on loopback: started before a run, ended after it. A foreign Ray is never touched."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from rl_engine.orchestrators.scratch import MARK, Scratch

SOURCES = Path(__file__).resolve().parents[2]
OBJECT_STORE_BYTES = 1 << 30
END_SECONDS = 10.0
LOG_TAIL_BYTES = 4096
VITAL = ("gcs_server", "raylet")


class HeadFailed(RuntimeError):
    """Ray did not start; the message says why."""


class Head:
    """A running head: the ``ray`` module, and what is needed to start and end actors and to read their last words.

    Attributes:
        private: a folder for what the run's processes share; Ray leaves it alone.
    """

    def __init__(self, ray: Any, scratch: Scratch, said: io.StringIO) -> None:
        self.ray, self.private, self._logs, self._said = ray, scratch.own, scratch.ray / "session_latest/logs", said
        self._started: list[psutil.Process] = []
        self._vital: dict[str, psutil.Process] = {}

    def started(self) -> None:
        """To be called once Ray runs: remembers its processes."""
        self._started = psutil.Process().children(recursive=True)
        self._vital = {process.name(): process for process in self._started if process.name() in VITAL}

    def check(self) -> None:
        """That the head's own processes live: without them Ray first hangs, then ends this process.

        Raises:
            HeadFailed: one does not.
        """
        for name, process in self._vital.items():
            if not _lives(process):
                raise HeadFailed(f"Ray's head lost {name} (process {process.pid}): killed from outside or by a crash")

    @property
    def lives(self) -> bool:
        """Whether Ray can still be asked for anything."""
        return all(map(_lives, self._vital.values()))

    def end(self) -> None:
        """Ends every process that was started for Ray, by its id."""
        processes = {*self._started, *psutil.Process().children(recursive=True)}
        if self.lives:
            self.ray.shutdown()
            _, processes = psutil.wait_procs(processes, timeout=END_SECONDS / 2)
        else:
            atexit.unregister(self.ray.shutdown)  # it would ask the dead head
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start(self, worker: type, *arguments: Any) -> Any:
        """An actor of ``worker``; ``progress`` can be asked while another method runs."""
        return self.ray.remote(num_cpus=0, max_concurrency=2, max_restarts=0)(worker).remote(*arguments)

    def stop(self, actors: list[Any]) -> None:
        """Ends our actors; a dead one is no error."""
        for actor in actors if self.lives else ():
            with contextlib.suppress(Exception):
                self.ray.kill(actor, no_restart=True)

    def last_words(self, pid: int) -> str:
        """What Ray said so far, and the end of what the worker process ``pid`` wrote; empty when there is nothing."""
        parts = [self._said.getvalue().strip()]
        for path in sorted(self._logs.glob(f"worker-*-{pid}.*")):
            with contextlib.suppress(OSError):
                parts.append(path.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip())
        return "\n".join(filter(None, parts))


def _environment(threads: int) -> dict[str, str | None]:
    """What Ray's processes inherit (None: removed); Ray reads its token when it is imported."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_AUTH_TOKEN_PATH": None,
        "OMP_NUM_THREADS": str(threads),
        # Workers import the sources that this process runs, however it found them.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCES), os.environ.get("PYTHONPATH")))),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of several workers' errors we report the first
        # One machine: Ray then takes and listens on 127.0.0.1, whatever the host's name or network.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers run this interpreter, also under `uv run`
        # A user's settings for another cluster.
        "RAY_ADDRESS": None,
        "RAY_NAMESPACE": None,
        "RAY_TMPDIR": None,
        "RAY_RUNTIME_ENV_HOOK": None,
        "RAY_JOB_CONFIG_JSON_ENV_VAR": None,
    }


@contextlib.contextmanager
def _variables(values: dict[str, str | None]) -> Iterator[None]:
    """Sets environment variables and puts the old values back."""
    old = {name: os.environ.get(name) for name in values}

    def put(wanted: dict[str, str | None]) -> None:
        for name, value in wanted.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(old)


@contextlib.contextmanager
def ray_head(threads: int, model_bytes: int, announce: Callable[[Path], None]) -> Iterator[Head]:
    """A head of our own; its processes and its folder are gone afterwards.

    Args:
        threads: ``OMP_NUM_THREADS`` of every worker.
        model_bytes: size of one weight snapshot; the object store holds two and some samples.
        announce: told of the folder before anything is in it.

    Raises:
        HeadFailed: Ray did not start.
        UserError: no place for its sockets.
    """
    # Ray prints what it notices to stdout, which is for the run's data.
    said = io.StringIO()
    with _variables(_environment(threads)), contextlib.redirect_stdout(said):
        import ray  # takes seconds, so before there is a folder to remove

        scratch = Scratch()
        head = Head(ray, scratch, said)
        try:
            announce(scratch.root)
            with _variables({MARK: str(scratch.root)}):
                _connect(ray, scratch.ray, max(OBJECT_STORE_BYTES, 2 * model_bytes + (256 << 20)))
                head.started()
                yield head
        finally:
            head.end()
            scratch.remove()


def _connect(ray: Any, folder: Path, store_bytes: int) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(
                address="local",
                num_cpus=1,  # our actors ask for none, and every CPU would start an idle worker
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=store_bytes,
                log_to_driver=False,
                logging_level="error",
                _temp_dir=str(folder),
            )
        finally:
            _hear_again(handler)
    except SystemExit:  # from Ray's own handler of SIGTERM, which it sets before it starts anything
        _hear_again(handler)
        if callable(handler):
            handler(signal.SIGTERM, None)
        raise KeyboardInterrupt from None
    except Exception as error:
        raise HeadFailed(f"Ray did not start: {' '.join(str(error).split())[:300]}") from error


def _hear_again(handler: Any) -> None:
    """Takes SIGTERM back from Ray, also from its C++ side, which has set an alarm to abort if it heard one already."""
    signal.signal(signal.SIGTERM, handler)
    signal.alarm(0)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
