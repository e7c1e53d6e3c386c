"""Ctrl-C, SIGTERM and a closed terminal end a run in the same way, once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first of these signals raises KeyboardInterrupt and later ones are ignored: they must not stop the
    clean-up. A signal that was ignored before (``nohup``) stays ignored."""
    old = {number: signal.getsignal(number) for number in ENDING}
    caught = [number for number in ENDING if old[number] is not signal.SIG_IGN]

    def interrupt(*_: object) -> None:
        for number in caught:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in caught:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, old[number])
