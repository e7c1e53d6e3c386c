"""The command line as data: verbs and their flags. Standard library only; readable by Python 3.8."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

DESCRIPTION = "Exactly on-policy reinforcement learning: rollout and trainer compute the same bits."

VERBS = {
    "plan": "show the resolved run: every value with its source",
    "run": "preflight, run and validate",
    "prepare": "get what the profile needs",
    "doctor": "check this machine against the profile",
    "validate": "check a run directory; --seal writes COMPLETE",
    "verify": "two-update acceptance run",
    "compare": "what is equal in two runs, and what differs first",
    "report": "tables and figures from sealed runs",
    "diagnose": "semantic doctor on logged tokens and logprobs",
    "locate": "first divergence within a run or between two",
    "qualify": "prove and time operator providers on this machine",
    "bench": "side-by-side benchmarks: rollout, train, ops, parallel, e2e, gpu",
    "attach": "follow a detached run",
    "stop": "end a detached run",
}

RESOLVING = ("plan", "run", "prepare", "doctor", "verify", "report")
FORWARDED = ("diagnose", "locate", "qualify", "bench")
MODES = "--wait --detach --dry-run"


class Spelled(argparse.Action):
    """Keeps the value and the spelling of the flag that gave it, so that messages repeat what was typed."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        setattr(namespace, self.dest, values)
        spelled = dict(getattr(namespace, "spelled", {}))
        spelled[self.dest] = option_string
        namespace.spelled = spelled


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as the project's one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        from rl_engine.records.errors import UserError

        raise UserError(message, "a right command line", f"see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The whole parser; values stay text, ``rl_engine.config`` types and judges them."""
    from rl_engine import __version__

    parser = Parser(
        prog="rlk-repro",
        description=DESCRIPTION,
        allow_abbrev=False,
        epilog="./rlk test [--engines | --nightly] runs the tests. `rlk-repro VERB --help` shows a verb's flags.",
    )
    parser.add_argument("--version", action="version", version="rl-kernel " + __version__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for name, text in VERBS.items():
        child = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        if name in RESOLVING:
            _add_paths(child)
        if name in RESOLVING and name != "report":
            _add_options(child)
        _ADDERS.get(name, _add_nothing)(child)
        if name not in FORWARDED:
            child.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    from rl_engine.config.options import OPTIONS

    group = parser.add_argument_group(
        "run options (flag > environment > profile > derived > default)",
        "In brackets: the default where the profile gives none. `plan` shows the values in force and their sources.",
    )
    for option in OPTIONS:
        if option.kind == "switch":
            group.add_argument(
                *option.flags, dest="option_" + option.name, action="store_true", default=None, help=option.help
            )
            continue
        rest = option.derived or ("none" if option.default is None else str(option.default))
        choices = "{" + ",".join(option.choices) + "}" if option.choices else option.kind.upper()
        text = (option.help + " (" + rest + ")").replace("%", "%%")
        group.add_argument(*option.flags, dest="option_" + option.name, action=Spelled, metavar=choices, help=text)


def _add_paths(parser: argparse.ArgumentParser) -> None:
    from rl_engine.config.paths import PATHS

    group = parser.add_argument_group("paths (flag > RLK_REPRO_<NAME> > profile > default)")
    group.add_argument(
        "--profile", metavar="FILE", help="profile (RLK_REPRO_PROFILE, .rlk-profile.json, a bundled one)"
    )
    for path in PATHS:
        group.add_argument(
            path.flag, dest="path_" + path.name, metavar="PATH", help=path.help + " (" + path.default + ")"
        )


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    del parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--wait", action="store_true", help="follow the run to its end (default)")
    how.add_argument("--detach", action="store_true", help="return once the run is submitted")
    parser.add_argument("--dry-run", action="store_true", help="show the plan and write nothing")
    parser.add_argument(
        "--resume", metavar="RUN", help="go on with an interrupted run: directory or id, with its own plan"
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="judge the machine too (doctor)")


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--download-data", action="store_true", help="download and convert the prompts")
    parser.add_argument("--data-url", metavar="URL", help="where the prompts come from, for --download-data")
    parser.add_argument("--data-sha256", metavar="HASH", help="hash that the downloaded file must have")
    parser.add_argument("--convert-checkpoint", action="store_true", help="convert the checkpoint to Megatron's layout")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--matrix", metavar="NAME", help="guide, full, modules or a file of topologies")


def _add_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="DIR", help="run directory")
    parser.add_argument("--run-dir", metavar="DIR", help="run directory")
    parser.add_argument("--seal", action="store_true", help="write COMPLETE and print its root hash")
    parser.add_argument(
        "--rescore",
        nargs="?",
        const="chosen",
        metavar="N|all",
        help="compute a step again in one fresh process: the one that the records' digest chooses, step N, or all",
    )
    parser.add_argument("--expect-root", metavar="HASH", help="root hash that COMPLETE must have")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--include-unsealed", action="store_true", help="also runs without COMPLETE, marked")
    parser.add_argument("--output", metavar="DIR", help="where the report is written (OUTPUT_ROOT/report)")
    parser.add_argument("--tensorboard", action="store_true", help="also TensorBoard event files (its package needed)")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="run directory")
    parser.add_argument("b", metavar="B", help="run directory")


def _add_one_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory, or the id of a run or pair")
    parser.add_argument("--output-root", dest="path_output_root", metavar="PATH", help="where ids are looked up")


_ADDERS = {
    "plan": _add_plan,
    "run": _add_run,
    "prepare": _add_prepare,
    "verify": _add_verify,
    "validate": _add_validate,
    "report": _add_report,
    "compare": _add_compare,
    "attach": _add_one_run,
    "stop": _add_one_run,
}


def parse(argv: list[str]) -> argparse.Namespace:
    """The parsed command line.

    Raises:
        UserError: an unknown verb or flag (the nearest known one is named), or a value that is missing.
    """
    from rl_engine.config.options import nearest
    from rl_engine.records.errors import UserError

    parser = build_parser()
    if not argv:
        parser.print_help(sys.stderr)
        raise UserError("no verb", "one of " + ", ".join(VERBS), "rlk-repro plan shows what would run")
    if not argv[0].startswith("-") and argv[0] not in VERBS:
        raise UserError(
            "verb " + argv[0], "one of " + ", ".join(VERBS), nearest(argv[0], VERBS, "see rlk-repro --help")
        )
    args, rest = parser.parse_known_args(argv)
    if rest:
        known = [flag for flag in _known_flags(parser, args.verb) if flag.startswith("--")]
        raise UserError(
            "unknown argument " + rest[0],
            "a flag of " + args.verb,
            nearest(rest[0].split("=")[0], known, "see rlk-repro " + args.verb + " --help"),
        )
    return args


def _known_flags(parser: argparse.ArgumentParser, verb: str) -> list[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return list(action.choices[verb]._option_string_actions)
    return []
