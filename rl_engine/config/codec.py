"""Plan to JSON and back, through the records' one strict codec: no field is ever guessed."""

from __future__ import annotations

from rl_engine.config.plan import Plan
from rl_engine.records.codec import canonical_digest, canonical_json, decode, encode, parse_json


def plan_to_json(plan: Plan) -> str:
    """Canonical JSON (sorted keys, no spaces, no NaN) of a plan."""
    return canonical_json(encode(plan))


def plan_digest(plan: Plan) -> str:
    """SHA-256 (hex) of the canonical JSON: equal plans have equal digests on every machine."""
    return canonical_digest(encode(plan))


def plan_from_json(text: str) -> Plan:
    """The plan written by :func:`plan_to_json`.

    Raises:
        UserError: not JSON, or a field that is unknown, missing or of another type.
    """
    return decode(Plan, parse_json(text, "plan"), "plan")
