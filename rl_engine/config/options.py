"""Every run option in one table: flag, aliases, kind, default, limits and help.

The parser, the profile schema, the precedence rules and the reference page all read this table. Standard library
only, and readable by Python 3.8, so that ``--help`` answers without an environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Union

from rl_engine.numerics import providers
from rl_engine.records.errors import UserError

Scalar = Union[str, int, float, bool]  # noqa: UP007 - Python 3.8 evaluates this line

BIG = float(2**31 - 1)  # no more than a 32-bit counter holds; too large to be worth saying
NUMBER = re.compile(r"[+-]?(\d|\.\d|nan$|inf)[\d.eE+-]*(inity)?\Z", re.IGNORECASE)  # no blanks, no 1_000

OPERATORS = providers.OPERATORS
FUSED_OPERATORS = providers.FUSED


@dataclasses.dataclass(frozen=True)
class Option:
    """One run option.

    Attributes:
        name: key in a profile's ``defaults`` and in the code; the primary flag with underscores.
        flags: primary flag first, then aliases.
        kind: ``int``, ``float``, ``str``, ``choice`` or ``switch`` (present or absent; true or false in a profile).
        default: value when nothing else gives one; None where ``derived`` says how it is computed instead.
        help: one sentence.
        choices: allowed words of a ``choice``.
        low, high: limits; ``low_open`` excludes ``low`` itself.
        derived: in words, how the value follows from others when nothing gives it.
    """

    name: str
    flags: tuple[str, ...]
    kind: str
    default: Scalar | None
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    derived: str = ""

    @property
    def flag(self) -> str:
        """The primary spelling."""
        return self.flags[0]

    def expected(self) -> str:
        """What a right value looks like, in words."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "switch":
            return "true or false"
        if self.kind == "str":
            return "a non-empty text"
        if self.name == "rollout_top_k":
            return "-1 (no filter) or a whole number of at least 1"
        noun = "a whole number" if self.kind == "int" else "a finite number"
        if self.low is not None and self.high is not None and self.high != BIG:
            return f"{noun} in {'(' if self.low_open else '['}{self.low:.10g}, {self.high:.10g}]"
        if self.low is not None:
            return f"{noun} {'above' if self.low_open else 'of at least'} {self.low:g}"
        return noun

    def convert(self, raw: object, origin: str) -> Scalar:
        """The typed value of ``raw`` (text from a flag, or a JSON value from a profile).

        Raises:
            UserError: wrong type, not a number, not finite, outside the limits or not a known word.
        """
        value = _typed(self, raw)
        if value is None or not self._within(value):
            large = self.high == BIG and isinstance(value, int) and value > BIG
            expected = f"at most {BIG:.0f}" if large else self.expected()
            raise UserError(f"{origin} {_shown(raw)}", expected, self._hint(raw))
        return value

    def _within(self, value: Scalar) -> bool:
        if self.kind == "choice":
            return value in self.choices
        if isinstance(value, (bool, str)):
            return True
        if not math.isfinite(value):
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.name == "rollout_top_k" and value == 0:
            return False
        return self.high is None or value <= self.high

    def _hint(self, raw: object) -> str:
        if self.kind == "choice":
            return nearest(str(raw), self.choices, f"{self.flag} {self.choices[0]}")
        if self.name == "rollout_temperature":
            return "greedy decoding (temperature 0) has no log-probability to compare; try --temperature 0.7"
        if self.name == "rollout_top_k":
            return "leave it out to keep every token"
        example = self.default if self.default is not None else "1"
        return f"for example {self.flag} {example}"


def _shown(raw: object) -> str:
    if isinstance(raw, bool):
        return "true" if raw else "false"
    return repr(raw) if not isinstance(raw, str) or raw.strip() != raw or not raw else raw


def _typed(option: Option, raw: object) -> Scalar | None:
    """``raw`` in the option's type, or None when it cannot be."""
    if option.kind == "switch":
        return raw if isinstance(raw, bool) else None
    if option.kind in ("str", "choice"):
        return raw if isinstance(raw, str) and raw.strip() and "\0" not in raw else None
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
        return None
    if isinstance(raw, str) and not NUMBER.match(raw):
        return None
    try:
        if option.kind == "int":
            if isinstance(raw, float):
                return None
            value = int(raw) if len(str(raw)) < 20 else None
            return value if value is not None and abs(value) < 2**63 else None
        return float(raw)
    except (ValueError, OverflowError):
        return None


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """``did you mean X?`` for the known word closest to ``word``, else ``otherwise``."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {match[0]}?" if match else otherwise


def _opt(
    flags: str,
    kind: str,
    default: Scalar | None,
    help: str,
    low: float | None = None,
    high: float | None = None,
    choices: str = "",
    low_open: bool = False,
    derived: str = "",
) -> Option:
    names = tuple(flags.split("/"))
    return Option(
        names[0][2:].replace("-", "_"), names, kind, default, help, tuple(choices.split()), low, high, low_open, derived
    )


OPTIONS: tuple[Option, ...] = (
    _opt("--backend", "choice", None, "device kind", choices="cpu cuda rocm", derived="the device of this machine"),
    _opt("--stack", "choice", "builtin", "engines of both sides, by one name", choices="builtin megatron-vllm vime"),
    _opt("--train-engine", "str", None, "installed engine that trains", derived="the stack's"),
    _opt("--rollout-engine", "str", None, "installed engine that generates", derived="the stack's"),
    _opt("--mode", "choice", "consistency", "native, consistency or both", choices="native consistency paired"),
    _opt("--rollouts/--steps/--num-rollout", "int", 200, "GRPO updates", 1, BIG),
    _opt("--seed", "int", 1234, "seed of data order and initial state", 0, BIG),
    _opt("--rollout-seed", "int", 1234, "seed of the sampling noise", 0, BIG),
    _opt("--tp-size/--tp", "int", 4, "training tensor parallel ranks", 1, 65536),
    _opt("--cp-size/--cp", "int", None, "training context parallel ranks", 1, 65536, derived="training ranks / TP"),
    _opt("--rollout-tp-size/--rollout-tp", "int", 4, "tensor parallel ranks of one rollout engine", 1, 65536),
    _opt("--rollout-cp-size/--rollout-cp", "int", 1, "context parallel ranks of one rollout engine", 1, 65536),
    _opt("--rollout-temperature/--temperature", "float", 1.0, "sampling temperature", 0.0, low_open=True),
    _opt("--rollout-top-p/--top-p", "float", 1.0, "nucleus mass; 1 keeps every token", 0.0, 1.0, low_open=True),
    _opt("--rollout-top-k/--top-k", "int", -1, "tokens kept, or -1 for all", -1, BIG),
    _opt("--rollout-stop/--stop", "str", "", "text that ends a response; several as a JSON list of texts"),
    _opt("--samples-per-prompt", "int", 8, "responses per prompt (the GRPO group)", 1, BIG),
    _opt("--rollout-batch-size", "int", 1, "prompts per update", 1, BIG),
    _opt(
        "--global-batch-size",
        "int",
        None,
        "samples per update",
        1,
        BIG,
        derived="rollout-batch-size x samples-per-prompt",
    ),
    _opt("--max-response-len/--max-response-length", "int", 7168, "longest response (tokens)", 1, BIG),
    _opt(
        "--max-tokens-per-gpu",
        "int",
        None,
        "token budget of a micro-batch per rank",
        1,
        BIG,
        derived="longest fold unit or sample / CP, at least 1024 / CP; 1024 // CP on vime",
    ),
    _opt("--fold-tokens", "int", None, "tokens of one gradient fold unit (contract)", 1, BIG, derived="the contract's"),
    _opt(
        "--vllm-gpu-memory-utilization",
        "float",
        None,
        "share of device memory of a rollout engine",
        0.0,
        1.0,
        low_open=True,
        derived="0.4; 0.2 when training TP is 1 and rollout TP is not; 0.25 with --pd",
    ),
    _opt("--lr", "float", 5e-7, "learning rate", 0.0, low_open=True),
    _opt("--weight-decay", "float", 0.1, "AdamW weight decay", 0.0),
    _opt("--kl-coef", "float", 0.0, "weight of the KL term; 0 loads no reference model", 0.0),
    _opt(
        "--grpo-std-normalization",
        "choice",
        "enabled",
        "divide advantages by the deviation",
        choices="enabled disabled",
    ),
    _opt("--require-updates", "switch", False, "fail unless the weights really changed"),
    _opt(
        "--gradients",
        "choice",
        "invariant",
        "gradients equal over layouts, or only run to run",
        choices="invariant deterministic",
    ),
    _opt("--checkpoint-every", "int", 1, "steps between saved trainer states, for --resume; 0 saves none", 0, BIG),
    _opt("--native", "str", "", "operators that stay stock: OP[,OP...][@train|@rollout]"),
    _opt("--native-deterministic", "switch", False, "native with the engines' determinism flags"),
    _opt("--require-control", "switch", False, "paired: fail when native shows no mismatch either"),
    _opt("--oversubscribe", "switch", False, "several ranks may share a device"),
    _opt("--data-source", "choice", "jsonl", "where prompts come from", choices="arithmetic jsonl"),
    _opt("--threads", "int", None, "CPU threads of every process", 1, 1024, derived="cores of this machine"),
    _opt("--run-id", "str", None, "name of the run directory", derived="<mode>-tp<T>cp<C>-<UTC time>"),
    _opt("--ray-address", "str", None, "Ray Jobs address", derived="profile's ray_address, RAY_API_SERVER_ADDRESS"),
    _opt("--ray-port", "int", 0, "port of our own Ray head; 0 takes a free one", 0, 65535),
    _opt("--ray-dashboard-port", "int", 0, "port of our own Ray dashboard; 0 takes a free one", 0, 65535),
    _opt("--allow-dirty", "switch", False, "development: accept modified sources"),
    _opt("--pd", "switch", False, "experimental: separate prefill and decode engines"),
)

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}

# A verb's own defaults rank between the environment and the profile: they are what the verb means.
VERB_DEFAULTS: dict[str, dict[str, Scalar]] = {
    "verify": {"rollouts": 2, "require_updates": True, "kl_coef": 0.01, "max_response_len": 512},
}


def native_override(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Operators that ``--native`` keeps stock, as (on the trainer, in the rollout engine).

    Raises:
        UserError: an unknown operator or side.
    """
    train: list[str] = []
    rollout: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        operator, _, side = part.partition("@")
        if operator not in OPERATORS:
            raise UserError(
                f"--native {part}",
                "one of " + ", ".join(OPERATORS),
                nearest(operator, OPERATORS, "for example --native attention"),
            )
        if side not in ("", "train", "rollout"):
            raise UserError(f"--native {part}", "@train or @rollout after the operator", f"--native {operator}@train")
        if side != "rollout":
            train.append(operator)
        if side != "train":
            rollout.append(operator)
    return tuple(train), tuple(rollout)


def stop_strings(text: str) -> tuple[str, ...]:
    """Texts of ``--rollout-stop``: none, ``text`` itself, or those of a JSON list.

    Raises:
        UserError: a list that is no JSON, or holds anything but non-empty texts.
    """
    if not text.startswith("["):
        return (text,) if text else ()
    try:
        stops = json.loads(text)
    except (ValueError, RecursionError):
        stops = None
    if not isinstance(stops, list) or not stops or any(not isinstance(stop, str) or not stop for stop in stops):
        example = """for example '["\\n\\n", "User:"]'"""
        raise UserError(f"--rollout-stop {text[:60]}", "a text, or a JSON list of non-empty texts", example)
    return tuple(stops)


def flags_of(options: Sequence[Option]) -> tuple[str, ...]:
    """Every spelling of ``options``."""
    return tuple(flag for option in options for flag in option.flags)
