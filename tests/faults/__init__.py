"""Injected faults: small generators of token logs whose cause of mismatch is known. Reusable by other tools."""

from . import distribution, models_differ, places
from .registry import FAULTS, Fault, base_spec, make_log, nominal_severity

__all__ = [
    "FAULTS",
    "Fault",
    "base_spec",
    "distribution",
    "make_log",
    "models_differ",
    "nominal_severity",
    "places",
]
