"""Names, types and shapes of a checkpoint's tensors, from the headers of its safetensors files; no value is read."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

from rl_engine.families.config import ModelConfig
from rl_engine.families.refusal import WeightMismatch, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_BYTES = 256 << 20  # of an index
DTYPES = ("BF16", "F16", "F32")
HEAD = "lm_head.weight"
DEQUANTIZED = "take the checkpoint that it was made from, or one that was dequantized to bfloat16"

# Tensors that no operator needs: pattern -> reason.
UNREAD: dict[str, str] = {
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "frequencies that the config gives exactly",
}
_SCALES = re.compile(r"scale|zero|qweight|g_idx|absmax|quant|amax")


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """One tensor: the file that holds it, its safetensors type (``BF16``) and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def files_of(folder: Path) -> dict[str, Path] | None:
    """HF tensor name -> file, as the index says; None where one file holds all.

    Raises:
        WeightMismatch: neither file is there, or the index is damaged.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise WeightMismatch(f"{folder} holds neither {SINGLE} nor {INDEX}")
        return None
    try:
        with index.open("rb") as stream:
            body = stream.read(MOST_BYTES + 1)
        if len(body) > MOST_BYTES:
            raise WeightMismatch(f"{index} of more than {MOST_BYTES} bytes")
        names = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, WeightMismatch):
            raise
        raise WeightMismatch(f"{index} is no JSON: {error}") from error
    names = names.get("weight_map") if isinstance(names, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise WeightMismatch(f"{index} holds no weight_map of tensor names to files")
    for file in names.values():
        if Path(file).name != file or not file.isprintable():
            raise WeightMismatch(f"{index} names {ascii(file)[:100]}", "a file beside it")
    return {name: folder / file for name, file in names.items()}


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of every file that the checkpoint names, whether its index lists it or not.

    Raises:
        WeightMismatch: a file is missing or damaged, a tensor is in two files or not where the index says.
    """
    from safetensors import SafetensorError, safe_open

    listed = files_of(folder)
    found: dict[str, TensorHeader] = {}
    try:
        for path in sorted(set(listed.values())) if listed is not None else [folder / SINGLE]:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    if name in found:
                        raise WeightMismatch(f"{shown(name)} in {found[name].file.name} and {path.name}", "one of them")
                    rows = file.get_slice(name)
                    found[name] = TensorHeader(path, str(rows.get_dtype()), tuple(rows.get_shape()))
    except (SafetensorError, OSError) as error:
        raise WeightMismatch(f"{folder}: {error}") from error
    for name, path in (listed or {}).items():
        if name not in found or found[name].file != path:
            raise WeightMismatch(f"{path} holds no tensor {shown(name)[1:-1]}, which {INDEX} names")
    return found


def check_headers(config: ModelConfig, headers: Mapping[str, TensorHeader], folder: Path) -> None:
    """Every tensor of the model is there once, of its shape and of a plain type, and nothing else is.

    A second copy of a tied head may be there; whoever reads the values compares it with the embedding.

    Raises:
        WeightMismatch: with the first tensor that does not fit.
    """
    shapes = config.tensor_shapes()
    copy = {HEAD: shapes["model.embed_tokens.weight"]} if config.tied else {}
    for name, header in headers.items():
        expected = shapes.get(name) or copy.get(name)
        if expected is None:
            if not any(re.fullmatch(pattern, name) for pattern in UNREAD):
                raise _unread(name)
            continue
        if header.dtype not in DTYPES:
            raise WeightMismatch(
                f"{name} holds {header.dtype}, quantized weights or no weights", " or ".join(DTYPES), DEQUANTIZED
            )
        if header.shape != expected:
            raise WeightMismatch(f"{name} has shape {header.shape}", f"{expected}")
    for name in shapes:
        if name not in headers:
            raise WeightMismatch(f"{folder} holds no tensor {name}")


def _unread(name: str) -> WeightMismatch:
    """The refusal of a tensor without which the model would be another one."""
    word = shown(name)[1:-1]
    if name.endswith(".bias"):
        return WeightMismatch(
            f"a bias, {word}, which the decoder does not compute", "a model without it", "choose another --model-root"
        )
    if _SCALES.search(name.rpartition("model.")[2]):
        return WeightMismatch(
            f"{word}, a scale of quantized weights", " or ".join(DTYPES) + " weights alone", DEQUANTIZED
        )
    return WeightMismatch(
        f"a tensor that nothing reads, {word}",
        "the tensors of the model that config.json names",
        "choose another --model-root, or merge what it belongs to (an adapter) into the weights",
    )
