"""Quantized tensors were read as plain numbers, and tensors that nothing reads were dropped. Headers show both."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rl_engine.checks import doctor_inputs
from rl_engine.config.model_facts import check_tensors
from rl_engine.entrypoints.parser import parse
from rl_engine.entrypoints.repro import _resolve, main
from rl_engine.families.config import read_config
from rl_engine.families.refusal import WeightMismatch
from rl_engine.families.tensors import check_headers, read_headers
from rl_engine.records.errors import UserError
from tests.helpers.checkpoints import write_config, write_model

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "I32": 4, "F64": 8}
Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def write_file(path: Path, tensors: Tensors) -> None:
    """A safetensors file of zeros: any type that the format knows."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def model(folder: Path, change: Tensors, **config: object) -> Path:
    """A tiny bf16 model, some of whose tensors are of another type or shape, or more."""
    shapes = read_config(write_config(folder, **config)).tensor_shapes()
    write_file(folder / "model.safetensors", {**{name: ("BF16", shape) for name, shape in shapes.items()}, **change})
    return folder


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        ({Q + ".weight": ("F8_E4M3", (64, 64))}, {}, "q_proj.weight holds F8_E4M3"),
        ({Q + ".weight": ("F8_E5M2", (64, 64))}, {}, "q_proj.weight holds F8_E5M2"),
        ({Q + ".weight": ("I8", (64, 64))}, {}, "q_proj.weight holds I8"),
        ({Q + ".weight": ("U8", (64, 64))}, {}, "q_proj.weight holds U8"),
        ({Q + ".weight_scale_inv": ("F32", (1, 1))}, {}, "weight_scale_inv, a scale of quantized weights"),
        ({Q + ".weight_scale": ("F32", (64, 1))}, {}, "a scale of quantized weights"),
        ({Q + ".qzeros": ("I32", (1, 8))}, {}, "a scale of quantized weights"),
        ({Q + ".bias": ("BF16", (64,))}, {}, f"a bias, {Q}.bias"),
        ({"model.layers.1.mlp.down_proj.bias": ("BF16", (64,))}, {}, "a bias"),
        (
            {"model.layers.0.self_attn.q_norm.weight": ("BF16", (16,))},
            {},
            "nothing reads, model.layers.0.self_attn.q_norm",
        ),
        ({"model.layers.2.input_layernorm.weight": ("BF16", (64,))}, {}, "nothing reads, model.layers.2"),
        ({"base_model.model.x.lora_A.weight": ("BF16", (8, 64))}, {}, "nothing reads, base_model"),
        ({"lm_head.bias": ("BF16", (1000,))}, {}, "a bias, lm_head.bias"),
        ({"lm_head.weight": ("BF16", (999, 64))}, {"tie_word_embeddings": True}, "lm_head.weight has shape (999, 64)"),
        ({"model.norm.weight": ("BF16", (65,))}, {}, "model.norm.weight has shape (65,)"),
        ({"\x1b[2J": ("BF16", (1,))}, {}, r"\x1b[2J"),
    ],
    ids=lambda value: str(value)[:60].encode("unicode_escape").decode(),
)
def test_refused(change: Tensors, config: dict[str, object], words: str, tmp_path: Path) -> None:
    assert check_tensors(model(tmp_path / "good", {}, **config)) == 21 - len(config)
    folder = model(tmp_path / "bad", change, **config)
    with pytest.raises(UserError) as caught:
        check_tensors(folder)
    assert words in caught.value.found
    assert caught.value.found.isprintable()


def test_what_may_be_beside(tmp_path: Path) -> None:
    """Frequencies that the config gives, and a second copy of a tied head."""
    unread = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (8,)), "lm_head.weight": ("BF16", (1000, 64))}
    assert check_tensors(model(tmp_path, unread, tie_word_embeddings=True)) == 22


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_plain_types(dtype: str, tmp_path: Path) -> None:
    assert check_tensors(model(tmp_path, {Q + ".weight": (dtype, (64, 64))})) == 21


def test_a_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    """Scales that only a shard's own header names, and one tensor in two files."""
    shapes = read_config(write_config(tmp_path)).tensor_shapes()
    names = list(shapes)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, held in parts.items():
        write_file(tmp_path / file, {name: ("BF16", shapes[name]) for name in held})
    index = {name: file for file, held in parts.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = read_config(tmp_path)
    check_headers(config, read_headers(tmp_path), tmp_path)
    last = {name: ("BF16", shapes[name]) for name in names[9:]}
    write_file(tmp_path / "b.safetensors", {**last, Q + ".weight_scale": ("F32", (64, 1))})
    with pytest.raises(WeightMismatch, match="a scale of quantized weights"):
        check_headers(config, read_headers(tmp_path), tmp_path)
    write_file(tmp_path / "b.safetensors", {**last, names[0]: ("BF16", shapes[names[0]])})
    with pytest.raises(WeightMismatch, match=r"in a\.safetensors and b\.safetensors"):
        read_headers(tmp_path)


def test_doctor_and_run_say_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = write_model(tmp_path / "good"), model(tmp_path / "bad", {Q + ".weight": ("F8_E4M3", (64, 64))})
    for folder, status in ((good, "PASS"), (bad, "FAIL")):
        subject = _resolve(parse(["plan", "--model-root", str(folder)]))[-1]
        found = {finding.name: finding for finding in doctor_inputs.checkpoint(subject)}["model tensors"]
        assert (found.status, "F8_E4M3" in found.found) == (status, folder == bad)
    assert main(["run", "--model-root", str(bad), "--mode", "consistency"]) == 2
    assert "q_proj.weight holds F8_E4M3, quantized" in capsys.readouterr().err
