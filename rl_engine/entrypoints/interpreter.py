"""Prints the interpreter that a command line, the environment or a profile names; nothing when none does.

``./rlk`` asks this with any Python 3.8 or newer before there is an environment: standard library only.
"""

from __future__ import annotations

import json
import os
import sys

NEEDS_IT = ("run", "verify")  # other verbs may be asked before the interpreter exists


def named_interpreter(argv: list[str], env: dict[str, str]) -> tuple[str, str] | None:
    """(path, origin) of the interpreter that is asked for, or None."""
    for flag, tail in (("--python", ""), ("--runtime-root", "bin/python")):
        value = _flag(argv, flag)
        if value:
            return os.path.join(value, tail) if tail else value, flag
    for variable, tail in (("RLK_REPRO_PYTHON", ""), ("RLK_REPRO_RUNTIME_ROOT", "bin/python")):
        value = env.get(variable)
        if value:
            return os.path.join(value, tail) if tail else value, variable
    file = _profile_file(argv, env)
    try:
        with open(file, encoding="utf-8-sig") as stream:
            paths = json.load(stream).get("paths", {})
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # the parser, which has the schema, says what is wrong with the profile
    for key, tail in (("python", ""), ("runtime_root", "bin/python")):
        value = paths.get(key) if isinstance(paths, dict) else None
        if isinstance(value, str) and value and "edit me" not in value:
            folder = os.path.dirname(os.path.abspath(file))
            return os.path.join(folder, os.path.expanduser(value), tail).rstrip("/"), "paths." + key + " of " + file
    return None


def _flag(argv: list[str], flag: str) -> str | None:
    for index, argument in enumerate(argv):
        if argument == flag and index + 1 < len(argv):
            return argv[index + 1]
        if argument.startswith(flag + "="):
            return argument[len(flag) + 1 :]
    return None


def _profile_file(argv: list[str], env: dict[str, str]) -> str:
    given = _flag(argv, "--profile") or env.get("RLK_REPRO_PROFILE")
    if given:
        return given
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return next((f for f in (".rlk-profile.json", os.path.join(root, ".rlk-profile.json")) if os.path.isfile(f)), "")


def main(argv: list[str]) -> int:
    """Prints the interpreter for ``./rlk``; exit code 2 when a run names one that cannot be executed."""
    found = named_interpreter(argv, dict(os.environ))
    if found is None:
        return 0
    path, origin = found
    if os.access(path, os.X_OK) and not os.path.isdir(path):
        print(os.path.abspath(path))
        return 0
    if argv and argv[0] in NEEDS_IT:
        print(
            "rlk-repro: found no interpreter "
            + path
            + " ("
            + origin
            + "), expected an executable Python; hint: correct it or leave it out",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
