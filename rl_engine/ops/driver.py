"""The GPU's kernel driver."""

from __future__ import annotations

import ctypes


def version() -> str:
    """The driver's version, as the management library says it.

    Raises:
        OSError: there is no such library, or it does not answer.
    """
    text = ctypes.create_string_buffer(96)
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, 96):
        raise OSError("the management library does not answer")
    return text.value.decode()
