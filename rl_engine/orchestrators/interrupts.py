"""Ctrl-C, SIGTERM and a closed terminal end a run in the same way, once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What the process that waits for a run passes on for any of them. Ray takes SIGTERM for a crash while it connects: its
# C++ side prints a stack and aborts the process three seconds later, whatever the process makes of the signal.
RELAYED = signal.SIGUSR1


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first of these signals raises KeyboardInterrupt and later ones are ignored: they must not stop the
    clean-up. A signal that was ignored before (``nohup``) stays ignored."""
    every = (*ENDING, RELAYED)
    old = {number: signal.getsignal(number) for number in every}
    caught = [number for number in every if number == RELAYED or old[number] is not signal.SIG_IGN]

    begun = False

    def interrupt(*_: object) -> None:
        nonlocal begun
        if not begun:  # SIG_IGN instead would make Python print a race where two signals arrive at once
            begun = True
            raise KeyboardInterrupt

    try:
        for number in caught:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in caught:
            signal.signal(number, old[number])


def hear() -> None:
    """Lets in the signals that were blocked until now (:func:`rl_engine.orchestrators.supervise.supervise`)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING, RELAYED})
