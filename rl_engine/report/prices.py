"""What exactness costs, from files beside the runs: benchmark results and a GPU's qualification record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

BENCH, GPU_BENCH = "rlkernel.bench.v1", "rlkernel.gpu.v1"
QUALIFICATION = {"identity", "levels", "prices", "refuted"}  # keys of what `qualify --json` prints on a GPU


@dataclasses.dataclass(frozen=True)
class PriceRow:
    """One contestant of one case. ``speed`` is times as fast as what it is compared with (``against``), None for that
    one itself; ``seconds`` and ``per_second`` are None where only the ratio is recorded."""

    benchmark: str
    case: str
    contestant: str
    against: str
    seconds: float | None
    per_second: float | None
    unit: str
    speed: float | None


@dataclasses.dataclass(frozen=True)
class Prices:
    """Rows of every file, and the machines that they name."""

    rows: tuple[PriceRow, ...]
    machines: tuple[str, ...]


def read_prices(body: Any) -> tuple[list[PriceRow], str] | None:
    """The rows and the machine of one parsed file; None where it is no price list.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it says that it is one, and is damaged.
    """
    if not isinstance(body, dict):
        return None
    if body.get("schema") == BENCH:
        return list(_bench(body)), _machine(body.get("machine"))
    if body.get("schema") == GPU_BENCH:
        return list(_gpu(body)), _machine(body.get("device"))
    if set(body) >= QUALIFICATION:
        return list(_qualification(body)), _machine(body["identity"])
    return None


def _bench(body: dict[str, Any]) -> Iterator[PriceRow]:
    for case in body["cases"]:
        for contestant, times in case["times"].items():
            speed = case["speed"].get(contestant)
            yield PriceRow(
                benchmark=_text(body["benchmark"]),
                case=_text(case["case"]),
                contestant=_text(contestant),
                against="native",
                seconds=float(times["median"]),
                per_second=float(times["per_second"]),
                unit=_text(case["unit"]),
                speed=None if speed is None else float(speed),
            )


def _gpu(body: dict[str, Any]) -> Iterator[PriceRow]:
    """Only ratios of times: a row where smaller is better counts something else."""
    for row in body["rows"]:
        if not row["at_most"]:
            name, against = _text(row["name"]), _text(row["baseline"])
            title = f"GPU {_text(body['family'])}"
            yield PriceRow(title, name, "RL-Kernel", against, None, None, "", float(row["value"]))


def _qualification(body: dict[str, Any]) -> Iterator[PriceRow]:
    """Levels of guarantee: the record holds time against native, whose inverse is the speed."""
    for level, points in body["levels"].items():
        for rows, price in points.items():
            case = f"{_text(level)}, {_text(rows)} rows"
            yield PriceRow("qualification", case, "RL-Kernel", "native", None, None, "", 1.0 / float(price))


def _text(value: Any) -> str:
    return str(value)[:120]


def _machine(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    return ", ".join(f"{key} {item}" for key, item in value.items() if not isinstance(item, dict | list))[:1000]
