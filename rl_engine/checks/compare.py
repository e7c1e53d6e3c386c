"""``compare A B``: what two runs share and where they first differ, across modes, topologies and machines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_engine.checks.gates.evidence import locate
from rl_engine.checks.seal import verify_seal
from rl_engine.numerics.bits import compare_bits
from rl_engine.records import paths
from rl_engine.records.codec import encode
from rl_engine.records.errors import printable
from rl_engine.records.reader import RunReader
from rl_engine.records.types import EnvironmentRecord, SampleBatch, StepRecord

# What a rerun of the same experiment may change.
_LABELS = ("run_id", "run_dir", "model_root", "python", "pair_id", "output_root", "paths")
_SAMPLE_FIELDS = ("tokens", "loss_mask", "rollout_logprob", "train_logprob")
_COMPARED = ("identities", *_SAMPLE_FIELDS, "retained sets", "rewards")
_STEP_FIELDS = ("loss", "grad_norm_hex", "reward_mean", "entropy_mean")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One quantity that differs: ``where`` is its first place, ``a`` and ``b`` the values there (hex for tensors)."""

    quantity: str
    where: str
    a: str
    b: str
    count: int
    total: int


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """Two runs. ``setting`` differences (plan, machine) explain; ``results`` differences decide the exit code, and so
    does a broken seal: ``seals`` names it in words."""

    a: str
    b: str
    equal: tuple[str, ...]
    setting: tuple[Difference, ...]
    results: tuple[Difference, ...]
    seals: tuple[str, ...] = ()


def compare_runs(run_a: Path | str, run_b: Path | str) -> RunComparison:
    """Compare plans, machines, samples, steps and weights of two runs, from their records.

    Raises:
        UserError: not a run directory, or damaged records.
    """
    a, b = RunReader(run_a), RunReader(run_b)
    equal: list[str] = []
    setting = _settings(a, b, equal)
    results = [*_sample_results(a, b, equal), *_step_results(a, b, equal), *_weight_results(a, b, equal)]
    seals = [f"{name}: {words}" for name, reader in (("A", a), ("B", b)) if (words := _broken_seal(reader))]
    return RunComparison(a.run_id, b.run_id, tuple(equal), tuple(setting), tuple(results), tuple(seals))


def main(run_a: Path | str, run_b: Path | str, json_output: bool = False) -> int:
    """The verb ``compare``: print the comparison; 0 when every result is equal and no seal is broken, else 1."""
    result = compare_runs(run_a, run_b)
    code = 1 if result.results or result.seals else 0
    if json_output:
        print(json.dumps(encode(result), indent=1))
        return code
    print(f"A: {result.a}\nB: {result.b}")
    for name in result.equal:
        print(f"equal: {name}")
    for kind, differences in (("setting", result.setting), ("differs", result.results)):
        for d in differences:
            counted = f" ({d.count} of {d.total} differ)" if d.total else ""
            print(f"{kind}: {d.quantity}{' at ' + d.where if d.where else ''}: A {d.a}, B {d.b}{counted}")
    for words in result.seals:
        print(f"broken seal: {words}")
    print("results: " + ("different" if result.results else "equal"))
    return code


def _broken_seal(reader: RunReader) -> str:
    """What is wrong with the seal of a run that has one or had one; empty for nothing."""
    if reader.sealed:
        return "; ".join(finding.found for finding in verify_seal(reader.run_dir) if finding.status == "FAIL")
    gone = "sealed" in {state.name for state in reader.states()}
    return f"sealed once, and no {paths.COMPLETE}" if gone else ""


def _settings(a: RunReader, b: RunReader, equal: list[str]) -> list[Difference]:
    found = []
    for title, left, right in (
        ("plan", dict(_flatten(a.plan().plan)), dict(_flatten(b.plan().plan))),
        ("machine", _machine(a.environments()), _machine(b.environments())),
    ):
        names = sorted((set(left) | set(right)) - set(_LABELS))
        different = [name for name in names if left.get(name) != right.get(name)]
        if not different:
            equal.append(f"{title} ({len(names)} values)")
        found += [
            Difference(_short(f"{title}.{name}"), "", _short(left.get(name)), _short(right.get(name)), 1, 0)
            for name in different
        ]
    return found


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    # An explicit stack: a stranger's plan may be nested deeper than the interpreter's recursion limit.
    pending = [(prefix, value)]
    while pending:
        name, item = pending.pop()
        if isinstance(item, dict):
            pending += [(f"{name}.{key}" if name else str(key), inner) for key, inner in item.items()]
        elif isinstance(item, list) and item and all(_is_pair(entry) for entry in item):
            pending += [(f"{name}.{entry[0]}", entry[1]) for entry in item]
        else:
            yield name, item


def _is_pair(entry: Any) -> bool:
    """A (name, value) pair, the form of a plan's tables."""
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)


def _machine(records: list[EnvironmentRecord]) -> dict[str, Any]:
    values: dict[str, set[str]] = {}
    for record in records:
        facts = {"device": record.device, "driver": str(record.driver), "python": record.python}
        facts["platform"] = record.platform
        if record.role != "driver":
            facts["qualification"] = str(record.qualification_digest)
        facts |= {f"version {name}": version for name, version in record.versions.items()}
        for source in record.sources:
            facts[f"source {source.name}"] = f"{source.revision} {source.diff_hash or 'clean'}"
        for name, value in facts.items():
            values.setdefault(name, set()).add(value)
    return {name: ", ".join(sorted(found)) for name, found in values.items()}


def _sample_results(a: RunReader, b: RunReader, equal: list[str]) -> list[Difference]:
    steps_a, steps_b = a.sample_steps(), b.sample_steps()
    first: dict[str, Difference] = {}
    if steps_a != steps_b:
        first["steps"] = Difference("steps", "", str(len(steps_a)), str(len(steps_b)), 0, 0)
    common = sorted(set(steps_a) & set(steps_b))
    judged = set(_COMPARED)
    for step in common:
        differences, here = _batch_differences(step, a.samples(step), b.samples(step))
        judged &= here
        for difference in differences:
            first.setdefault(difference.quantity, difference)
    # Only what could be compared in every common step is said to be equal.
    shown = [name for name in _COMPARED if name in judged and name not in first]
    if shown and common:
        equal.append(f"samples of {len(common)} steps: {', '.join(shown)}")
    return list(first.values())


def _batch_differences(step: int, a: SampleBatch, b: SampleBatch) -> tuple[list[Difference], set[str]]:
    """(the first difference of each quantity, the quantities that could be compared)."""
    keys_a, keys_b = ([(s.prompt_index, s.sample_index, s.seed) for s in batch.samples] for batch in (a, b))
    if keys_a != keys_b:
        index = next((i for i, (x, y) in enumerate(zip(keys_a, keys_b, strict=False)) if x != y), len(keys_a))
        x, y = (str(keys[index]) if index < len(keys) else "none" for keys in (keys_a, keys_b))
        where = f"step {step} sample {index} (prompt, sample, seed)"
        return [Difference("identities", where, x, y, 1, len(keys_a))], {"identities"}
    found = list(_reward_difference(step, a, b))
    if not np.array_equal(a.offsets, b.offsets):
        return [_first_token(step, a, b), *found], {"identities", "rewards", "tokens"}
    for name in _SAMPLE_FIELDS:
        left, right = getattr(a, name), getattr(b, name)
        result = compare_bits(left, right)
        if result.first_index is not None:
            first = result.first_index[0]
            whole = left.dtype.kind in "iu"  # ids and masks are read as numbers, logprobs as bits
            shown = (str(left[first]), str(right[first])) if whole else (result.a_hex, result.b_hex)
            found.append(Difference(name, f"step {step} {locate(a, first)}", *shown, result.count, result.total))
    return [*found, *_retained_difference(step, a, b)], set(_COMPARED)


def _reward_difference(step: int, a: SampleBatch, b: SampleBatch) -> Iterator[Difference]:
    pairs = [(left.reward.hex(), right.reward.hex()) for left, right in zip(a.samples, b.samples, strict=True)]
    different = [index for index, (left, right) in enumerate(pairs) if left != right]
    if different:
        left, right = pairs[different[0]]
        yield Difference("rewards", f"step {step} sample {different[0]}", left, right, len(different), len(pairs))


def _first_token(step: int, a: SampleBatch, b: SampleBatch) -> Difference:
    """The first token where samples of different lengths part."""
    for index in range(len(a.samples)):
        x, y = (batch.tokens[batch.offsets[index] : batch.offsets[index + 1]] for batch in (a, b))
        common = min(x.size, y.size)
        other = np.flatnonzero(x[:common] != y[:common])
        if other.size or x.size != y.size:
            token = int(other[0]) if other.size else common
            where = f"step {step} {locate(a, int(a.offsets[index]))}".rsplit(" token", 1)[0]
            return Difference("tokens", f"{where} token {token}", _token(x, token), _token(y, token), 1, 0)
    raise AssertionError("offsets differ but no sample does")


def _token(row: npt.NDArray[np.int32], index: int) -> str:
    return str(row[index]) if index < row.size else "the end"


def _retained_difference(step: int, a: SampleBatch, b: SampleBatch) -> Iterator[Difference]:
    if a.retained is None or b.retained is None:
        if (a.retained is None) != (b.retained is None):
            x, y = ("none" if batch.retained is None else "recorded" for batch in (a, b))
            yield Difference("retained sets", f"step {step}", x, y, 1, 0)
        return
    for position in np.flatnonzero(a.loss_mask).tolist():
        rows = [
            batch.retained.ids[batch.retained.offsets[position] : batch.retained.offsets[position + 1]]
            for batch in (a, b)
            if batch.retained is not None
        ]
        if not np.array_equal(rows[0], rows[1]):
            only = sorted(set(rows[0].tolist()) ^ set(rows[1].tolist()))
            where = f"step {step} {locate(a, position)}, id {only[0]}"
            yield Difference("retained sets", where, f"{rows[0].size} ids", f"{rows[1].size} ids", 1, 0)
            return


def _step_results(a: RunReader, b: RunReader, equal: list[str]) -> list[Difference]:
    pairs = list(zip(a.steps(), b.steps(), strict=False))
    found = []
    for name in _STEP_FIELDS:
        different = [(x, y) for x, y in pairs if _bits_of(x, name) != _bits_of(y, name)]
        if not different:
            equal.append(f"steps: {name}")
            continue
        x, y = different[0]
        shown = (_bits_of(x, name), _bits_of(y, name))
        found.append(Difference(f"steps: {name}", f"step {x.step}", *shown, len(different), len(pairs)))
    return found


def _bits_of(record: StepRecord, name: str) -> str:
    value = getattr(record, name)
    return value.hex() if isinstance(value, float) else str(value)


def _weight_results(a: RunReader, b: RunReader, equal: list[str]) -> list[Difference]:
    weights_a, weights_b = a.weights(), b.weights()
    if sorted(weights_a) != sorted(weights_b):
        shown = (str(sorted(weights_a)[-1:]), str(sorted(weights_b)[-1:]))
        return [Difference("weight versions", "last version", *shown, 1, 0)]
    for version, record in weights_a.items():
        left, right = record.tensors, weights_b[version].tensors
        names = sorted(set(left) | set(right))
        different = [name for name in names if left.get(name) != right.get(name)]
        if different:
            name = different[0]
            shown = (_short(left.get(name)), _short(right.get(name)))
            where = f"version {version} tensor {_short(name)}"
            return [Difference("weights", where, *shown, len(different), len(names))]
    equal.append(f"weights of {len(weights_a)} versions")
    return []


def _short(value: Any) -> str:
    text = "nothing" if value is None else printable(str(value))
    return text if len(text) <= 100 else text[:97] + "..."
