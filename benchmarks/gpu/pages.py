"""The figures on docs/concepts/bitwise.md, made from the stored results; the page says where the code has moved on.

Between its marks a family without a stored result keeps what was written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import FAMILIES, ROOT, stored
from benchmarks.gpu.sources import digest, sources

PAGE = ROOT / "docs" / "concepts" / "bitwise.md"
MARKS = re.compile(r"(<!-- gpu results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def current_digest(family: str) -> str:
    """The digest of the code behind a family's figures, as it is now; none of it is imported."""
    return digest(sources(Path(ROOT, *FAMILIES[family].split(".")).with_suffix(".py")))


def table(family: str, now: Callable[[str], str] = current_digest) -> str:
    """The family's rows as a table, with the device, the state of its proofs, and whether the code has moved on."""
    result = stored(family)
    assert result is not None, f"no result of {family} is stored"
    device, proofs = result["device"], result["proofs"]
    lines = [
        f"{device['name']}, driver {device['driver']}, torch {device['torch']}, Triton {device['triton']}. "
        f"{proofs['held']:,} of {proofs['of']:,} proofs held over {proofs['outputs']:,} outputs; caught controls: "
        f"{', '.join(proofs['controls']) or 'none'}."
    ]
    if proofs["failed"]:
        lines += ["", f"**Failed**: {', '.join(proof['name'] for proof in proofs['failed'])}."]
    if result["ended"] != "complete":
        lines += ["", f"The run ended early ({result['ended']}): what follows was done by then."]
    if now(family) != result["digest"]:
        lines += ["", "**Stale**: the code has changed since; these are the figures of an earlier version."]
    lines += ["", "| Figure | value | must | aim | against |", "| --- | --- | --- | --- | --- |"]
    lines += [_line(row) for row in result["rows"]]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    bounds = ["" if row[key] is None else f"{row[key]:.3g}" for key in ("must", "aim")]
    missed = " (missed)" if row["verdict"] == "missed" else ""
    return f"| {row['name']} | {row['value']:.3f}{missed} | {bounds[0]} | {bounds[1]} | {row['baseline']} |"


def rendered(page: str, now: Callable[[str], str] = current_digest) -> str:
    """The page with every marked table made anew; one without a stored result stays as it is."""

    def section(mark: re.Match[str]) -> str:
        if stored(mark.group(2)) is None:
            return mark.group(0)
        return f"{mark.group(1)}\n{table(mark.group(2), now)}\n{mark.group(3)}"

    return MARKS.sub(section, page)


def write() -> None:
    PAGE.write_text(rendered(PAGE.read_text()))


if __name__ == "__main__":
    write()
