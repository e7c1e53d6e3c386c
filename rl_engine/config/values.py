"""One value at a time: a flag, the environment, the verb's own default, the profile, a rule, or the default."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from rl_engine.config.host import HostFacts
from rl_engine.config.options import BY_NAME, VERB_DEFAULTS, Option, Scalar
from rl_engine.config.paths import Value
from rl_engine.config.profile import LoadedProfile, profile_default


@dataclasses.dataclass(frozen=True)
class Request:
    """One command line: values by option and path name, as text (switches as True); ``spelled``: flags as typed."""

    verb: str
    flags: Mapping[str, str | bool]
    path_flags: Mapping[str, str]
    profile: str | None
    env: Mapping[str, str]
    cwd: Path
    host: HostFacts
    now: datetime.datetime
    detach: bool = False
    spelled: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Values:
    """Values of one request; every value asked for is remembered with its source."""

    def __init__(self, request: Request, loaded: LoadedProfile) -> None:
        self.request, self.loaded = request, loaded
        self.values: dict[str, Value] = {}

    def given(self, name: str) -> Value | None:
        """Flag, then environment, then the verb's own default, then profile; None when nothing gives it."""
        option = BY_NAME[name]
        if name in self.request.flags:
            return self._value(option, self.request.flags[name], "flag", self.request.spelled.get(name, option.flag))
        if name == "ray_address" and self.request.env.get("RAY_API_SERVER_ADDRESS"):
            return self._value(option, self.request.env["RAY_API_SERVER_ADDRESS"], "env", "RAY_API_SERVER_ADDRESS")
        verb = VERB_DEFAULTS.get(self.request.verb, {})
        if name in verb:
            return self._value(option, verb[name], "default", f"of {self.request.verb}")
        found = profile_default(self.loaded, name)
        return self._value(option, found[0], "profile", found[1]) if found else None

    def _value(self, option: Option, raw: Scalar, source: str, origin: str) -> Value:
        return Value(option.name, option.convert(raw, origin), source, origin)

    def get(self, name: str, derived: tuple[Scalar, str] | None = None) -> Value:
        """The value of ``name``; ``derived`` (value, rule) stands in before the default."""
        if name in self.values:
            return self.values[name]
        value = self.given(name)
        if value is None and derived is not None:
            value = Value(name, derived[0], "derived", derived[1])
        if value is None:
            value = Value(name, BY_NAME[name].default, "default", "")
        self.values[name] = value
        return value

    def derive(self, name: str, value: Scalar | None, rule: str) -> None:
        """From here on ``name`` is ``value``, which follows from others by ``rule``, whatever else gives one."""
        self.values[name] = Value(name, value, "derived", rule)

    def whole(self, name: str, derived: tuple[Scalar, str] | None = None) -> int:
        return cast(int, self.get(name, derived).value)

    def real(self, name: str, derived: tuple[Scalar, str] | None = None) -> float:
        return float(cast(float, self.get(name, derived).value))

    def text(self, name: str, derived: tuple[Scalar, str] | None = None) -> str:
        return str(self.get(name, derived).value)

    def switch(self, name: str) -> bool:
        return self.get(name).value is True
