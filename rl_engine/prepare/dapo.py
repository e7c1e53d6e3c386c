"""DAPO-Math-17k: parquet to prompt lines, each row once, with a manifest beside the output."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rl_engine.prepare.download import download, file_sha256
from rl_engine.records.errors import UserError
from rl_engine.records.private import check_place, open_shared

Talk = Callable[[str], None]

MANIFEST_SCHEMA = "rlkernel.dapo_math_17k.v1"
DATASET = "BytedTsinghua-SIA/DAPO-Math-17k"
DATASET_FILE = "data/train-00000-of-00001.parquet"
DEFAULT_URL = f"https://huggingface.co/datasets/{DATASET}/resolve/main/{DATASET_FILE}"
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What the output was made from; written beside it as ``<output>.manifest.json``."""

    schema_version: str
    source: str
    source_sha256: str
    rows_read: int
    rows_written: int
    duplicates_removed: int
    output: str
    output_sha256: str


def manifest_path(output: Path) -> Path:
    """``<output>.manifest.json``."""
    return output.with_name(output.name + ".manifest.json")


def prepare_dapo(output: Path, url: str, sha256: str | None, talk: Talk) -> Manifest:
    """Downloads and converts the dataset unless ``output`` is there as its manifest says.

    Raises:
        UserError: a changed output, a failed download, or a row that is not what it must be (the row is named).
    """
    known = read_manifest(output)
    if known is not None and output.exists():
        if file_sha256(output) == known.output_sha256:
            talk(f"prompts: {output} is there ({known.rows_written:,} rows)")
            return known
        raise UserError(
            f"{output} that differs from its manifest",
            "the file as it was written",
            "move it away and run prepare again",
        )
    if output.exists():
        raise UserError(
            f"{output} without a manifest",
            "a file that prepare made, or none",
            "move it away, or pass it as --prompt-data to run",
        )
    source = output.with_name("dapo-math-17k.parquet")
    source_sha256 = download(url, source, sha256, talk) if not source.exists() else _checked(source, sha256)
    return convert(source, source_sha256, url, output, talk)


def _checked(source: Path, sha256: str | None) -> str:
    found = file_sha256(source)
    if sha256 is not None and found != sha256:
        raise UserError(f"{source} with SHA-256 {found}", sha256, "move it away and run prepare again")
    return found


def read_manifest(output: Path) -> Manifest | None:
    """The manifest beside ``output``; None when there is none.

    Raises:
        UserError: a manifest that cannot be understood.
    """
    file = manifest_path(output)
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        manifest = Manifest(**body)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"manifest {file} ({error})", MANIFEST_SCHEMA, "move it and its data file away, then run prepare again"
        ) from None
    if manifest.schema_version != MANIFEST_SCHEMA:
        raise UserError(
            f"manifest {file} of schema {manifest.schema_version}", MANIFEST_SCHEMA, "move it and its data file away"
        )
    return manifest


def convert(source: Path, source_sha256: str, url: str, output: Path, talk: Talk) -> Manifest:
    """Writes one line per distinct ``extra_info.index`` (its first row) to ``output``, then the manifest.

    Raises:
        UserError: not parquet, a missing column, or a malformed row.
    """
    check_place(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    seen: set[str] = set()
    read = 0
    with open(partial, "w", encoding="utf-8", opener=open_shared) as stream:
        for read, row in enumerate(_rows(source), start=1):
            line = _line(row, read, source)
            index = json.dumps(line["source_index"])
            if index not in seen:
                seen.add(index)
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    if not seen:
        raise UserError(f"{source} without rows", "at least one", "check --data-url")
    manifest = Manifest(
        MANIFEST_SCHEMA, url, source_sha256, read, len(seen), read - len(seen), output.name, file_sha256(partial)
    )
    os.replace(partial, output)
    staged = manifest_path(output).with_name(manifest_path(output).name + ".partial")
    with open(staged, "w", encoding="utf-8", opener=open_shared) as stream:
        stream.write(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")
    os.replace(staged, manifest_path(output))
    talk(f"prompts: {len(seen):,} rows in {output} ({read - len(seen):,} duplicates removed)")
    return manifest


def _rows(source: Path) -> Iterator[dict[str, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(source)
        missing = [name for name in COLUMNS if name not in table.schema_arrow.names]
        if missing:
            raise UserError(
                f"{source} without column {', '.join(missing)}", "columns " + ", ".join(COLUMNS), "check --data-url"
            )
        for batch in table.iter_batches(batch_size=1024, columns=list(COLUMNS)):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{source} that is not parquet ({str(error).splitlines()[0]})",
            "a parquet file",
            "remove it and run prepare again",
        ) from None


def _line(row: dict[str, object], number: int, source: Path) -> dict[str, object]:
    def wrong(what: str, expected: str) -> UserError:
        return UserError(
            f"row {number} of {source} with {what}", expected, "the dataset is damaged or another one; check --data-url"
        )

    prompt, reward, extra = row["prompt"], row["reward_model"], row["extra_info"]
    if not isinstance(prompt, list) or not prompt:
        raise wrong(f"prompt {str(prompt)[:40]!r}", "a non-empty list of messages")
    if (
        not isinstance(reward, dict)
        or not isinstance(reward.get("ground_truth"), str)
        or not reward["ground_truth"].strip()
    ):
        raise wrong("no reward_model.ground_truth", "a non-empty text")
    if not isinstance(extra, dict) or extra.get("index") is None:
        raise wrong("no extra_info.index", "an index")
    return {
        "prompt": prompt,
        "label": reward["ground_truth"],
        "data_source": row["data_source"],
        "ability": row["ability"],
        "source_index": extra["index"],
        "reward_style": reward.get("style"),
    }
