"""The command line: parse, call, print. ``rlk-repro``, ``./rlk`` and ``python -m rl_engine.entrypoints.repro``.

Exit codes: 0 success; 1 a check failed; 2 the user's mistake or a missing piece, one line; 3 the run itself failed;
130 interrupted. Only the standard library is imported here; every verb imports what it calls.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    from rl_engine.entrypoints.parser import FORWARDED, parse
    from rl_engine.records.errors import UserError

    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv and argv[0] in FORWARDED:
            return _forward(argv[0], argv[1:])
        args = parse(argv)
        if sys.hexversion < 0x030B0000:
            found = f"Python {sys.version.split()[0]} ({sys.executable})"
            raise UserError(found, "Python 3.11 or 3.12", "./rlk finds one, or makes an environment")
        _sweep()
        return _VERBS[args.verb](args)
    except UserError as error:
        sys.stderr.write(f"rlk-repro: {' '.join(str(error).split())}\n")
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "rl_engine").partition(".")[0] == "rl_engine":
            raise
        need = "an environment with RL-Kernel's dependencies"
        hint = "./rlk makes one, or: python -m pip install -e ."
        sys.stderr.write(
            f"rlk-repro: found no module {error.name} in {sys.executable}, expected {need}; hint: {hint}\n"
        )
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("rlk-repro: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output went away (``| head``): nothing is left to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _talk(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _sweep() -> None:
    """Removes what earlier runs of this user left outside their directories when all of their processes were killed."""
    from rl_engine.orchestrators.scratch import sweep

    for folder in sweep():
        _talk(f"removed {folder}, left by a run whose processes are gone")


def _room(module: str, what: str) -> object:
    """The module that does ``what``; one line and exit 2 when this version does not have it."""
    import importlib
    import importlib.util

    from rl_engine.records.errors import UserError

    parent = module.rpartition(".")[0]
    if importlib.util.find_spec(parent) is None or importlib.util.find_spec(module) is None:
        raise UserError(
            f"`{what}`, which parses but is not built yet",
            "a verb that this version runs",
            "README.md lists them",
        )
    return importlib.import_module(module)


def _request(args: argparse.Namespace, *, paths_only: bool = False) -> object:
    """``paths_only``: nobody asks what the profile by default is, or whether this GPU would be refused."""
    import datetime

    from rl_engine.config.host import this_host
    from rl_engine.config.resolve import Request

    given = {name: value for name, value in vars(args).items() if value is not None}
    named = "profile" in given or os.environ.get("RLK_REPRO_PROFILE") or "option_backend" in given
    return Request(
        verb=args.verb,
        flags={name[len("option_") :]: value for name, value in given.items() if name.startswith("option_")},
        path_flags={name[len("path_") :]: value for name, value in given.items() if name.startswith("path_")},
        profile=getattr(args, "profile", None),
        env=dict(os.environ),
        cwd=Path.cwd(),
        host=this_host(ask_gpu=not (named or paths_only)),
        now=datetime.datetime.now(datetime.UTC),
        detach=bool(getattr(args, "detach", False)),
        spelled={name[len("option_") :]: flag for name, flag in getattr(args, "spelled", {}).items()},
    )


def _resolve(args: argparse.Namespace) -> list:
    from rl_engine.config.resolve import resolve

    return resolve(_request(args))


def _print_plan(args: argparse.Namespace, resolved: list) -> None:
    import json

    from rl_engine.config.document import plan_document, plan_text

    if args.json:
        print(json.dumps(plan_document(resolved), indent=1, allow_nan=False))
    else:
        sys.stdout.write(plan_text(resolved))


def _plan(args: argparse.Namespace) -> int:
    resolved = _resolve(args)
    _print_plan(args, resolved)
    if not args.check:
        return 0
    return _room("rl_engine.checks.doctor", "plan --check").main(resolved, json_output=args.json)


def _run(args: argparse.Namespace) -> int:
    if args.resume is not None:
        return _resume(args)
    return _execute(args, dry_run=args.dry_run, detach=args.detach)


def _resume(args: argparse.Namespace) -> int:
    """Goes on with a run; its plan is in its directory, so no run option can be given."""
    from rl_engine.config.options import BY_NAME
    from rl_engine.records.errors import UserError

    given = [name[len("option_") :] for name, value in vars(args).items() if name.startswith("option_") and value]
    if given or args.dry_run:
        spelled = getattr(args, "spelled", {})
        flag = spelled.get("option_" + given[0], BY_NAME[given[0]].flag) if given else "--dry-run"
        raise UserError(
            f"{flag} with --resume", "the run's own plan: a run with other values is a new one", f"leave {flag} out"
        )
    resume = _room("rl_engine.orchestrators.resume", "run --resume")
    found = resume.find(args.resume, _output_root(args))
    resume.check_resumable(found)
    if args.detach:
        return _room("rl_engine.orchestrators.detached", "run --detach").go_on(found, args.json)
    runs = _room("rl_engine.orchestrators.runs", "run")
    return runs.run(list(found.plans), json_output=args.json, earlier=found.readers)


def _output_root(args: argparse.Namespace) -> Path:
    from rl_engine.config.resolve import output_root

    return output_root(_request(args, paths_only=True))


def _execute(args: argparse.Namespace, *, dry_run: bool, detach: bool) -> int:
    """Preflight, then the orchestrator; it runs, validates and decides the exit code."""
    from rl_engine.config.document import profile_line
    from rl_engine.config.preflight import check_inputs, refuse_unbuilt, wants_demo_model

    request = _request(args)
    from rl_engine.config.resolve import resolve

    resolved = resolve(request)
    if dry_run:
        _print_plan(args, resolved)
        return 0
    _talk(profile_line(resolved[0]))
    refuse_unbuilt(resolved)
    directory = wants_demo_model(resolved[0])
    if directory is None:
        check_inputs(resolved)
        _check_machine(resolved[0])
    else:
        from rl_engine.data.demo_model import ensure

        _check_machine(resolved[0])  # before anything is fetched for it
        ensure(directory, _talk)
        resolved = resolve(request)  # the shape now comes from the checkpoint itself
        check_inputs(resolved)
    plans = [item.plan for item in resolved]
    if detach:
        return _room("rl_engine.orchestrators.detached", "run --detach").start(plans, json_output=args.json)
    return _room("rl_engine.orchestrators.runs", "run").run(plans, json_output=args.json, rescore=args.verb == "verify")


def _check_machine(subject: object) -> None:
    """Refuses what would fail later: a full disk, a machine without the plan's GPU, or with too little of its memory.

    A GPU that is in use is only ``doctor``'s business.
    """
    from rl_engine.checks.doctor_machine import disk, gpus, shared_gpu
    from rl_engine.records.errors import UserError

    for check in (disk, gpus, shared_gpu):
        for finding in check(subject):
            if finding.status == "FAIL" and finding.name in ("disk", "gpus", "gpu kind", "gpu memory"):
                raise UserError(f"{finding.name}: {finding.found}", finding.expected, finding.hint)


def _prepare(args: argparse.Namespace) -> int:
    from rl_engine.config.document import profile_line

    resolved = _resolve(args)
    _talk(profile_line(resolved[0]))
    prepare = _room("rl_engine.prepare.cli", "prepare")
    return prepare.main(
        resolved[0],
        download_data=args.download_data,
        data_url=args.data_url,
        data_sha256=args.data_sha256,
        convert_checkpoint=args.convert_checkpoint,
        json_output=args.json,
        talk=_talk,
    )


def _doctor(args: argparse.Namespace) -> int:
    return _room("rl_engine.checks.doctor", "doctor").main(_resolve(args), json_output=args.json)


def _verify(args: argparse.Namespace) -> int:
    if args.matrix is None:
        return _execute(args, dry_run=False, detach=False)
    return _matrix(args)


def _matrix(args: argparse.Namespace) -> int:
    """The demo model first, as for a run, then every layout; consistency mode unless a flag says otherwise."""
    import dataclasses

    from rl_engine.config.document import profile_line
    from rl_engine.config.preflight import wants_demo_model
    from rl_engine.config.resolve import resolve

    request = _request(args)
    request = dataclasses.replace(request, flags={"mode": "consistency", **request.flags})
    resolved = resolve(request)
    _talk(profile_line(resolved[0]))
    directory = wants_demo_model(resolved[0])
    if directory is not None:
        from rl_engine.data.demo_model import ensure

        ensure(directory, _talk)
        resolved = resolve(request)
    matrix = _room("rl_engine.orchestrators.matrix", "verify --matrix")
    return matrix.main(resolved, matrix=args.matrix, json_output=args.json, request=request)


def _validate(args: argparse.Namespace) -> int:
    from rl_engine.records.errors import UserError

    rescore: str | int | None = args.rescore
    given = [folder for folder in (args.run, args.run_dir) if folder]
    if isinstance(rescore, str) and rescore.isascii() and rescore.isdecimal() and len(rescore) <= 9:
        rescore = int(rescore)
    elif rescore not in (None, "chosen", "all"):
        given, rescore = [rescore, *given], "chosen"  # --rescore without a value, then the run
    if len(given) != 1:
        raise UserError(f"{len(given)} run directories", "exactly one", "rlk-repro validate --run-dir DIR")
    run_dir = Path(given[0])
    if not run_dir.is_dir():
        raise UserError(f"no run directory {run_dir}", "the run_dir that `run` printed", "check --run-dir")
    validate = _room("rl_engine.checks.validate", "validate")
    return validate.main(run_dir, seal=args.seal, rescore=rescore, expect_root=args.expect_root, json_output=args.json)


def _report(args: argparse.Namespace) -> int:
    from rl_engine.config.paths import Value

    report = _room("rl_engine.report.cli", "report")
    args.option_mode = "consistency"  # only the paths are asked for
    paths = {value.name: value for value in _resolve(args)[0].values if isinstance(value, Value)}
    output = Path(args.output) if args.output else None
    return report.main(
        Path(str(paths["output_root"].value)),
        include_unsealed=args.include_unsealed,
        output=output,
        json_output=args.json,
        tensorboard=args.tensorboard,
    )


def _compare(args: argparse.Namespace) -> int:
    from rl_engine.records.errors import UserError

    for folder in (args.a, args.b):
        if not Path(folder).is_dir():
            raise UserError(f"no run directory {folder}", "two run directories", "check the two arguments")
    return _room("rl_engine.checks.compare", "compare").main(Path(args.a), Path(args.b), args.json)


def _detached(args: argparse.Namespace) -> int:
    room = _room("rl_engine.orchestrators.detached", args.verb)
    return getattr(room, args.verb)(args.run, output_root=_output_root(args), json_output=args.json)


def _forward(verb: str, rest: list[str]) -> int:
    """Verbs whose own room parses their arguments."""
    if verb == "bench":
        import subprocess

        from rl_engine.config.paths import INSTALLED, REPOSITORY
        from rl_engine.records.errors import UserError

        if INSTALLED or not (REPOSITORY / "benchmarks" / "__main__.py").is_file():
            if {"-h", "--help"} & set(rest[:1]):
                print("usage: rlk-repro bench ...\n\nSide-by-side benchmarks; they need a clone of the repository.")
                return 0
            raise UserError("bench", "a checkout with benchmarks/", "run it from a clone of the repository")
        if {"-h", "--help"} & set(rest[:1]):
            sys.path.insert(0, str(REPOSITORY))
            from benchmarks.__main__ import parser

            parser().parse_args(rest[:1])
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        return subprocess.call([sys.executable, "-m", "benchmarks", *rest], env={**os.environ, "PYTHONPATH": path})
    modules = {
        "qualify": "rl_engine.qualify.cli",
        "diagnose": "rl_engine.diagnose.cli",
        "locate": "rl_engine.diagnose.locate_cli",
    }
    return _room(modules[verb], verb).main(rest)


_VERBS = {
    "plan": _plan,
    "run": _run,
    "prepare": _prepare,
    "doctor": _doctor,
    "verify": _verify,
    "validate": _validate,
    "report": _report,
    "compare": _compare,
    "attach": _detached,
    "stop": _detached,
    "qualify": lambda args: _forward("qualify", []),
    "diagnose": lambda args: _forward("diagnose", []),
    "locate": lambda args: _forward("locate", []),
    "bench": lambda args: _forward("bench", []),
}


if __name__ == "__main__":
    sys.exit(main())
