"""What the operators ask of a GPU."""

from __future__ import annotations

import ctypes
import functools

import torch


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def driver() -> str:
    """The kernel driver's version, as the management library says it.

    Raises:
        OSError: there is no such library, or it does not answer.
    """
    text = ctypes.create_string_buffer(96)
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, 96):
        raise OSError("the management library does not answer")
    return text.value.decode()
