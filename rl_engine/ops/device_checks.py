"""Checks without waiting for the device: what is a Python error where the host may wait, the device itself asserts."""

from __future__ import annotations

import torch
from torch import Tensor


def demand(holds: Tensor, message: str) -> None:
    """Ends the work on the device, at the latest when somebody waits for it, where ``holds`` bool [] is false.

    A graph can capture it, and every replay checks again. On a GPU the process cannot compute on afterwards: this is
    for what must not happen, not for input that a caller may get wrong and try again.

    Raises:
        RuntimeError: with ``message``, at once, on a CPU.
    """
    torch._assert_async(holds, message)  # torch has no public form of it
